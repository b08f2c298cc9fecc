"""Under what a run was computed: everything but its configuration that its bits may depend on."""

from __future__ import annotations

from collections.abc import Sequence

from kl_term.schema import Schema

#: Of recordings from before it was written down, and of a checkout that git does not know.
UNKNOWN = "unknown"


class Provenance(Schema):
    """Source, device and versions of a run, and where to find them again."""

    #: Hash of the package source that training imports.
    source: str
    device: str
    versions: dict[str, str]
    #: Of the checkout, ``with changes`` where a tracked file differs from it.
    commit: str = UNKNOWN
    #: Hash of the names and versions of all installed packages.
    packages: str = UNKNOWN

    def gives_bits_of(self, other: Provenance) -> bool:
        """Do equal runs come out equal to the bit? What merely lies beside them does not count."""
        return self.model_copy(update=other.model_dump(include=_BESIDE)) == other


#: Fields that no bit depends on, given the others.
_BESIDE = {"commit", "packages"}


def merged(provenances: Sequence[Provenance]) -> Provenance:
    """One for runs of one source that were computed in several places."""

    def joined(values: Sequence[str]) -> str:
        return "; ".join(dict.fromkeys(values))

    first = provenances[0]
    return Provenance(
        source=first.source,
        device=joined([provenance.device for provenance in provenances]),
        versions={name: joined([s.versions[name] for s in provenances]) for name in first.versions},
        commit=joined([provenance.commit for provenance in provenances]),
        packages=joined([provenance.packages for provenance in provenances]),
    )
