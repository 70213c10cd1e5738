"""``python -m klamp``."""

from klamp.cli import main

raise SystemExit(main())
