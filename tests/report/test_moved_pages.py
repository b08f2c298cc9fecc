"""Old addresses lead to the pages that took over what stood there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from sphinx.errors import ExtensionError

from analysis.report.moved_pages import leading_page
from analysis.report.pages import toc_pages
from analysis.report.project import Project
from tests.book.site_problems import site_problems
from tests.report.sites import build_site

ROOT = Path(__file__).resolve().parents[2]
MOVED = yaml.safe_load((ROOT / "_config.yml").read_text())["sphinx"]["config"]["moved_pages"]
#: What each merged chapter had: theorems, equations, figures, sections, exercises.
LABELS = {
    "09_advantages": """
    advantages-appendix arcsine_objective best_of_n difficulty_weight early_stop
    ex-group-of-two ex-largest-weight fig-aggregation fig-best-of-n fig-difficulty
    fig-early-stop informative_groups kept_fraction length_penalty marginal_rewards
    normalised_objective path_score prop-completion-weight-converse prop-length-bonus
    prop-token-mean relative_length_reward repeats sec-aggregation sec-clip-higher
    sec-critic sec-noise sec-process soft_overlong thm-advantage-bounds thm-amplification
    thm-baseline thm-baseline-variance thm-completion-weight thm-difficulty
    thm-length-invariance thm-popoviciu thm-telescope thm-weighted-divergence
    token_mean_weight
    """,
    "17_stale_and_mismatched": """
        ex-mask-and-clip ex-passes fig-stale-ages fig-stale-masks fig-three-ways
        fig-trained-mismatch mismatch_weight sec-merged-clip sec-mismatch-trained
        sec-partial-trained sec-routing-trained sec-stale-masking sec-stale-more
        sec-stale-starts sec-stale-weight sec-three-ways-trained
    """,
    "19_equal_kl": """
        ex-equal-beta fig-designed-curves fig-designed-kls fig-equal-kl fig-gradient-noise
        fig-half-step-curves fig-kl-axes sec-equal-kl-half-step sec-equal-kl-more sec-kl-axes
        straight_through
    """,
    "11_numerics": "ex-crossover ex-where-after fig-cancellation fig-clamps prop-dead-zones",
}


def build(root: Path, moved: dict[str, str]) -> Path:
    (root / "run").mkdir()
    (root / "index.rst").write_text("Book\n====\n\n.. toctree::\n\n   run/08_new\n")
    (root / "run/08_new.rst").write_text("Where <it> is\n=============\n\nText.\n")
    build_site(root, extensions=["analysis.report.moved_pages"], moved_pages=moved)
    return root / "out"


def test_an_old_address_leads_on_with_and_without_scripts(tmp_path: Path) -> None:
    out = build(tmp_path, {"run/09_old": "run/08_new", "old": "run/08_new"})
    beside, above = ((out / f"{name}.html").read_text() for name in ("run/09_old", "old"))
    assert 'location.replace("08_new.html" + location.hash)' in beside
    assert 'content="0; url=08_new.html"' in beside
    assert "<title>Where &lt;it&gt; is</title>" in beside
    assert '<a href="run/08_new.html">' in above
    assert not [fault for fault in site_problems(out) if "old" in fault]
    assert "09_old" not in (out / "searchindex.js").read_text()


@pytest.mark.parametrize(
    ("moved", "said"),
    [
        ({"run/08_new": "index"}, "run/08_new is a page of the book"),
        ({"run/09_old": "run/07"}, "run/09_old leads to run/07, which is no page"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused(tmp_path: Path, moved, said: str) -> None:
    with pytest.raises(ExtensionError, match=said):
        build(tmp_path, moved)


def test_the_pages_of_the_book_that_moved_lead_to_pages_of_the_book() -> None:
    pages = {path.relative_to(ROOT).with_suffix("").as_posix() for path in toc_pages(Project(ROOT))}
    assert MOVED and set(MOVED.values()) <= pages and not MOVED.keys() & pages


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("09_advantages", "08_reward_side"),
        ("11_numerics", "14_frameworks"),
        ("17_stale_and_mismatched", "07_off_policy"),
        ("19_equal_kl", "04_grpo_ablation"),
    ],
)
def test_a_chapter_has_every_label_of_the_one_that_was_merged_into_it(old: str, new: str) -> None:
    assert MOVED[f"book/_run/{old}"] == f"book/_run/{new}"
    page = (ROOT / f"notebooks/{new}.ipynb").read_text()
    labels = re.findall(r":label: ([\w-]+)|\(([\w-]+)\)=|\"name\": \"(fig-[\w-]+)\"", page)
    assert set(LABELS[old].split()) <= {label for found in labels for label in found}


def test_a_page_at_the_root_leads_down() -> None:
    assert 'href="a/b.html"' in leading_page("c", "a/b", title="B")
