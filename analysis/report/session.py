"""What a notebook does before and between its computations: start the session, record numbers.

``start`` makes a notebook's outputs a function of its inputs (one thread, one style, no bars).
``record`` turns a number into the text that prose quotes, so that no number is typed by hand.
"""

from __future__ import annotations

import ast
import fnmatch
import re
import warnings
from collections.abc import Sequence
from functools import partialmethod
from itertools import pairwise
from typing import Any

import matplotlib
import pandas
import torch
import tqdm.notebook
import tqdm.std
from IPython import get_ipython
from myst_nb import glue

from analysis.report.figure_data import show_with_data
from kl_term import style
from kl_term.numbers import format_value, with_interval
from kl_term.plain_checks import check_choice

#: As :data:`analysis.records.choices.PROFILES`, which no chapter need depend on.
PROFILES = ("quick", "full")
#: How papermill begins the cell that it adds.
INJECTED = "# Parameters\n"
_KEY = re.compile(r"[a-z][a-z0-9_]*")

# key -> (source of the recording cell, its execution number)
_recorded: dict[str, tuple[str, int]] = {}


def start(profile: str = "quick") -> None:
    """Begin a notebook's session: one torch thread, the house style, no progress bars, no records.

    Args:
        profile: ``"quick"`` (CPU, minutes) or ``"full"``.

    Raises:
        ValueError: unknown ``profile``, or papermill was given a parameter that the notebook does
            not have.
    """
    shell = get_ipython()
    if shell is not None:
        check_injected(shell.user_ns.get("In", ()))
    check_choice("profile", profile, PROFILES)
    _recorded.clear()
    torch.set_num_threads(1)
    _silence_progress_bars()
    matplotlib.use("agg")  # a cell shows the figure it ends with, and only that one
    style.use()
    pandas.set_option("display.max_rows", None)  # a table is shown whole
    if shell is not None:
        show_with_data(shell)


def check_injected(cells: Sequence[str]) -> None:
    """Refuse a parameter that the notebook does not have, once papermill has injected it.

    Plain papermill puts what it is given into a cell of its own behind the parameters and runs on
    with the defaults.

    Args:
        cells: sources of the cells that have run, in order.

    Raises:
        ValueError: a name in papermill's cell is none of those in the cell before; the nearest is
            named.
    """
    for before, cell in pairwise(cells):
        if cell.startswith(INJECTED):
            for name in _assigned(cell):
                check_choice("a parameter given to papermill", name, _assigned(before))


def _assigned(cell: str) -> list[str]:
    names = (
        target
        for statement in ast.parse(cell).body
        for target in getattr(statement, "targets", [getattr(statement, "target", None)])
    )
    return [name.id for name in names if isinstance(name, ast.Name)]


def record(key: str, value: Any, spec: str = "") -> None:
    """Round ``value`` to text and keep it in the notebook under ``key`` for the prose to quote.

    The same notebook quotes it as ``{glue:text}`key` ``; another page as
    ``{glue:text}`path/to/notebook.ipynb::key:s` ``, where the closing ``:s`` is required.
    Running a cell again replaces its records.

    Args:
        key: lower-case letters, digits and underscores, beginning with a letter; once per notebook.
        value: a number, a tensor or array with one element, or text.
        spec: a format specification such as ``".4f"``; needed for a number that is no integer.

    Raises:
        ValueError: malformed or duplicate ``key``, NaN, more than one element, or a bad ``spec``.
    """
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"record key {key!r}: use lower-case letters, digits and underscores, a letter first"
        )
    cell = _current_cell()
    previous = _recorded.get(key)
    if previous is not None and (previous[0] != cell[0] or previous[1] == cell[1]):
        raise ValueError(
            f"record key {key!r} is used twice in this notebook; choose another name "
            "(or call session.start again if you edited the cell)"
        )
    text = format_value(key, value, spec)
    _recorded[key] = cell
    glue(key, text, display=False)


def unquoted(*patterns: str, why: str) -> None:
    """Say why records stand nowhere: else a test wants each quoted on a page.

    See :mod:`analysis.report.quoted`, which reads this line of the notebook.

    Args:
        patterns: of their keys, such as ``"equal_kl_*"``.
        why: in a few words, such as where else they are shown.

    Raises:
        ValueError: no record has such a key, or there is no reason.
    """
    if not why.strip():
        raise ValueError(f"unquoted {', '.join(patterns)}: say why")
    for pattern in patterns:
        if not fnmatch.filter(_recorded, pattern):
            raise ValueError(f"unquoted {pattern!r}: nothing is recorded under such a key")


def record_predictions(prefix: str, judged: pandas.DataFrame) -> None:
    """Record every judged comparison that has a number, under the prefix and its ``key``."""
    for row in judged.dropna(subset=["mean"]).drop_duplicates("key").to_dict("records"):
        record(f"{prefix}_{row['key']}", with_interval(row, row["spec"]))


def record_designs(page: pandas.DataFrame) -> None:
    """Record :func:`analysis.evidence.predictions.page`, each row under its design and key.

    ``predictions``, ``holds``, ``refuted`` and ``open`` are how many there are of each, and
    ``replications`` how many were written with a pilot of the same configuration at hand.
    """
    for design, judged in page.groupby("design", sort=False):
        record_predictions(str(design), judged)
    record("predictions", len(page))
    record("replications", int(page["replication"].sum()))
    for outcome in ("holds", "refuted", "open"):
        record(outcome, int((page["outcome"] == outcome).sum()))


def _current_cell() -> tuple[str, int]:
    shell = get_ipython()
    if shell is None:
        return "", 0
    return shell.history_manager.input_hist_raw[-1], shell.execution_count


def _silence_progress_bars() -> None:
    warnings.filterwarnings("ignore", category=tqdm.std.TqdmWarning)
    for bar in (tqdm.std.tqdm, tqdm.notebook.tqdm_notebook):
        init = vars(bar)["__init__"]
        if not (isinstance(init, partialmethod) and "disable" in init.keywords):
            bar.__init__ = partialmethod(bar.__init__, disable=True)
