"""The KL terms of public trainers, as read: one function a path, entered where it is defined.

A further trainer is one function in one of these modules, under the decorator of
:mod:`analysis.chapters.ch14_frameworks.trainers.registry`, and no other line.
"""

from analysis.chapters.ch14_frameworks.trainers import (
    huggingface,
    openrlhf_family,
    others,
    pytorch,
    verl_family,
)
from analysis.chapters.ch14_frameworks.trainers.registry import PATHS, Option, Path, Source

#: Where they are entered, in this order.
MODULES = (huggingface, openrlhf_family, others, pytorch, verl_family)

#: The terms that are differentiated, setting by setting.
OPTIONS = tuple(option for path in PATHS if path.placement == "loss" for option in Option.of(path))
SOURCES = tuple(dict.fromkeys(path.source for path in PATHS))

__all__ = ["OPTIONS", "PATHS", "SOURCES", "Option", "Path", "Source"]
