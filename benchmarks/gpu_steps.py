"""What one step of :mod:`benchmarks.gpu` does: ``python -m benchmarks.gpu_steps STEP CALL``.

CALL is in JSON. Sweeps are no steps of these but ``analysis sweep`` itself.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch

from analysis.chapters.ch15_full_vocabulary import TABLE
from analysis.freshness import code_sha256, import_closure
from analysis.records import recording
from analysis.records.language import ForwardConfig
from analysis.records.manifests import write_folder
from analysis.records.tidy import final
from analysis.report.processes import available_cores
from analysis.studies.language import proxy_answers
from analysis.studies.language import start as starts
from analysis.studies.presets import make_preset
from analysis.studies.presets.language import llama_smoke
from analysis.studies.presets.worked_sums import START_UPDATES
from analysis.sweeps.provenance import provenance_here
from analysis.sweeps.record import tidy
from analysis.sweeps.reproduction import chosen
from analysis.training.environment_of import environment_of
from analysis.training.trainer import PopulationTrainer
from benchmarks import __main__ as command
from benchmarks import agreement, full_vocabulary
from benchmarks import device as device_benchmark
from benchmarks.device import Load
from benchmarks.processes import CHECKOUT, Case, Workers, trl_version
from kl_term.schema import Schema

#: Recorded on a GPU, a tenth of which is trained again.
REPEATED = "equal_kl_wide_cuda"
#: Updates of a start that is small.
SMALL_START = 2


class Call(Schema):
    """Where a step runs, how large, and where its tables go."""

    device: Literal["cuda", "cpu"]
    directory: Path
    small: bool = False  #: sizes of seconds
    weights: str | None = None  #: of the language model: hub, packaged or a folder

    def write(self, name: str, tables: dict[str, pd.DataFrame], **fields: Any) -> None:
        """A folder ``NAME_DEVICE`` of tables, replacing what it held."""
        source = code_sha256(import_closure(["benchmarks/gpu_steps.py"]))
        made = provenance_here(source, torch.device(self.device)).model_dump()
        folder = self.directory / f"{name}_{self.device}"
        write_folder(folder, tables, made | {"preset": name, "seeds": [], **fields})


def agree(call: Call) -> None:
    """Each preset in a process of its own: an error of CUDA ends what can be trusted of one."""
    presets = agreement.presets()
    names = sorted(presets, key=lambda name: -presets[name].config.task.completion_length)
    rows, failed = [], []
    with ThreadPoolExecutor(max(1, min(8, available_cores()))) as pool:
        chosen = names[-2:] if call.small else names
        found_of = pool.map(lambda name: _agreement(call, name), chosen)
        for name, done in zip(chosen, found_of, strict=True):
            if done.returncode:
                failed.append(f"{name}: {done.stderr[-500:]}")
                continue
            for way, found in json.loads(done.stdout).items():
                size = len(agreement.shortened(presets[name]).runs)
                rows.append({"preset": name, "runs": size, "graphs": way == "graphs", **found})
                if not max(found["metrics"], found["weights"]) < agreement.TOLERANCE:
                    failed.append(f"{name}, {way}: {found}")
            table = {"agreement.csv": pd.DataFrame(rows)}
            call.write("agreement", table, updates=agreement.UPDATES, precision="float64")
    if failed:
        raise SystemExit("\n".join(failed))


def _agreement(call: Call, name: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-W", "ignore", "-m", "benchmarks.agreement", call.device, name]
    return subprocess.run(program, capture_output=True, text=True, cwd=CHECKOUT, env=os.environ)


def rates(call: Call) -> None:
    table = device_benchmark.machine_rates(torch.device(call.device))
    print(table.to_string(index=False))
    call.write("rates", {"machine.csv": table})


def answers(call: Call) -> None:
    """Of the runs that the step ``sweep:smollm2_proxy`` recorded here."""
    name = f"smollm2_proxy_answers_{call.device}"
    proxy_answers.record(
        call.directory / f"smollm2_proxy_{call.device}", call.directory / name, device=call.device
    )


def start(call: Call) -> None:
    """How well the start of the worked sums answers, by how long it has learned: read once.

    A start that is read again may be another one by a GPU's rounding, and half of the seeds would
    begin at each. What was read to its end stays; delete its folder to read anew.
    """
    named = {} if call.weights is None else {"weights": call.weights}
    preset = make_preset("smollm2_worked_sums", {"start_updates": START_UPDATES[-1], **named})
    config, after = preset.config, START_UPDATES
    if call.small:
        few = {"updates": SMALL_START, "batch_size": 4}
        learned = config.start.model_copy(update=few)
        config = config.model_copy(update={"start": learned, "final_answers": 8})
        after = (1, SMALL_START)
    configuration = preset.model_dump(mode="json")
    if _was_read(call.directory / f"start_{call.device}", configuration, after):
        print("the start was read before, and stays")
        return
    rows, said = [], []
    for reading in starts.readings(config, after, proxy_answers.text_of(config), call.device):
        rows.append(reading.row)
        said.append(reading.said)
        tables = {"start.csv": pd.DataFrame(rows), "answers.csv": pd.concat(said)}
        call.write("start", tables, configuration=configuration)
        print(tables["start.csv"].to_string(index=False), flush=True)


def _was_read(folder: Path, configuration: dict[str, Any], after: Sequence[int]) -> bool:
    """Does a folder hold the readings of this very start, after each of these updates?"""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        updates = pd.read_csv(folder / "start.csv")["updates"]
    except FileNotFoundError:
        return False
    return manifest["configuration"] == configuration and list(updates) == list(after)


def populations(call: Call) -> None:
    sizes = {"runs": (2,), "widths": (32,), "updates": 2} if call.small else {}
    loads = device_benchmark.tiny_loads(**sizes)
    folder = call.directory / f"benchmark_{call.device}"
    command.bench_loads(loads, torch.device(call.device), folder)


def adapters(call: Call) -> None:
    """Each population by itself: what does not fit must not cost what does."""
    config = command.language_config("cuda", call.weights)
    sizes, updates = ((24, 12), 10)
    if call.small:
        config, sizes, updates = llama_smoke().config, (2,), 1
    device, rows = torch.device(call.device), []
    for products in ("bfloat16", "full"):
        forward = ForwardConfig(products=products, attention="sdpa")
        one = config.model_copy(update={"forward": forward})
        name = f"SmolLM2-135M, products {products}"
        loads = [Load(name, one, size, updates) for size in sizes]
        folder = call.directory / f"benchmark_adapters_{products}_{call.device}"
        command.bench_loads(loads, device, folder)
        rows.append(device_benchmark.profiled(loads[0], environment_of(one, device)))
        call.write("kernels", {"kernels.csv": pd.DataFrame(rows)})


def repeat(call: Call) -> None:
    """What was recorded of a run beside what comes out now, over its last windows."""
    recorded = recording.load(recording.RESULTS / REPEATED)
    config, count = recorded.preset.config, math.ceil(len(recorded.preset.runs) / 10)
    if call.small:
        start = config.start.model_copy(update={"updates": 1})
        config, count = config.model_copy(update={"updates": config.log_every, "start": start}), 2
    runs = chosen(recorded.preset, count)
    environment = environment_of(config, call.device)
    trainer = PopulationTrainer(config, runs, environment, graphs=call.device == "cuda")
    again = final(tidy(trainer.run()))
    both = recorded.finals.merge(again, on=["variant", "beta", "seed"], suffixes=("", "_again"))
    call.write("repeat", {"repeat.csv": both}, of=REPEATED)


def language(call: Call) -> None:
    config = command.language_config(call.device, call.weights)
    if call.small:
        small = {"num_prompts": 1, "group_size": 2, "num_minibatches": 1, "log_every": 1}
        config = config.model_copy(update=small)
    folder = call.directory / f"benchmark_smollm2_{call.device}"
    command.bench_language(config, call.device, 1 if call.small else 3, folder)


def trl(call: Call) -> None:
    """Seconds of an update of one run, in turns of ten."""
    if (version := trl_version()) is None:
        raise SystemExit("TRL is not installed: pip install -e '.[trl]'")
    updates, turns = (1, 1) if call.small else (10, 3)
    workers = Workers(Case(kind="trl", width=32, updates=updates, device=call.device))
    try:
        workers.wait_until_ready()
        seconds = [workers.turn().seconds for _ in range(turns)]
    finally:
        workers.end()
    table = pd.DataFrame({"name": "tiny, width 32", "round": range(turns), "seconds": seconds})
    call.write("trl", {"trl.csv": table}, trl=version)


def vocabulary(call: Call) -> None:
    tokens, width, sizes = (64, 16, (512,)) if call.small else (4096, 1024, (32_000, 152_064))
    rows = []
    for vocab in sizes:
        for method in ("sampled", "naive", "chunked"):
            measure = full_vocabulary.measure
            if call.device == "cuda":
                measure = partial(full_vocabulary.measure_on, torch.device("cuda"))
            rows.append(measure(method, vocab, tokens, width))
            call.write("full_vocabulary", {TABLE: pd.DataFrame(rows)})


STEPS: dict[str, Callable[[Call], None]] = {
    "agreement": agree,
    "answers": answers,
    "adapters": adapters,
    "repeat": repeat,
    "start": start,
    "rates": rates,
    "populations": populations,
    "language": language,
    "trl": trl,
    "vocabulary": vocabulary,
}


if __name__ == "__main__":
    step, given = sys.argv[1:]
    try:
        STEPS[step](Call.model_validate_json(given))
    except ValueError as error:  # a model or a package cannot be had
        raise SystemExit(str(error)) from error
