"""The two ways in which a command stops on purpose, and bad fields in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class UserError(ValueError):
    """Something must be changed first; each line of the message names one thing and what to do.

    Whatever reads, writes or runs for a user may raise it, and says so only here: the command line
    (:mod:`analysis.cli.main`) prints the message and ends with status 1.
    """


class Stopped(Exception):
    """A signal asked this process to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}")
        self.signum = signum


def first_problem(error: ValidationError, *, whole: str = "") -> str:
    """The first thing wrong, as ``field: what``; ``whole`` stands for a problem of no one field."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"])) or whole
    said = first["msg"].removeprefix("Value error, ")
    return f"{field}: {said}" if field else said
