"""``python -m benchmarks``: how fast training is on this machine, beside what it could be."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
import tyro
from pydantic import ValidationError

from analysis.chapters import ch12_performance as chapter
from analysis.records.language import LanguageConfig
from analysis.records.manifests import check_target, write_folder
from analysis.studies.presets.language import model_of, smollm2, smollm2_short
from analysis.sweeps.provenance import current_provenance
from analysis.training.pretrained.folders import needed
from benchmarks import device as device_benchmark
from benchmarks import language, measure
from benchmarks.processes import TRL_PYTHON, trl_version
from kl_term.errors import UserError


def bench(
    rounds: int | None = None,
    widths: tuple[int, ...] = measure.WIDTHS,
    directory: Path | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    language_model: tyro.conf.FlagCreatePairsOff[bool] = False,
    weights: str | None = None,
) -> None:
    """Time the population, a plain trainer and TRL in turns, and what the machine does at best.

    Takes some minutes and two cores; keep the machine otherwise idle. TRL is timed if the Python
    named by KL_TERM_TRL_PYTHON, or this one, can import it.

    Args:
        rounds: turns of each trainer; by default 15, of a language model on a GPU 5.
        widths: of the tiny policy.
        directory: where the recorded benchmark goes; by default results/benchmark_cpu or _cuda, of
            a language model results/benchmark_smollm2_cpu or _cuda. On a GPU its turns come after
            the others and go beside DIRECTORY, with _smollm2 added to its name.
        device: cuda times populations on one GPU, without the others.
        language_model: time adapters on SmolLM2-135M beside transformers instead: one and four
            runs on one core, or 24 on a GPU, there beside the others.
        weights: of the language model: hub, packaged (from the extra smollm2) or a local folder; by
            default packaged on the CPU, hub on a GPU.
    """
    if weights is not None and not language_model:
        raise UserError("--weights are of --language-model: give both")
    if rounds is not None and device == "cuda" and not language_model:
        raise UserError("--rounds are turns, and on a GPU only --language-model takes turns")
    if rounds is not None and rounds < 1:
        raise UserError(f"--rounds must be at least 1, not {rounds}")
    if widths != measure.WIDTHS and language_model and device == "cpu":
        raise UserError("--widths are of the tiny policy, which --language-model leaves out")
    _check_widths(widths)
    config = language_config(device, weights) if language_model else None
    if device == "cuda":
        folder = directory or chapter.RECORDED.with_name("benchmark_cuda")
        bench_device(widths, folder, config)
        directory = directory and directory.with_name(f"{directory.name}_smollm2")
    elif config is None:
        bench_cpu(widths, rounds or measure.ROUNDS, directory or chapter.RECORDED)
    if config is not None:
        folder = directory or chapter.RECORDED.with_name(f"benchmark_smollm2_{device}")
        bench_language(config, device, rounds, folder)


def bench_cpu(widths: tuple[int, ...], rounds: int, directory: Path) -> None:
    """Population, plain trainer and TRL on this machine's cores."""
    check_target(directory)
    provenance = current_provenance(chapter.LARGEST, threads=1)
    version = trl_version()
    print(f"TRL {version or f'not found: name a Python that has it in {TRL_PYTHON}'}")
    chosen = [c for width in widths for c in measure.cases(width, trl=version is not None)]
    found = measure.run(chosen, rounds, _say)
    table, relative = chapter.medians(found), chapter.ratios(found)
    columns = ["ms", "low", "high", "tokens"]
    print(table.set_index(["width", "trainer"])[columns].round(1).to_string())
    print(relative.drop(columns="kind").set_index(["width", "trainer"]).round(2).to_string())
    print(chapter.floors(found).round(2).to_string(index=False))
    configuration = {
        "widths": list(widths),
        "runs": list(measure.RUNS),
        "rounds": rounds,
        "with_trl": version is not None,
        "whole_machine": True,
    }
    versions = provenance.versions | ({} if version is None else {"trl": version})
    tables = {name: getattr(found, name) for name in chapter.TABLES}
    fields = {"versions": versions, "configuration": configuration}
    _record(directory, "benchmark", tables, provenance.model_dump() | fields)


def bench_device(widths: tuple[int, ...], directory: Path, config: LanguageConfig | None) -> None:
    """Populations on one GPU."""
    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here")
    loads = device_benchmark.tiny_loads(widths=widths)
    if config is not None:
        loads.append(device_benchmark.Load("SmolLM2-135M adapters", config, 24, updates=5))
    bench_loads(loads, torch.device("cuda"), directory)


def bench_loads(
    loads: Sequence[device_benchmark.Load], device: torch.device, directory: Path
) -> None:
    """Populations and what the device does at best."""
    check_target(directory)
    provenance = device_benchmark.provenance_of(loads, device)
    tables = device_benchmark.run(loads, device, _say)._asdict()
    for table in tables.values():
        print(table.round(3).to_string(index=False))
    _record(directory, "device_benchmark", tables, provenance.model_dump())


def bench_language(
    config: LanguageConfig, device: str, rounds: int | None, directory: Path
) -> None:
    """Adapters on a language model, beside transformers."""
    runs, usual = ((24,), 5) if device == "cuda" else ((1, 4), measure.ROUNDS)
    check_target(directory)
    version = needed("transformers", "lm").__version__
    if device == "cpu":
        torch.set_num_threads(1)
    provenance = current_provenance(config, torch.device(device))
    found = language.run(config, torch.device(device), runs, rounds or usual, _say)
    print(chapter.language_summary(found).round(2).to_string(index=False))
    versions = provenance.versions | {chapter.TRANSFORMERS: version}
    fields = {"versions": versions, "configuration": config.model_dump(mode="json")}
    tables = {"rounds": found}
    _record(directory, "language_benchmark", tables, provenance.model_dump() | fields)


def _record(
    directory: Path, preset: str, tables: Mapping[str, pd.DataFrame], fields: Mapping[str, Any]
) -> None:
    """Write tables and how they came about, replacing what the folder held."""
    named = {f"{name}.csv": table for name, table in tables.items()}
    write_folder(directory, named, {"preset": preset, "seeds": [], **fields})
    print(f"written to {directory}")


def _check_widths(widths: tuple[int, ...]) -> None:
    if len(set(widths)) < len(widths):
        raise UserError(f"--widths: a width is given twice: {list(widths)}")
    for width in widths:
        try:
            chapter.of_width(width)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise UserError(f"--widths: width {width}: {reason}") from None


def language_config(device: str, weights: str | None) -> LanguageConfig:
    """That of the recorded runs, without the metric that costs another gradient."""
    config = (smollm2() if device == "cuda" else smollm2_short()).config
    config = config.model_copy(update={"cosine_every": 0})
    return config if weights is None else config.model_copy(update={"model": model_of(weights)})


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Run it; what must be changed first is said in one line."""
    try:
        tyro.cli(bench, prog="python -m benchmarks", args=arguments)
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
