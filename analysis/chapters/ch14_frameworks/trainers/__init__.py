"""The KL terms of public trainers, as read: one function a path, entered where it is defined.

A module of this package is found by itself, so that a further trainer is one function, under the
decorator of :mod:`analysis.chapters.ch14_frameworks.trainers.registry`, and no other line.
"""

from importlib import import_module
from pkgutil import iter_modules

from analysis.chapters.ch14_frameworks.trainers.registry import PATHS, Option, Path, Source

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

#: The terms that are differentiated, setting by setting.
OPTIONS = tuple(option for path in PATHS if path.placement == "loss" for option in Option.of(path))
SOURCES = tuple(dict.fromkeys(path.source for path in PATHS))

__all__ = ["OPTIONS", "PATHS", "SOURCES", "Option", "Path", "Source"]
