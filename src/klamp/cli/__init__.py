"""The command line: ``klamp audit`` and its sisters. Flags and help come from the signatures and docstrings here."""

from klamp.cli.main import main

__all__ = ["main"]
