"""Who is timed: each a few processes that train some updates whenever they are told to.

A process says ``ready``, then reads a line, does its share and says what it took, until its input
ends. So every contender is set up once and takes its turn in every round, on the same machine in
the same minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from analysis.experiments.benchmark.plain import BETA
from analysis.schema import Schema
from analysis.training.config import StartConfig, TrainConfig
from analysis.training.policy import PolicyConfig
from analysis.training.start import make_policy
from analysis.training.tasks import SortTask

#: Names a Python that imports TRL; by default the one that runs the benchmark.
TRL_PYTHON = "KL_TERM_TRL_PYTHON"
TRL_SCRIPT = Path(__file__).with_name("trl_script.py")

#: The untrained policy: time does not depend on what it has learned.
LARGEST = TrainConfig(
    task=SortTask(end_token=True),
    policy=PolicyConfig(width=64, mlp_factor=4),
    start=StartConfig(updates=0),
    learning_rate=2e-3,
)


def of_width(width: int) -> TrainConfig:
    """``LARGEST`` with another number of channels."""
    policy = PolicyConfig(**LARGEST.policy.model_dump() | {"width": width})
    return LARGEST.model_copy(update={"policy": policy})


class Contender(Schema):
    """One way to train, and how many processes do it at once."""

    kind: Literal["population", "plain", "trl", "machine"]
    width: int
    members: int = 1  #: of each process
    processes: int = 1
    threads: int = 1  #: of each process
    updates: int = 1  #: of each process, a turn

    @property
    def name(self) -> str:
        """Such as ``population of 24`` or ``TRL, 2 processes``."""
        label = {"population": f"population of {self.processes * self.members}", "trl": "TRL"}
        suffix = f", {self.processes} processes" if self.processes > 1 else ""
        suffix += f", {self.threads} threads" if self.threads > 1 else ""
        return label.get(self.kind, self.kind) + suffix

    @property
    def config(self) -> TrainConfig:
        """What is trained."""
        return of_width(self.width)


class Turn(NamedTuple):
    """What a contender did when it was its turn."""

    seconds: float  #: per member-update, over all its processes
    said: list[dict[str, Any]]  #: by each process


class Process:
    """One of a contender's processes. What it writes to its standard error goes to a file, so that
    a talkative library never waits for a reader.

    Args:
        contender: whose it is.
    """

    def __init__(self, contender: Contender) -> None:
        self._name = contender.name
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command(contender),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | thread_limits(contender.threads),
        )

    def tell(self, line: str) -> None:
        """Say one line to it; one that has ended is found out when it is heard."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def hear(self) -> str:
        """Its next line.

        Raises:
            ValueError: it has ended; the message says why.
        """
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            reason = self._errors.read().strip().splitlines() or ["it said nothing"]
            raise ValueError(f"{self._name} ended: {reason[-1]}")
        return line.strip()

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


class Crew:
    """The processes of a contender."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self._processes = [Process(contender) for _ in range(contender.processes)]

    def wait_until_ready(self) -> None:
        """Return once every process has said so.

        Raises:
            ValueError: one has ended, or says something else.
        """
        for process in self._processes:
            if (said := process.hear()) != "ready":
                raise ValueError(f"{self.contender.name} should be ready and says {said!r}")

    def turn(self) -> Turn:
        """All processes at once; the turn lasts until the last has finished.

        Raises:
            ValueError: one has ended.
        """
        started = time.perf_counter()
        for process in self._processes:
            process.tell("go")
        said = [json.loads(process.hear()) for process in self._processes]
        seconds = time.perf_counter() - started
        done = self.contender.processes * self.contender.members * self.contender.updates
        return Turn(seconds / done, said)

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.end()


def command(contender: Contender) -> list[str]:
    """The command line of one process."""
    if contender.kind == "trl":
        config = contender.config
        spec = config.policy.model_dump() | {
            "vocab_size": make_policy(config).shapes["head"][1],
            "threads": contender.threads,
            "updates": contender.updates,
            "num_digits": config.task.num_digits,
            "completion_length": config.task.completion_length,
            "num_prompts": config.num_prompts,
            "group_size": config.group_size,
            "beta": BETA,
            "learning_rate": config.learning_rate,
        }
        return [trl_python(), str(TRL_SCRIPT), json.dumps(spec)]
    module = "analysis.experiments.benchmark.worker"
    return [sys.executable, "-m", module, contender.model_dump_json()]


def thread_limits(threads: int) -> Mapping[str, str]:
    """The environment that holds a process to so many threads, which sleep while they wait.

    Threads that spin are no faster on an idle machine and many times slower on a shared one.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    return dict.fromkeys(names, str(threads)) | {"OMP_WAIT_POLICY": "PASSIVE"}


def trl_python() -> str:
    """The Python that is to run TRL."""
    return os.environ.get(TRL_PYTHON, sys.executable)


def trl_version() -> str | None:
    """The version that would be timed, or None without one."""
    code = "from importlib.metadata import version; print(version('trl'))"
    try:
        done = subprocess.run([trl_python(), "-c", code], capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"{TRL_PYTHON}={trl_python()} does not run: {error}") from None
    return done.stdout.strip() if done.returncode == 0 else None
