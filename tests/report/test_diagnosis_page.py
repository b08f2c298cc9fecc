"""A page made from somebody's dump shows the dump's texts and runs none of them."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from kl_term.cli.main import main
from kl_term.diagnosis.measure import measure
from kl_term.diagnosis.page import findings_html, html_page, lines
from kl_term.diagnosis.readers import read_rollouts
from kl_term.diagnosis.reports import report
from kl_term.diagnosis.schema import Settings

HOSTILE = "<script>alert(1)<script>\"'><img src=x onerror=alert(2)>$\\frac{"
ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "section", "ul"),
    *("li", "code", "img", "div", "table", "thead", "tbody", "tr", "th", "td", "a"),
}


class Tags(HTMLParser):
    """The tags of a page, each with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def assert_harmless(page: str) -> None:
    for tag, attributes in Tags(page).found:
        assert tag in ALLOWED, tag
        assert not any(name.startswith("on") for name in attributes), attributes
        if tag == "img":
            assert str(attributes["src"]).startswith("data:image/png;base64,")


def spoilt(value: Any) -> Any:
    """The same with every text replaced, names of fields of dictionaries included."""
    if isinstance(value, BaseModel):
        fields = {name: spoilt(getattr(value, name)) for name in type(value).model_fields}
        return type(value).model_construct(**fields)
    if isinstance(value, dict):
        return {spoilt(name): spoilt(one) for name, one in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(spoilt(one) for one in value)
    return HOSTILE if isinstance(value, str) else value


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Of which every name that its writer chooses is hostile."""
    names = ['"' + f"{HOSTILE}{n}".replace('"', '""') + '"' for n in range(3)]
    rows = [
        f"{name},{position},{-1 - position},-2,-1,0,1,0" for name in names for position in range(3)
    ]
    path = tmp_path / "<script>alert(1)<img src=x onerror=alert(2)>.csv"
    header = f"sequence,position,logp,ref_logp,old_logp,step,advantage,{names[0]}"
    path.write_text("\n".join([header, *rows]))
    return path


def test_names_that_a_writer_of_a_dump_chooses(dump: Path) -> None:
    page = dump.with_name("page.html")
    assert main(["diagnose", str(dump), "--page", str(page)]) == 0
    assert_harmless(page.read_text())
    assert "&lt;script&gt;alert(1)" in page.read_text()


def test_every_text_of_a_report(dump: Path) -> None:
    rollouts = read_rollouts(dump)
    found = report(measure(rollouts, Settings(resamples=100)), source=dump.name)
    assert found.findings and found.top_sequences
    hostile = found.model_copy(
        update={
            "source": HOSTILE,
            "findings": spoilt(found.findings),
            "top_sequences": spoilt(found.top_sequences),
            "measurements": spoilt(found.measurements),
            "not_measured": spoilt(found.not_measured),
            "ignored_columns": {HOSTILE: HOSTILE},
        }
    )
    assert_harmless(html_page(hostile, rollouts))
    assert_harmless(findings_html(hostile, book="../"))
    assert lines(hostile)
