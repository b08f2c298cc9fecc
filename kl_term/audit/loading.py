"""A function out of a user's file or module: ``my_trainer.py:loss``, ``my_trainer:Class.loss``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from kl_term.audit.calling import one_line
from kl_term.errors import UserError

#: Set where a process was copied since this module was loaded.
_FORKS: list[int] = []
os.register_at_fork(before=lambda: _FORKS.append(os.getpid()))


def load(target: str) -> Callable[..., Any]:
    """The function that a target names.

    Raises:
        UserError: one line, on what the import did instead.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise UserError(f"{target!r} names no function: say FILE.py:FUNCTION or MODULE:FUNCTION")
    found: Any = _module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            near = ", ".join(sorted(n for n in vars(found) if not n.startswith("_"))[:6])
            raise UserError(f"{place}: has no {part!r}; it has {near or 'nothing'}")
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"{target}: is a {type(found).__name__}, no function")
    return found


def _module(place: str) -> ModuleType:
    forks, pid = len(_FORKS), os.getpid()
    try:
        module = _imported(place)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{place}: fails to import: {one_line(error)}") from None
    if os.getpid() != pid:
        os._exit(1)  # a copy that the file made of us
    if len(_FORKS) > forks:
        raise UserError(f"{place}: forks while it is imported: guard that by __main__")
    return module


def _imported(place: str) -> ModuleType:
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise UserError(f"{place}: there is no such file")
    sys.path.insert(0, str(path.resolve().parent))  # what lies beside it can be imported
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{place}: is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module
