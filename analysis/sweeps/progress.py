"""What a sweep shows, with rate and time left: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

from tqdm import tqdm

from analysis.records.preset import Preset
from analysis.sweeps.store import StoredRun

#: Off a terminal there is a line a shard, and one at least this often.
QUIET_SECONDS = 60.0


class Progress:
    """Counts run-updates: one update of one run. Only those computed now make the rate."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._shards: dict[int, int] = {}
        self._computed = 0
        self._bar = tqdm(disable=True)

    def begin(self, runs: int, missing: Sequence[int], updates: int, *, stale: int = 0) -> None:
        """Start the clock: runs of the sweep, those ``missing`` in each shard, their updates; so
        many of the missing were stored by an older source."""
        self._started = self._said = time.monotonic()
        self._shares = [count * updates for count in missing]
        self._bar = tqdm(
            total=sum(self._shares),
            unit=" run-updates",
            unit_scale=True,
            file=self._stream,
            disable=not (missing and self._stream.isatty()),
            leave=False,
            bar_format="{bar:20} {percentage:3.0f}% [{elapsed}<{remaining}, {rate_noinv_fmt}]",
        )
        self.say(f"{runs - sum(missing)} of {runs} runs stored, {sum(missing)} to compute")
        if stale:
            self.say(f"{stale} runs of an older source are kept as stale, computed anew")

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._bar.write(text, file=self._stream)
        self._stream.flush()

    def shard_at(self, shard: int, run_updates: int) -> None:
        """A shard has come this far; where it starts from was computed before."""
        if shard in self._shards:
            self._computed += run_updates - self._shards[shard]
            self._bar.update(run_updates - self._shards[shard])
            self._shards[shard] = run_updates
        else:
            self._move(shard, run_updates)
        if time.monotonic() > self._said + QUIET_SECONDS:
            self._tell()

    def shard_lost(self, shard: int) -> None:
        """A shard's worker died: where it starts again is not known yet."""
        self._move(shard, 0)
        del self._shards[shard]

    def shard_finished(self, shard: int) -> None:
        """A shard is stored, be it by another sweep."""
        self._move(shard, self._shares[shard])
        self._tell()

    def _tell(self) -> None:
        """How far it is, where there is no bar."""
        self._said = time.monotonic()
        done, total = sum(self._shards.values()), sum(self._shares)
        rate = self._computed / (time.monotonic() - self._started)
        left = f", about {(total - done) / rate:.0f} s left" if rate and done < total else ""
        if self._bar.disable:
            speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"  # a language model is slow
            self.say(f"{done:,} of {total:,} run-updates, {speed} run-updates/s{left}")

    def close(self) -> None:
        self._bar.close()

    def finished(self, preset: Preset, stored: Sequence[StoredRun]) -> None:
        """Diverged runs by name, then what is finished."""
        diverged = [one for one in stored if one.failure is not None]
        for one in diverged:
            self.say(
                f"diverged: {one.run.variant.name} beta={one.run.variant.beta} seed={one.run.seed} "
                f"at update {one.failure.update}, {one.failure.tensor} not finite"
            )
        self.say(f"{preset.name}: {len(preset.runs)} runs finished, {len(diverged)} diverged")

    def _move(self, shard: int, run_updates: int) -> None:
        """Put a shard somewhere else without counting the way into the rate."""
        way = run_updates - self._shards.get(shard, 0)
        self._shards[shard] = run_updates
        if way and not self._bar.disable:
            self._bar.initial += way
            self._bar.n += way
            self._bar.refresh()
