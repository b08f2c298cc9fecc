"""``pytest --kl-audit my_trainer:loss``: one test a property; and the fixture ``kl_audit``.

Registered by the distribution and off unless used: without the option and the fixture nothing is
imported but this file and the list of findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from kl_term.audit.findings import PROPERTIES

if TYPE_CHECKING:
    from kl_term.audit.report import Audit


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kl-term", "audit of a KL term")
    group.addoption(
        "--kl-audit",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="audit this loss: one test a property (may be given more than once)",
    )
    group.addoption(
        "--kl-beta", metavar="NAME", default=None, help="its argument that is the KL coefficient"
    )
    group.addoption(
        "--kl-expect",
        metavar="DIVERGENCE",
        default=None,
        help="what it must minimise, if stale too",
    )


@pytest.fixture
def kl_audit() -> Callable[..., Audit]:
    """The function :func:`kl_term.audit.auditing.audit`, of a loss."""
    from kl_term.audit import audit

    return audit


class AuditItem(pytest.Item):
    """One property of one loss."""

    def __init__(self, *, target: str, codes: tuple[str, ...], **rest: Any) -> None:
        super().__init__(**rest)
        self.target, self.codes = target, codes

    def runtest(self) -> None:
        """Audit the loss once, and fail where a finding of this property is more than a note."""
        found = _audited(self.config, self.target)
        wrong = [f for f in found.findings if f.code in self.codes and f.severity != "note"]
        if wrong:
            raise Failed("\n".join(f"{f.says}\n{f.advice}" for f in wrong))

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """What was found, without a traceback."""
        if isinstance(excinfo.value, (Failed, ValueError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, int | None, str]:
        """The loss and the property, as the report names them."""
        return self.target, None, f"{self.target}: {self.name}"


class ExpectItem(AuditItem):
    """What a loss minimises, fresh and stale."""

    def runtest(self) -> None:
        """Fail where the loss minimises something else than is expected."""
        found, (wanted,) = _audited(self.config, self.target), self.codes
        name = found.minimises["fresh"]["state"]
        if name != wanted:
            raise Failed(f"minimises {name}, not {wanted}")


class Failed(Exception):
    """A property does not hold."""


class AuditCollector(pytest.Collector):
    """All properties of one loss."""

    def collect(self) -> Iterator[pytest.Item]:
        for name, codes in PROPERTIES.items():
            yield AuditItem.from_parent(self, name=name, target=self.name, codes=codes)
        wanted = self.config.getoption("--kl-expect")
        if wanted:
            yield ExpectItem.from_parent(
                self, name=f"it minimises {wanted}", target=self.name, codes=(wanted,)
            )


def _audited(config: pytest.Config, target: str) -> Audit:
    from kl_term.audit.answering import audited
    from kl_term.audit.request import Request

    kept = config.stash.setdefault(_KEPT, {})
    if target not in kept:
        kept[target] = audited(Request(target=target, beta_name=config.getoption("--kl-beta")))
    return kept[target]


_KEPT = pytest.StashKey[dict[str, "Audit"]]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    for target in config.getoption("--kl-audit"):
        collector = AuditCollector.from_parent(session, name=target, nodeid=target)
        items.extend(collector.collect())
