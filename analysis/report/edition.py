"""An edition of the book in Chinese: the same pages from the same runs, in other words.

`stage` copies the pages with what the catalogues translate, and Sphinx builds them into a folder of
the site. A paragraph without a translation stays English; a page without a catalogue says so, in
the menu too.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
import yaml

from analysis.report.pages import toc_pages
from analysis.report.project import Project
from analysis.report.strict_yaml import load_yaml
from analysis.report.translation import (
    CODE,
    FIGURES,
    PAGE_TITLE,
    Translate,
    catalogue_path,
    catalogues,
    load,
    translated,
    translated_notebook,
    translator,
)

TITLE = "KL 项：GRPO 的正则项究竟在优化什么"
#: What a page without a catalogue says.
UNTRANSLATED = "本页尚未翻译，以下为英文原文。"
#: What the menu says of it.
IN_ENGLISH = "（英文）"
_SEARCH, _SHOW, _HIDE = "搜索本书", "显示代码", "隐藏代码"
#: What a template puts after a translated text, and what belongs there.
_STOP, _STOPS = re.compile(r"(?<=[一-鿿）`])[.;](?=\s)|\.(?=\*\*)"), {".": "。", ";": "；"}


def stage(project: Project, destination: Path) -> None:
    """Write the sources of an edition: configuration, menu, and pages as far as translated."""
    from analysis.report.advice_page import filler

    shutil.copytree(
        project.book, destination / "book", ignore=shutil.ignore_patterns(".*", "locale")
    )
    words = catalogue_path(project, FIGURES)
    for path in (words, words.with_name("index_terms.yaml")):  # read while pages are written
        if path.is_file():
            copied = destination / path.relative_to(project.root)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)
    for name in ("kl_term", "analysis", "notebooks", "results", project.address.name):
        (destination / name).symlink_to(project.root / name)
    config, toc = (load_yaml(path, path.name) for path in (project.config, project.toc))
    config["title"] = TITLE
    prompts = {"nb_code_prompt_show": _SHOW, "nb_code_prompt_hide": _HIDE}
    config["sphinx"]["config"] |= {"language": CODE, **prompts}
    theme = config["sphinx"]["config"]["html_theme_options"]
    theme["logo"]["text"] = TITLE.split("：")[0]
    theme["search_bar_text"] = _SEARCH
    menu = translator(load(project, "menu"))
    for part in toc.get("parts", ()):
        part["caption"] = menu(part["caption"])
        _mark_untranslated(project, part.get("chapters", ()))
    for name, content in (("_config.yml", config), ("_toc.yml", toc)):
        text = yaml.safe_dump(content, allow_unicode=True, sort_keys=False)
        (destination / name).write_text(text, encoding="utf-8")
    known = set(catalogues(project))
    titles = translator(load(project, "titles"))
    fill = filler(project, translator(load(project, "advice"))) if "advice" in known else str
    for page in toc_pages(project):
        path = destination / page.relative_to(project.root)
        translations = load(project, path.name) if path.name in known else None
        _stage_page(project, path, translations, titles, fill)


def _mark_untranslated(project: Project, entries: Sequence[dict[str, Any]]) -> None:
    """Say in the menu of the edition which pages are in English."""
    known, titles = set(catalogues(project)), translator(load(project, "titles"))
    for entry in entries:
        _mark_untranslated(project, entry.get("sections", ()))
        page = project.root / entry["file"]
        heading = entry.get("title") or _heading(page)
        if page.name not in known and heading:
            title = titles(f"# {heading}").removeprefix("# ")
            entry["title"] = f"{title.replace('$', '')}{IN_ENGLISH}"


def _heading(page: Path) -> str | None:
    """The title of a page, or None where there is no such page yet."""
    text, notebook = page.with_suffix(".md"), page.with_name(f"{page.name}.ipynb")
    if text.is_file():
        said = text.read_text(encoding="utf-8")
    elif notebook.is_file():
        said = "\n".join(
            cell.source
            for cell in nbformat.read(notebook, as_version=4).cells
            if cell.cell_type == "markdown"
        )
    else:
        return None
    return found[0].removeprefix("# ") if (found := PAGE_TITLE.search(said)) else None


def _stage_page(
    project: Project,
    path: Path,
    translations: Mapping[str, str] | None,
    titles: Translate,
    fill: Translate,
) -> None:
    source = path.with_suffix(".md")
    if path.name == "ledger" and translations is not None:
        from analysis.report.ledger_page import ledger_page

        source.parent.mkdir(parents=True, exist_ok=True)
        conditions = load(project, "conditions")
        text = ledger_page(project, translator({**conditions, **translations}))
        source.write_text(text, encoding="utf-8")
    elif path.name == "symptoms" and translations is not None:
        from analysis.report.symptoms import symptoms_page

        source.parent.mkdir(parents=True, exist_ok=True)
        text = symptoms_page(project, translator(translations))
        text = _STOP.sub(lambda stop: _STOPS[stop[0]], text)
        source.write_text(text, encoding="utf-8")
    elif source.is_file():
        text = source.read_text(encoding="utf-8")
        source.write_text(_edition(text, translations, titles, fill), encoding="utf-8")
    elif (source := path.with_name(f"{path.name}.ipynb")).is_file():
        notebook = nbformat.read(source, as_version=4)
        if translations is None:
            first = next(cell for cell in notebook.cells if cell.cell_type == "markdown")
            first.source = _edition(first.source, None, titles, fill)
        else:
            translated_notebook(notebook, _filling(translations, fill))
        nbformat.write(notebook, source)


def _filling(translations: Mapping[str, str], fill: Translate) -> Translate:
    translate = translator(translations)
    return lambda piece: fill(translate(piece))


def _edition(
    text: str, translations: Mapping[str, str] | None, titles: Translate, fill: Translate
) -> str:
    if translations is not None:
        return translated(text, _filling(translations, fill))
    note = f"\n\n```{{div}} untranslated\n{UNTRANSLATED}\n```\n"
    return PAGE_TITLE.sub(lambda title: titles(title[0]) + note, text, count=1)
