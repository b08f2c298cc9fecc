"""``analysis run``: notebooks in, executed notebooks with provenance out."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from analysis.records.manifests import verify_results
from analysis.report.notebooks.jobs import CELL_TIMEOUT_SECONDS, Limits, plan, stale_jobs
from analysis.report.notebooks.runs import run_jobs
from analysis.report.parameters import parse_assignments
from analysis.report.project import find_project, select_notebooks
from kl_term.errors import UserError


def run(
    names: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[NAMES ...]")
    ] = (),
    /,
    parameter: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(aliases=["-p"], metavar="NAME=VALUE"),
    ] = (),
    parameters_file: Path | None = None,
    profile: Literal["quick", "full"] | None = None,
    jobs: int | None = None,
    force: tyro.conf.FlagCreatePairsOff[bool] = False,
    timeout: float = CELL_TIMEOUT_SECONDS,
    output: Path | None = None,
) -> None:
    """Execute notebooks through papermill, each in a process and kernel of its own.

    A run is repeated only when its notebook, its parameters, the code that it imports, a file that
    it read or the locked environment changed since.

    Args:
        names: notebooks as number, name or path; all by default.
        parameter: a parameter as name=value; may be repeated.
        parameters_file: a YAML file of parameters; -p overrides it.
        profile: quick (CPU) or full (GPU), short for -p profile=...
        jobs: notebooks at a time; by default two, or one on a single core.
        force: run even what is up to date.
        timeout: limit of a cell in seconds.
        output: a folder for the executed notebooks; by default they become the book's pages.
    """
    started = time.monotonic()
    project = find_project(Path.cwd())
    limits = _limits(jobs, timeout)
    texts = parse_assignments(parameter)
    if profile is not None and texts.setdefault("profile", profile) != profile:
        raise UserError("--profile and -p profile=... disagree; give one of them")
    sources = select_notebooks(project, names)
    verify_results(project.results)
    planned = plan(
        project,
        sources,
        directory=project.runs if output is None else output.resolve(),
        values=_read_parameters(parameters_file),
        texts=texts,
    )
    stale = dict(stale_jobs(project, planned))
    for job in planned:
        if force or job in stale:
            continue
        print(f"{job.name}  up to date", file=sys.stderr)
    todo = planned if force else list(stale)
    if todo:
        run_jobs(project, todo, limits, force=force)
        print(
            f"{len(todo)} of {len(planned)} notebooks run in {time.monotonic() - started:.0f} s: "
            f"{project.relative(todo[0].files.directory)}/",
            file=sys.stderr,
        )


def _limits(jobs: int | None, timeout: float) -> Limits:
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {jobs}")
    if not 0 < timeout < float("inf"):
        raise UserError(f"--timeout must be a positive number of seconds, not {timeout}")
    return Limits(timeout=timeout) if jobs is None else Limits(jobs=jobs, timeout=timeout)


def _read_parameters(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    from analysis.report.strict_yaml import load_yaml

    content = load_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: must hold a mapping of parameter names to values")
    return content
