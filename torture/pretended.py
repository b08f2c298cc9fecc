"""A chapter's run and the ledger's outcome as the pipeline stores them, without running either."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime

from analysis.freshness import reads_sha256
from analysis.report.parameters import declared_parameters, resolve_parameters
from analysis.report.project import Project
from analysis.report.provenance import (
    Provenance,
    RunFiles,
    inputs_of,
    read_notebook,
    store_ledger,
    versions,
    write_provenance,
)
from kl_term.files import replace_file, sha256_bytes


def run_without_kernel(project: Project, name: str, reads: Sequence[str]) -> dict[str, str]:
    """Put the committed notebook, with its outputs, where its run would be; the run's inputs."""
    source = project.notebooks / f"{name}.ipynb"
    notebook = read_notebook(source, name)
    parameters = resolve_parameters(declared_parameters(notebook, name), {}, {}, name)
    inputs = inputs_of(project, notebook, parameters, name)
    run = RunFiles(project.runs, name)
    project.runs.mkdir(parents=True, exist_ok=True)
    data = (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()
    replace_file(run.output, data)
    write_provenance(
        run.provenance,
        Provenance(
            notebook=project.relative(source),
            parameters=parameters,
            inputs=inputs,
            reads=reads_sha256(reads, project.root),
            output=sha256_bytes(data),
            device="CPU",
            threads=1,
            versions=versions(),
            platform="none",
            wall_seconds=0.0,
            finished_at=datetime.now(UTC).replace(microsecond=0),
        ),
    )
    store_ledger(project, {}, reads)
    return inputs
