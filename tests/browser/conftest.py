"""Puts this folder on the path, so that the tests import ``chrome`` and ``fabricated`` under any import mode."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
