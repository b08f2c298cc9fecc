"""Figures out of notebooks: exact bytes under the cell's name, and no silent gap or clash."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from docutils import nodes

from analysis.report import run_figures


def notebook(path: Path, *cells: tuple[str, bytes | None]) -> Path:
    written = []
    for name, image in cells:
        outputs = [nbformat.v4.new_output("stream", text="words")]
        if image is not None:
            data = {"image/png": base64.b64encode(image).decode(), "text/plain": "<Figure>"}
            outputs.append(nbformat.v4.new_output("execute_result", data=data))
        metadata = {"mystnb": {"figure": {"name": name}}} if name else {}
        written.append(nbformat.v4.new_code_cell("figure", outputs=outputs, metadata=metadata))
    path.parent.mkdir(exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=written), path)
    return path


def written(folder: Path, target: Path) -> list[Path]:
    found = run_figures.figures(*sorted(folder.glob("*.ipynb")))
    return run_figures.write_images(found, target)


def test_named_figures_are_taken_and_others_left(tmp_path: Path) -> None:
    path = notebook(tmp_path / "01.ipynb", ("", b"other"), ("fig-a", b"aa"), ("fig-b", b"bb"))
    written = nbformat.read(path, as_version=4)
    written.cells[-1].outputs[-1].metadata = {
        "image/png": {"data": "x,y\n1,2\n", "words": ["reward", "KL"]}
    }
    nbformat.write(written, path)
    assert run_figures.figures(path) == {
        "fig-a": (b"aa", "", ()),
        "fig-b": (b"bb", "x,y\n1,2\n", ("reward", "KL")),
    }


def test_a_figure_without_an_image_is_refused_by_name(tmp_path: Path) -> None:
    path = notebook(tmp_path / "01.ipynb", ("fig-a", None))
    with pytest.raises(ValueError, match=r"01.ipynb: figure 'fig-a' has no image"):
        run_figures.figures(path)


def test_a_name_used_twice_is_refused_within_and_across_notebooks(tmp_path: Path) -> None:
    path = notebook(tmp_path / "01.ipynb", ("fig-a", b"a"), ("fig-a", b"b"))
    with pytest.raises(ValueError, match="'fig-a' is used twice"):
        run_figures.figures(path)
    notebook(tmp_path / "01.ipynb", ("fig-a", b"a"))
    notebook(tmp_path / "02.ipynb", ("fig-a", b"b"))
    with pytest.raises(ValueError, match=r"02.ipynb: .* is used twice"):
        written(tmp_path, tmp_path / "out")


def test_written_files_follow_the_notebooks(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    notebook(runs / "01.ipynb", ("fig-a", b"a"), ("fig-b", b"b"))
    assert written(runs, out) == [out / "fig-a.png", out / "fig-b.png"]
    before = (out / "fig-b.png").stat().st_mtime_ns
    notebook(runs / "01.ipynb", ("fig-b", b"b"), ("fig-c", b"c"))
    assert written(runs, out) == [out / "fig-b.png", out / "fig-c.png"]
    assert sorted(path.name for path in out.iterdir()) == ["fig-b.png", "fig-c.png"]
    assert (out / "fig-b.png").stat().st_mtime_ns == before


def test_stale_copies_are_refreshed_and_orphans_refused(tmp_path: Path) -> None:
    notebook(tmp_path / "notebooks/01.ipynb", ("fig-a", b"new"))
    static = tmp_path / "static"
    static.mkdir()
    (static / "fig-a.png").write_bytes(b"old")
    (static / "logo.png").write_bytes(b"logo")
    assert run_figures.refresh_copies(static, tmp_path / "notebooks") == [static / "fig-a.png"]
    assert (static / "fig-a.png").read_bytes() == b"new"
    assert run_figures.refresh_copies(static, tmp_path / "notebooks") == []
    (static / "fig-gone.png").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"fig-gone.png: no notebook"):
        run_figures.refresh_copies(static, tmp_path / "notebooks")


def test_a_run_of_a_chapter_that_left_the_book_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/_run/01\n")
    runs = tmp_path / "book/_run"
    (tmp_path / "book").mkdir()
    notebook(runs / "01.ipynb", ("fig-a", b"a"))
    notebook(runs / "11.ipynb", ("fig-a", b"of a chapter that left"), ("fig-b", b"b"))
    app = SimpleNamespace(srcdir=tmp_path, config=SimpleNamespace(language="en"))
    run_figures._write_images(app)
    written = tmp_path / "book/_generated/figures"
    assert {path.name: path.read_bytes() for path in written.iterdir()} == {"fig-a.png": b"a"}


def test_a_glossary_leaves_out_names_and_waits_for_every_word() -> None:
    meanings = {"reward": "奖励", "TRL": "TRL", "$k_1$ logged": "记录的 $k_1$"}
    (legend,) = run_figures.glossary(("reward", "TRL", "$k_1$ logged"), meanings)
    _, paragraph, _ = legend
    assert paragraph.astext() == "reward：奖励；k_1 logged：记录的 k_1"
    assert [math.astext() for math in legend.findall(nodes.math)] == ["k_1", "k_1"]
    assert run_figures.glossary(("TRL",), meanings) == []
    assert run_figures.glossary(("reward", "KL"), meanings) == []
