"""Who is timed: each a few processes that train some updates whenever they are told to.

A process says ``ready``, then reads a line, does its share and says what it took, until its input
ends. So every contender is set up once and takes its turn in every round, on the same machine in
the same minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from analysis.experiments.benchmark.plain import BETA
from analysis.training.config import TrainConfig
from analysis.training.policy import PolicyConfig
from analysis.training.schema import Schema
from analysis.training.start import make_policy
from analysis.training.tasks import SortTask

#: Names a Python that imports TRL; by default the one that runs the benchmark.
TRL_PYTHON = "KL_TERM_TRL_PYTHON"
TRL_SCRIPT = Path(__file__).with_name("trl_script.py")

#: The untrained policy: time does not depend on what it has learned.
LARGEST = TrainConfig(
    task=SortTask(end_token=True), policy=PolicyConfig(width=64, mlp_factor=4), learning_rate=2e-3
)


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
        policy = LARGEST.policy.model_copy(update={"width": self.width})
        return LARGEST.model_copy(
            update={"policy": policy, "start": LARGEST.start.model_copy(update={"updates": 0})}
        )


class Turn(NamedTuple):
    """What a contender did when it was its turn."""

    seconds: float  #: per member-update, over all its processes
    said: list[dict[str, Any]]  #: by each process


class Crew:
    """The processes of a contender.

    Raises:
        ValueError: a process ends before it is ready; the message says why.
    """

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self._processes = [
            subprocess.Popen(
                command(contender),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | thread_limits(contender.threads),
            )
            for _ in range(contender.processes)
        ]

    def wait_until_ready(self) -> None:
        """Return once every process has said so."""
        for process in self._processes:
            if process.stdout.readline().strip() != "ready":
                process.kill()
                reason = process.stderr.read().strip().splitlines() or ["it said nothing"]
                raise ValueError(f"{self.contender.name} did not start: {reason[-1]}")

    def turn(self) -> Turn:
        """All processes at once; the turn lasts until the last has finished."""
        started = time.perf_counter()
        for process in self._processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        said = [json.loads(process.stdout.readline()) for process in self._processes]
        seconds = time.perf_counter() - started
        done = self.contender.processes * self.contender.members * self.contender.updates
        return Turn(seconds / done, said)

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.communicate()


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
