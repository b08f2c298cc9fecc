"""What is timed: each case is a few processes that train some updates whenever they are told.

A process writes ``ready``, then reads a line, does its updates and writes a line of JSON, until its
input ends. So every case is set up once and takes its turn in every round, on the same machine
in the same minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

from analysis.chapters.ch12_performance import of_width
from analysis.chapters.plain_grpo import BETA
from analysis.training.tiny.policy import make_policy
from kl_term.schema import Schema

#: Names a Python that imports TRL; by default the one that runs the benchmark.
TRL_PYTHON = "KL_TERM_TRL_PYTHON"
TRL_SCRIPT = Path(__file__).with_name("trl_script.py")
#: Where a process is started: `benchmarks` is imported from the checkout, which no wheel has.
CHECKOUT = Path(__file__).parents[1]
THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


class Case(Schema):
    """One way to train, and how many processes do it at once."""

    kind: Literal["population", "plain", "trl", "machine"]
    width: int
    runs: int = 1  #: of each process
    processes: int = 1
    threads: int = 1  #: of each process
    updates: int = 1  #: of each process, a turn
    device: str = "cpu"  #: of TRL; the others know only that one here

    @property
    def name(self) -> str:
        """Such as ``population of 24`` or ``TRL, 2 processes``."""
        label = {"population": f"population of {self.processes * self.runs}", "trl": "TRL"}
        suffix = f", {self.processes} processes" if self.processes > 1 else ""
        suffix += f", {self.threads} threads" if self.threads > 1 else ""
        return label.get(self.kind, self.kind) + suffix


class Turn(NamedTuple):
    """What the processes of a case did in their turn."""

    seconds: float  #: per run-update, over all its processes
    answers: list[dict[str, Any]]  #: of each process


class Process:
    """One process of a case. What it writes to its standard error goes to a file, so that
    a talkative library never waits for a reader."""

    def __init__(self, case: Case) -> None:
        self._name = case.name
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        # Threads that spin are no faster on an idle machine and much slower on a shared one.
        limits = dict.fromkeys(THREAD_LIMITS, str(case.threads)) | {"OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            command(case),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=CHECKOUT,
            env=os.environ | limits,
        )

    def write(self, line: str) -> None:
        """Write it one line; one that has ended is found out when it is read."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def read(self) -> str:
        """Its next line.

        Raises:
            ValueError: it has ended; the message says why.
        """
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            reason = self._errors.read().strip().splitlines() or ["it wrote nothing"]
            raise ValueError(f"{self._name} ended: {reason[-1]}")
        return line.strip()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


class Workers:
    """The processes of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._processes = [Process(case) for _ in range(case.processes)]

    def wait_until_ready(self) -> None:
        """Return once every process is set up.

        Raises:
            ValueError: one has ended, or writes something else.
        """
        for process in self._processes:
            if (line := process.read()) != "ready":
                raise ValueError(f"{self.case.name} should be ready and writes {line!r}")

    def turn(self) -> Turn:
        """All processes at once; the turn lasts until the last has finished.

        Raises:
            ValueError: one has ended.
        """
        started = time.perf_counter()
        for process in self._processes:
            process.write("go")
        answers = [json.loads(process.read()) for process in self._processes]
        seconds = time.perf_counter() - started
        done = self.case.processes * self.case.runs * self.case.updates
        return Turn(seconds / done, answers)

    def end(self) -> None:
        for process in self._processes:
            process.end()


def command(case: Case) -> list[str]:
    """The command line of one process."""
    if case.kind != "trl":
        return [sys.executable, "-m", "benchmarks.worker", case.model_dump_json()]
    config = of_width(case.width)
    spec = config.policy.model_dump() | {
        "vocab_size": make_policy(config).shapes["head"][1],
        "threads": case.threads,
        "device": case.device,
        "updates": case.updates,
        "num_digits": config.task.num_digits,
        "completion_length": config.task.completion_length,
        "num_prompts": config.num_prompts,
        "group_size": config.group_size,
        "beta": BETA,
        "learning_rate": config.learning_rate,
    }
    return [trl_python(), str(TRL_SCRIPT), json.dumps(spec)]


def trl_python() -> str:
    """The Python that is to run TRL."""
    return os.environ.get(TRL_PYTHON, sys.executable)


def trl_version() -> str | None:
    """The version that would be timed, or None without one.

    Raises:
        ValueError: the Python that is named does not run.
    """
    code = "from importlib.metadata import version; print(version('trl'))"
    try:
        done = subprocess.run([trl_python(), "-c", code], capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"{TRL_PYTHON}={trl_python()} does not run: {error}") from None
    return done.stdout.strip() if done.returncode == 0 else None
