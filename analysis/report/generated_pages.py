"""The pages that are written from the code and the runs, each as MyST text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial

import pandas as pd

from analysis.records.manifests import manifest_of, read_manifest, recorded_folders
from analysis.records.metrics import (
    COEFFICIENT_METRICS,
    CONTROL_METRICS,
    ENSEMBLE_METRICS,
    POLICY_METRICS,
    PROXY_METRICS,
    WINDOW_METRICS,
)
from analysis.report.advice_page import FILE as ADVICE
from analysis.report.advice_page import advice_json, conditions_page
from analysis.report.api import PAGES, reference_page
from analysis.report.audit_corpus import corpus_page
from analysis.report.audit_findings import findings_page
from analysis.report.diagnosis_quality import FOLDER, quality_page
from analysis.report.generated import render
from analysis.report.kl_curve import kl_curve_page
from analysis.report.ledger import load_corrections, load_errata, load_sources
from analysis.report.ledger_page import errata_page, ledger_page
from analysis.report.methods import load_methods, methods_page
from analysis.report.mutants import mutants_found
from analysis.report.pages import run_pages
from analysis.report.parameters import changed_parameters, declared_parameters
from analysis.report.project import Project
from analysis.report.provenance import Provenance, read_notebook, read_provenance
from analysis.report.real_cases import cases_page
from analysis.report.symptoms import symptoms_page
from kl_term.errors import UserError


def glossary_page() -> str:
    """Every metric that a training run logs, from the trainer's own list."""
    tables = {"windows": WINDOW_METRICS, "policies": POLICY_METRICS}
    tables |= {"proxies": PROXY_METRICS, "ensembles": ENSEMBLE_METRICS}
    tables |= {"coefficients": COEFFICIENT_METRICS | CONTROL_METRICS}
    return render("metrics.md", **tables)


def torture_figures(project: Project) -> str:
    """What ``make torture`` found: the sentence and the table of ``book/reliability.md``."""
    folder = project.results / "torture"
    if not folder.is_dir():
        return "Nothing is recorded in this checkout: run `make torture`.\n"
    manifest = read_manifest(folder)
    faults = pd.read_csv(folder / "faults.csv")
    past = faults[(faults["lost"] > 0) | (faults["silent"] > 0)]
    if not past.empty:
        said = ", ".join(past["fault"])
        raise UserError(f"results/torture: {said}: say on the page what got past, or mend it")
    return render("torture.md", faults=faults, **(manifest | {"folder": "torture"}))


def status_page(project: Project) -> str:
    """When, where and with what each result was computed."""
    runs = [
        (run.name, provenance)
        for run in run_pages(project)
        if (provenance := read_provenance(run.provenance)) is not None
    ]
    return render(
        "status.md",
        runs=[
            {
                "name": name,
                "made": made,
                "took": _duration(made.wall_seconds),
                "changed": _changes(project, name, made),
                "reads": _reads(made),
            }
            for name, made in runs
        ],
        recorded=[
            (project.relative(folder), manifest_of(folder))
            for folder in recorded_folders(project.results)
        ],
    )


def _changes(project: Project, name: str, provenance: Provenance) -> dict[str, str]:
    """The parameters that were not at their defaults."""
    source = project.root / provenance.notebook
    declared = declared_parameters(read_notebook(source, provenance.notebook), name)
    changed = changed_parameters(declared, provenance.parameters)
    return {key: json.dumps(value) for key, value in changed.items()}


def _reads(provenance: Provenance) -> list[str]:
    """The recorded results, and other files, that a run opened."""
    parts = (name.split("/") for name in provenance.reads)
    found = {"/".join(part[:2]) if part[0] == "results" else "/".join(part) for part in parts}
    return sorted(found)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"


#: What each page says, by file name.
GENERATORS: Mapping[str, Callable[[Project], str]] = {
    ADVICE: advice_json,
    "advice_conditions.md": conditions_page,
    "audit_findings.md": lambda project: findings_page(),
    "audit_quality.md": lambda project: corpus_page(project.results),
    "diagnosis_quality.md": lambda project: quality_page(project.results / FOLDER),
    "errata.md": lambda project: errata_page(
        load_errata(project), load_corrections(project), load_sources(project)
    ),
    "kl_curve.md": lambda project: kl_curve_page(),
    "ledger.md": ledger_page,
    "symptoms.md": symptoms_page,
    "methods.md": lambda project: methods_page(load_methods(project)),
    "real_cases.md": cases_page,
    "metrics.md": lambda project: glossary_page(),
    "torture.md": torture_figures,
    "mutants.md": mutants_found,
    "status.md": status_page,
    **{f"api_{page}.md": partial(reference_page, page=page) for page in PAGES},
}
