"""CONTRIBUTING leads to files that are there, in few steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
WAYS = re.split(
    r"^\*\*", TEXT.partition("## The way of a thing")[2].partition("## Recipes")[0], flags=re.M
)
RECIPES = re.findall(r"^\*\*An? \w+\.\*\*.*?(?=\n\n|\Z)", TEXT, re.M | re.S)
FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|md|yaml|yml|ipynb|toml))`")


def test_every_file_that_it_names_exists() -> None:
    named = set(FILE.findall(TEXT))
    assert len(named) > 25
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("way", WAYS[1:], ids=lambda way: way.partition("*")[0][:20])
def test_a_way_has_at_most_eight_steps_each_a_file(way: str) -> None:
    steps = re.findall(r"^\d\. (.*(?:\n   .*)*)", way, re.M)
    assert 4 <= len(steps) <= 8
    assert all(FILE.search(step) or "`book/" in step for step in steps)


def test_there_are_four_ways_and_four_recipes_of_at_most_four_files() -> None:
    assert len(WAYS) == 5
    assert len(RECIPES) == 4
    assert all(1 <= len(re.findall(r"\(\d\)", recipe)) <= 4 for recipe in RECIPES)
