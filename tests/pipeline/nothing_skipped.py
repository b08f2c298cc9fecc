"""A pytest plugin: a skipped test is a failure, but for checkouts that no package index offers.

Used as ``pytest -p tests.pipeline.nothing_skipped``, where everything that tests need is installed.
"""

from __future__ import annotations

import pytest

#: In the reason of a skip that is let pass.
ALLOWED = "FRAMEWORK_SOURCES"


def not_allowed(reports: list[pytest.TestReport]) -> list[str]:
    """The reasons of skips that are not let pass; a skip's ``longrepr`` is (file, line, reason)."""
    return [str(report.longrepr) for report in reports if ALLOWED not in str(report.longrepr)]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = not_allowed(terminal.stats.get("skipped", []))
    if skipped and exitstatus == pytest.ExitCode.OK:
        terminal.write_line(f"\n{len(skipped)} skipped, and nothing should be here:")
        for reason in skipped:
            terminal.write_line(f"  {reason}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
