"""Under what a run was computed: everything but its configuration that its bits may depend on."""

from __future__ import annotations

from collections.abc import Sequence

from kl_term.schema import Schema


class Provenance(Schema):
    """Source, device and versions of a run."""

    #: Hash of the package source that training imports.
    source: str
    device: str
    versions: dict[str, str]


def merged(provenances: Sequence[Provenance]) -> Provenance:
    """One for runs of one source that were computed in several places."""

    def joined(values: Sequence[str]) -> str:
        return "; ".join(dict.fromkeys(values))

    first = provenances[0]
    return Provenance(
        source=first.source,
        device=joined([provenance.device for provenance in provenances]),
        versions={name: joined([s.versions[name] for s in provenances]) for name in first.versions},
    )
