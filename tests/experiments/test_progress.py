"""What a sweep shows, on a terminal and in a log."""

from __future__ import annotations

import io
import re
import time

import pytest

from analysis.sweeps import progress
from analysis.sweeps.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_a_shard_with_rate_and_time_left(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.begin(runs=8, missing=[3, 3], updates=100)
    clock[0] = 2.0
    progress.shard_at(0, 0)
    progress.shard_at(0, 300)
    progress.shard_finished(0)
    progress.shard_at(1, 0)
    clock[0] = 4.0
    progress.shard_at(1, 300)
    progress.shard_finished(1)
    assert stream.getvalue().splitlines() == [
        "2 of 8 runs stored, 6 to compute",
        "300 of 600 run-updates, 150 run-updates/s, about 2 s left",
        "600 of 600 run-updates, 150 run-updates/s",
    ]


def test_a_log_hears_of_a_long_shard_every_minute(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.begin(runs=2, missing=[2], updates=48)
    for second in range(0, 200, 10):
        clock[0] = float(second)
        progress.shard_at(0, 2 * (second // 10))
    said = stream.getvalue().splitlines()[1:]
    assert said == [
        "14 of 96 run-updates, 0.2 run-updates/s, about 410 s left",
        "28 of 96 run-updates, 0.2 run-updates/s, about 340 s left",
    ]


def test_only_what_is_computed_now_makes_the_rate(clock: list[float]) -> None:
    """One shard goes on from its checkpoint after its worker died, another sweep does the other."""
    stream = io.StringIO()
    progress = Progress(stream)
    progress.begin(runs=6, missing=[3, 3], updates=100)
    progress.shard_at(0, 0)
    progress.shard_at(0, 150)
    progress.shard_lost(0)
    progress.shard_at(0, 120)
    clock[0] = 1.0
    progress.shard_at(0, 170)
    progress.shard_finished(1)
    (last,) = stream.getvalue().splitlines()[1:]
    assert last == "470 of 600 run-updates, 200 run-updates/s, about 1 s left"


def test_a_terminal_gets_a_bar_with_rate_and_time_left() -> None:
    stream = Terminal()
    progress = Progress(stream)
    progress.begin(runs=6, missing=[3, 3], updates=1000)
    progress.shard_at(0, 0)
    for done in (1000, 2000, 3000):
        time.sleep(0.15)  # tqdm redraws ten times a second
        progress.shard_at(0, done)
    progress.close()
    shown = stream.getvalue()
    assert re.search(r" 50% \[\d\d:\d\d<\d\d:\d\d, [\d.]+k? ?run-updates/s\]", shown)
    assert shown.count("\n") == 1, "the bar is rewritten in place"


def test_nothing_to_do_shows_no_bar() -> None:
    stream = Terminal()
    progress = Progress(stream)
    progress.begin(runs=6, missing=[], updates=1000)
    progress.close()
    assert stream.getvalue() == "6 of 6 runs stored, 0 to compute\n"
