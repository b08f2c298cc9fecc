"""``python -m benchmarks.gpu``: what is worth knowing of a GPU, in the minutes that one has it.

Steps in order of value, each a command of its own with a limit of time. After each of them
``DIRECTORY/summary.jsonl`` has its line, and what it wrote is in ``DIRECTORY`` already, so that
whatever ends the call costs no more than the step it was in. A sweep that was cut goes on from its
store when it is called again, and where ``DIRECTORY/store/runs`` has been kept (some kilobytes a
run), on another machine too: there ``analysis sweep NAME --store ...`` finds all runs of several
calls, and records them as one. The runs on worked sums also need ``DIRECTORY/start_cuda`` there: a
start that is read again may be another, and so its runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pandas as pd
import tyro

from analysis.studies.language import start as starts
from analysis.studies.presets import PRESETS, make_preset
from analysis.studies.presets.worked_sums import START_UPDATES
from benchmarks import agreement
from benchmarks.gpu_steps import SMALL_START, Call
from benchmarks.processes import CHECKOUT, THREAD_LIMITS
from kl_term.errors import UserError
from kl_term.files import replace_file, require_writable

#: A step is not begun with less time than this: libraries take as long to load.
LEAST_SECONDS = 12.0
SAID_OF_A_FAILURE = 1500


class Step(NamedTuple):
    """One command."""

    name: str
    seconds: float  #: at most
    command: list[str]
    #: Where the step ``start`` left its table, if this one begins where that says.
    start: Path | None = None


#: Name -> what it is for, and the seconds it may take (an H100 took half of them).
STEPS: dict[str, tuple[str, float]] = {
    "sweep:smollm2_proxy": ("90 runs on SmolLM2 whose reward model can be gamed, recorded", 200),
    "sweep:smollm2_reward_long": ("20 runs: k3 in the reward, and none, beside the CPU's 12", 360),
    "sweep:smollm2_reward_terms:1of2": ("25 more: k2 and k1 there, all three at 0.3", 450),
    "sweep:smollm2_reward_terms:2of2": ("the other five seeds of these", 450),
    "answers": ("what one seed of the runs on a proxy says, beside the reference", 180),
    "agreement": ("presets in double precision, CPU against device, directly and by graphs", 200),
    "sweep:smollm2_sampled_losses": ("40 runs of k2 and the prefix ratio on SmolLM2", 150),
    "adapters": ("12 and 24 runs on SmolLM2, bf16 and float32, with graphs: ms, GB, kernels", 150),
    "start": ("how long the start of the worked sums learns: before their runs", 150),
    **{
        f"sweep:smollm2_worked_sums:{part}of5": (f"22 runs on worked sums, part {part}", 450)
        for part in range(1, 6)
    },
    **{
        f"sweep:smollm2_worked_sums_stale:{part}of5": (f"22 on old samples, part {part}", 540)
        for part in range(1, 6)
    },
    "rates": ("products, copies, launches: what the machine does at best", 40),
    "repeat": ("a tenth of a recorded sweep, trained again", 60),
    "populations": ("seconds and memory of populations of the tiny policy, phase by phase", 90),
    "sweep:equal_kl_wide": ("260 runs of the main comparison, recorded", 90),
    "sweep:stale_starts": ("160 runs under staleness, recorded", 90),
    "language": ("adapters on SmolLM2 beside transformers, in turns", 120),
    "trl": ("TRL's trainer at the sizes of the tiny policy", 60),
    "vocabulary": ("memory and seconds of the KL over a whole vocabulary", 40),
    "sweep:aggregation_length_112": ("answers of 112 tokens, recorded", 120),
    "sweep:long_completions_128": ("answers of 128 tokens, recorded", 180),
    "sweep:smollm2": ("adapters on SmolLM2, recorded: a call of its own", 540),
    "sweep:equal_kl_large": ("10,400 runs of the main comparison: a call of its own", 540),
}

#: Of a sweep, where the defaults of ``analysis sweep --graphs`` are not what an H100 does best.
#: A language model is not waiting for launches, and two workers fill each other's gaps. A run of
#: ``smollm2`` and of all that has its batch (12 prompts, 8 answers of 6 tokens) took 2.05 GB and 52
#: ms an update among 24 of them, so 26 runs, 13 a worker, take 54 GB of 83 beside two copies of the
#: model; 15 a worker is the most that was recorded. At that rate 20 runs of 200 updates take 206 s,
#: 25 take 258 s, and half a minute goes into loading and final answers. A run on worked sums (36
#: answers of 80 tokens) takes 10 GB, or 12 under the exact KL, as ``benchmarks.footprint``
#: counts, which says 2.3 for ``smollm2``: six at a time take up to 70. An update launches 96,000
#: operations, most of them to sample a token at a time, in about a second whatever the number of
#: runs; old samples are drawn twice.
SWEEPS = {
    "smollm2": ["--workers", "2"],
    "smollm2_equal_kl": ["--workers", "2", "--runs-per-shard", "15"],
    "smollm2_proxy": ["--workers", "2", "--runs-per-shard", "15"],
    "smollm2_reward_long": ["--workers", "2", "--runs-per-shard", "10"],
    "smollm2_reward_terms": ["--workers", "2", "--runs-per-shard", "13"],
    "smollm2_worked_sums": ["--workers", "2", "--runs-per-shard", "3"],
    "smollm2_worked_sums_stale": ["--workers", "2", "--runs-per-shard", "3"],
    "smollm2_sampled_losses": ["--workers", "2", "--runs-per-shard", "10"],
    "long_completions_128": ["--graphs", "--runs-per-shard", "65"],
    "aggregation_length_112": ["--graphs", "--runs-per-shard", "60"],
}


#: Sweeps whose runs begin where the step ``start`` says.
STARTED = ("smollm2_worked_sums", "smollm2_worked_sums_stale")
SMALL_STARTED = (
    *(f"start_updates={SMALL_START}", "num_seeds=1", "updates=2", "log_every=1"),
    *("num_prompts=2", "group_size=2", "final_answers=8"),
)


def gpu(
    steps: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    /,
    directory: Path = Path("gpu"),
    presets: tuple[str, ...] = (),
    device: Literal["cuda", "cpu"] = "cuda",
    minutes: float = 10.0,
    weights: str | None = None,
    small: tyro.conf.FlagCreatePairsOff[bool] = False,
    list: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> int:
    """Run steps one after another; exit status 1 if one failed or was cut.

    Args:
        steps: by default all of --list; any preset is a step sweep:PRESET, and sweep:PRESET:1of2
            the first half of its seeds. Once all parts are stored, sweep:PRESET records them as
            one.
        presets: recorded after the steps that are named, or alone.
        directory: where results, logs and summary.jsonl go.
        device: cpu rehearses.
        minutes: after which the step then running is cut.
        weights: of the language model: hub (the default), packaged or a local folder.
        small: sizes of seconds.
        list: show the steps and what they are for.
    """
    if list:
        for name, (purpose, seconds) in STEPS.items():
            print(f"{name:36}{seconds:4.0f} s  {purpose}")
        return 0
    call = Call(device=device, directory=directory.resolve(), small=small, weights=weights)
    chosen = [*steps, *(f"sweep:{preset}" for preset in presets)] or [*STEPS]
    lines = run_steps([step_of(name, call) for name in chosen], 60 * minutes, call.directory)
    return int(any(line["status"] in ("failed", "cut") for line in lines))


def step_of(name: str, call: Call) -> Step:
    """The command of a step.

    Raises:
        UserError: there is none of that name.
    """
    kind, _, rest = name.partition(":")
    preset, _, part = rest.partition(":")
    if name not in STEPS and (kind != "sweep" or preset not in PRESETS):
        raise UserError(f"{name!r}: no such step; --list shows them")
    seconds = STEPS.get(name, ("", 540.0))[1]
    if kind != "sweep":
        command = ["-m", "benchmarks.gpu_steps", name, call.model_dump_json()]
        return Step(name, seconds, [sys.executable, *command])
    more = list(SWEEPS.get(preset, ["--graphs"])) if call.device == "cuda" else []
    if call.small:
        small = SMALL_STARTED if preset in STARTED else ("num_seeds=2", "updates=20")
        more += [word for each in small for word in ("-o", each)]
    elif part:
        first, count = part_of_seeds(preset, part)
        more += ["-o", f"first_seed={first}", "-o", f"num_seeds={count}"]
    if call.weights is not None and agreement.needs_weights(make_preset(preset, {})):
        more += ["-o", f"weights={call.weights}"]
    recorded = call.directory / "_".join([preset, *([part] if part else []), call.device])
    places = ["--store", str(call.directory / "store"), "--record", str(recorded)]
    command = [sys.executable, "-m", "analysis", "sweep", preset, "--device", call.device]
    begins = preset in STARTED and not call.small
    start = call.directory / f"start_{call.device}" / "start.csv" if begins else None
    return Step(name, seconds, [*command, *places, *more], start)


def part_of_seeds(preset: str, part: str) -> tuple[int, int]:
    """The first of the seeds of a part such as ``2of5``, and how many it has.

    Raises:
        UserError: it is none, or the seeds have not so many parts of one size.
    """
    seeds = make_preset(preset, {}).seeds
    spelled = re.fullmatch(r"([0-9]{1,3})of([0-9]{1,3})", part)
    place, parts = map(int, spelled.groups()) if spelled else (0, 0)
    if not 1 <= place <= parts or len(seeds) % parts:
        raise UserError(
            f"sweep:{preset}:{part}: a part reads 1of2, and {len(seeds)} seeds have no such one"
        )
    count = len(seeds) // parts
    return seeds[(place - 1) * count], count


def run_steps(steps: Sequence[Step], seconds: float, directory: Path) -> list[dict[str, Any]]:
    """Run them in turn, for so many seconds in all; the lines of the summary, as on disk.

    A line: step, status (done, failed, cut, not begun), seconds, and of a failure the end of what
    it said; all of that is in ``logs/``.

    Raises:
        UserError: the directory cannot be written.
    """
    require_writable(directory / "logs")
    end, lines = time.monotonic() + seconds, []
    for step in steps:
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            line = {"step": step.name, "status": "not begun", "seconds": 0.0}
        else:
            line = run_step(step, min(step.seconds, left), directory)
        lines.append(line)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        replace_file(directory / "summary.jsonl", text.encode())
        print(f"{step.name}: {line['status']}, {line['seconds']} s", flush=True)
        if "said" in line:
            print(line["said"], file=sys.stderr, flush=True)
    return lines


def run_step(step: Step, seconds: float, directory: Path) -> dict[str, Any]:
    """A command and all it starts, ended together."""
    log = directory / "logs" / f"{step.name.replace(':', '_')}.txt"
    began = time.monotonic()
    try:
        command = step.command if step.start is None else [*step.command, *begin_at(step.start)]
    except UserError as error:
        return {"step": step.name, "status": "failed", "seconds": 0.0, "said": str(error)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=CHECKOUT,
            env=os.environ | dict.fromkeys(THREAD_LIMITS, "1"),
            start_new_session=True,
        )
        try:
            status = "failed" if process.wait(seconds) else "done"
        except subprocess.TimeoutExpired:
            status = "cut"
        finally:  # also where this process is interrupted
            _end_group(process)
    line = {"step": step.name, "status": status, "seconds": round(time.monotonic() - began, 1)}
    if status != "done":
        line["said"] = log.read_bytes()[-SAID_OF_A_FAILURE:].decode(errors="replace").strip()
    return line


def begin_at(table: Path) -> list[str]:
    """What ``analysis sweep`` is told of the start that was chosen.

    Raises:
        UserError: none was read, reading was cut or rehearsed, or none that was read will do.
    """
    if not table.is_file():
        raise UserError(f"{table} is missing: run the step start first, in the same directory")
    read = pd.read_csv(table)
    if list(read["updates"]) != list(START_UPDATES):
        found, wanted = (", ".join(map(str, each)) for each in (read["updates"], START_UPDATES))
        raise UserError(
            f"{table} has a start read after {found} updates, and the rule that chooses one wants "
            f"{wanted}: run the step start again, to its end"
        )
    return ["-o", f"start_updates={starts.chosen(read)}"]


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """What a step leaves behind would hold the GPU's memory in the next."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(arguments: list[str] | None = None) -> int:
    try:
        return tyro.cli(gpu, prog="python -m benchmarks.gpu", args=arguments)
    except UserError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
