"""One address: empty today, and everything that reads it when it is not."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
import yaml
from pybtex.database import parse_string

from analysis.report.address import (
    MAINTAINERS,
    Address,
    bibtex,
    cited,
    linked,
    load_address,
    refresh_address,
    sources,
)
from analysis.report.project import Project
from kl_term.errors import UserError
from tests.report.sites import build_site

ROOT = Path(__file__).resolve().parents[2]
MADE_UP = {
    "repository": "https://github.com/ada.invalid/kl",
    "branch": "trunk",
    "site": "https://ada.invalid/kl",
    "authors": ["Ada Lovelace", "Émilie du Châtelet"],
    "doi": "10.5281/zenodo.1",
}
ADDRESS = Address(**{**MADE_UP, "authors": tuple(MADE_UP["authors"])})


def test_the_address_of_the_project_is_in_one_place_and_the_copies_are_its_own() -> None:
    project = Project(ROOT)
    address = load_address(project)
    for name, write in (("CITATION.cff", cited), ("README.md", linked)):
        text = (ROOT / name).read_text()
        assert write(address, text) == text, f"{name}: run analysis refresh"
    if address == Address():
        config = (ROOT / "_config.yml").read_text()
        assert not re.search(r"repository|baseurl|colab|binder", re.sub("#.*", "", config))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("site: https://a.invalid/", "site is 'https://a.invalid/'"),
        ("repository: git@a.invalid:b", "repository is"),
        ("doi: https://doi.org/10.5281/zenodo.1", "doi is"),
        ("reposiory: https://a.invalid/b", "unknown reposiory"),
    ],
)
def test_what_is_no_address_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "address.yaml").write_text(text)
    with pytest.raises(UserError, match=said):
        load_address(Project(tmp_path))


def test_the_citation_has_what_is_known() -> None:
    (empty,) = parse_string(bibtex(Address(), year="2026"), "bibtex").entries.values()
    assert [str(p) for p in empty.persons["author"]] == [f"{{{MAINTAINERS}}}"]
    assert not {"doi", "url"} & set(empty.fields)
    (entry,) = parse_string(bibtex(ADDRESS, year="2026"), "bibtex").entries.values()
    assert [p.last_names[-1] for p in entry.persons["author"]] == ["Lovelace", "Châtelet"]
    assert (entry.fields["doi"], entry.fields["url"]) == (ADDRESS.doi, ADDRESS.site)


def test_copies_take_the_address_and_lose_it_again(tmp_path: Path) -> None:
    for name in ("CITATION.cff", "README.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    project = Project(tmp_path)
    project.address.write_text(yaml.safe_dump(MADE_UP))
    assert len(refresh_address(project)) == 2 and refresh_address(project) == []
    told = yaml.safe_load((tmp_path / "CITATION.cff").read_text())
    assert told["repository-code"] == ADDRESS.repository and told["doi"] == ADDRESS.doi
    assert [author["name"] for author in told["authors"]] == MADE_UP["authors"]
    assert f"[Read it]({ADDRESS.site})" in project.readme.read_text()
    project.address.unlink()
    refresh_address(project)
    assert "invalid" not in project.readme.read_text() + (tmp_path / "CITATION.cff").read_text()


def test_commands_say_where_they_run_with_an_address_and_without() -> None:
    assert "git clone https://github.com/ada.invalid/kl" in sources(ADDRESS)
    assert "clone" not in sources(Address()) and "pyproject.toml" in sources(Address())
    pages = [*(ROOT / "book").glob("*.md"), *(ROOT / "analysis/report/templates").glob("*.md")]
    for page in pages:
        assert not re.search(r"\b(in|of) a clone\b", page.read_text()), page.name
    for page in pages:
        if "pip install -e" in page.read_text() and page.parent.name == "book":
            assert "{{ address.sources }}" in page.read_text(), page.name


def site(root: Path, address: dict[str, object]) -> dict[str, str]:
    (root / "book/_run").mkdir(parents=True)
    (root / "address.yaml").write_text(yaml.safe_dump(address))
    toctree = "```{toctree}\n_run/01_a\n```"
    page = f"# Book\n\n{{{{ address.sources }}}}\n\n```{{cite-book}}\n```\n\n{toctree}\n"
    (root / "book/index.md").write_text(page)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# A chapter")])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python"}
    nbformat.write(notebook, root / "book/_run/01_a.ipynb")
    (root / "works.bib").write_text("")
    extensions = [
        "myst_nb",
        "sphinxcontrib.bibtex",
        "analysis.report.sphinx_book",
        "analysis.report.address_pages",
    ]
    settings = {
        "extensions": [*extensions, "analysis.report.site_files"],
        "html_theme": "sphinx_book_theme",
        "root_doc": "book/index",
        "source_suffix": {".md": "myst-nb", ".ipynb": "myst-nb"},  # the default is shared
        "copyright": "2026",
        "nb_execution_mode": "off",
        "myst_enable_extensions": ["substitution"],
        "bibtex_bibfiles": ["works.bib"],
    }
    build_site(root, **settings)
    out = root / "out"
    return {p.relative_to(out).as_posix(): p.read_text() for p in out.rglob("*.html")}


def test_with_an_address_the_site_has_its_buttons_and_without_it_has_none(tmp_path: Path) -> None:
    told = site(tmp_path / "told", MADE_UP)
    chapter, landing = told["book/_run/01_a.html"], told["book/index.html"]
    assert "colab.research.google.com" in chapter and "mybinder.org" in chapter
    assert "https://github.com/ada.invalid/kl/edit/trunk/notebooks/01_a.ipynb" in chapter
    assert "notebooks/01_a.ipynb" in chapter and "book/_run/01_a.ipynb" not in re.sub(
        r"_sources/book/_run/01_a.ipynb", "", chapter
    )
    assert "git clone https://github.com/ada.invalid/kl" in landing
    assert "Lovelace and" in re.sub("<[^>]+>", "", landing)
    places = (tmp_path / "told/out/sitemap.xml").read_text()
    assert f"{ADDRESS.site}/book/_run/01_a.html" in places
    silent = site(tmp_path / "silent", {"repository": "", "authors": [], "site": "", "doi": ""})
    for text in silent.values():
        assert "invalid" not in text and "colab" not in text and "mybinder" not in text
        assert "git clone" not in text
    assert not (tmp_path / "silent/out/sitemap.xml").exists()
