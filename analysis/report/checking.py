"""What can be checked of a checkout in seconds, and what each check covers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from analysis.records.manifests import read_manifest, recorded_folders
from analysis.report.notebooks.jobs import plan, stale_jobs
from analysis.report.notebooks.stored import refreshed
from analysis.report.pages import output_problems, run_pages, run_problems
from analysis.report.project import Project, select_notebooks
from analysis.report.provenance import ledger_problems, read_notebook
from kl_term.errors import UserError


@dataclass(frozen=True)
class Checked:
    """One kind of thing: what was looked at, and what is wrong with it."""

    kind: str
    covers: str
    problems: tuple[str, ...] = ()
    absent: bool = False  #: there is nothing here that could be looked at


def check_project(project: Project) -> Iterator[Checked]:
    """Results, runs, stored outputs and claims, without running or recomputing anything."""
    yield _results(project)
    ran = any(run.provenance.is_file() for run in run_pages(project))
    yield _runs(project) if ran else Checked("runs", "none here: make book", absent=True)
    yield _outputs(project, ran=ran)
    if (project.runs / "claims.json").is_file():
        covers = "the ledger was recomputed from the rows, code and recordings that stand here"
        yield Checked("claims", covers, tuple(ledger_problems(project)))
    else:
        yield Checked("claims", "never recomputed here: analysis claims", absent=True)


def _results(project: Project) -> Checked:
    folders, problems = recorded_folders(project.results), []
    for folder in folders:
        try:
            read_manifest(folder)
        except UserError as problem:
            problems.append(str(problem))
    covers = f"{len(folders)} folders: every file by its hash, each manifest by its seal and name"
    return Checked("results", covers, tuple(problems))


def _runs(project: Project) -> Checked:
    covers = (
        f"{len(run_pages(project))} pages: made from the notebook, parameters, code, files and "
        "packages that stand here, and not edited since"
    )
    return Checked("runs", covers, tuple(run_problems(project)))


def _outputs(project: Project, *, ran: bool) -> Checked:
    """Stored outputs, beside the book's runs where there are any that are current."""
    problems, beside = [], 0
    jobs = plan(project, select_notebooks(project, ()), directory=project.runs)
    stale = {job.name for job, _ in stale_jobs(project, jobs)} if ran else {j.name for j in jobs}
    for job in jobs:
        label = project.relative(job.source)
        found = output_problems(read_notebook(job.source, label))
        problems += [f"{label}: {problem}" for problem in found]
        if job.name not in stale:
            beside += 1
            if refreshed(project, job) != job.source.read_bytes():
                problems.append(f"{label}: stores other outputs than its run: analysis refresh")
    covers = (
        f"{len(jobs)} notebooks: run to the end, no error, no script; {beside} of them equal to "
        "their run (make test-slow runs all again)"
    )
    return Checked("outputs", covers, tuple(problems))
