"""The two ways in which a command stops on purpose."""

from __future__ import annotations


class Refused(ValueError):
    """Something must be changed first; each line of the message names one thing and what to do."""


class Stopped(Exception):
    """A signal asked this process to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by signal {signum}")
        self.signum = signum
