"""Functions of the user's own, named on a command line as ``module:function``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from klamp.errors import ConfigError, shown


def imported(what: str, path: str) -> Any:
    """The function named ``path``, ``module:function``; modules of the working folder are found too.

    A ConfigError names ``what`` it was to be, the path and what is wrong with it.
    """
    module_name, _, function_name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} {path!r}: no module {error.name!r} here or installed. Run klamp in the folder that holds it."
        ) from None
    except Exception as error:  # whatever a stranger's module may raise when it is imported
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{what} {path!r}: importing {module_name} raised {type(error).__name__}: {first}. Make it import first."
        ) from error
    found = getattr(module, function_name, None)
    if not callable(found):
        known = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ConfigError(f"{what} {path!r}: {module_name} has no function {function_name!r}. It has: {shown(known)}.")
    return found
