"""Whether the ledger was recomputed, and agreed, since anything it depends on last changed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from analysis.files import replace_file, sha256_file
from analysis.report.ledger import Outcome, ledger_path
from analysis.report.project import Project
from analysis.report.provenance import hash_json, shared_inputs


def store_outcomes(project: Project, outcomes: Iterable[Outcome]) -> None:
    """Keep the outcome of recomputing the whole ledger, with the hash of what it was made from."""
    content = {
        "inputs": _inputs(project),
        "problems": {o.claim.id: o.problem for o in outcomes if o.problem},
    }
    project.runs.mkdir(parents=True, exist_ok=True)
    replace_file(_stored(project), (json.dumps(content, indent=2) + "\n").encode())


def settled_ledger(project: Project) -> bool:
    """True if nothing changed since the whole ledger was recomputed without a disagreement."""
    return not ledger_problems(project)


def ledger_problems(project: Project) -> list[str]:
    """What keeps the ledger from being published, one line each."""
    if not ledger_path(project).is_file():
        return []
    try:
        stored = json.loads(_stored(project).read_bytes())
        inputs, problems = stored["inputs"], dict(stored["problems"])
    except (OSError, ValueError, KeyError, TypeError):
        return ["book/claims.yaml: never recomputed; run analysis claims"]
    if inputs != _inputs(project):
        return ["book/claims.yaml or its evidence changed since; run analysis claims"]
    return [f"book/claims.yaml: {identifier}: {text}" for identifier, text in problems.items()]


def _stored(project: Project) -> Path:
    return project.runs / "claims.json"


def _inputs(project: Project) -> str:
    return hash_json([sha256_file(ledger_path(project)), shared_inputs(project)])
