"""Misspelt keys of _config.yml, which Jupyter Book itself passes over in silence."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from analysis.errors import Refused
from analysis.report.project import Project
from analysis.report.strict_yaml import load_yaml

# Read by jupyter_book.config, but in neither its schema nor its defaults.
_UNLISTED = {"parse": {"myst_substitutions": {}}}


def config_problems(project: Project) -> list[str]:
    """The unknown keys of _config.yml, one line each.

    Raises:
        Refused: the file is no YAML mapping or repeats a key.
    """
    config = load_yaml(project.config, project.config.name)
    if not isinstance(config, dict):
        raise Refused("_config.yml: must be a mapping")
    return list(_unknown(config, known_keys(), ""))


def known_keys() -> dict[str, Any]:
    """The keys that the installed Jupyter Book knows, nested; an empty dict allows anything."""
    spec = find_spec("jupyter_book")
    if spec is None or not spec.submodule_search_locations:
        raise Refused("jupyter-book is not installed; run make book")
    folder = Path(spec.submodule_search_locations[0])
    schema = json.loads((folder / "config_schema.json").read_text(encoding="utf-8"))
    defaults = yaml.safe_load((folder / "default_config.yml").read_text(encoding="utf-8"))
    return _merge(_merge(_schema_keys(schema), _nested(defaults)), _UNLISTED)


def _schema_keys(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _schema_keys(value) for key, value in schema.get("properties", {}).items()}


def _nested(value: Any) -> dict[str, Any]:
    return {key: _nested(part) for key, part in value.items()} if isinstance(value, dict) else {}


def _merge(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _merge(first.get(key, {}), second.get(key, {})) for key in first.keys() | second.keys()
    }


def _unknown(config: Mapping[Any, Any], known: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in config.items():
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, 1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            yield f"_config.yml: unknown key {prefix}{key}{hint}"
        elif isinstance(value, dict) and known[key]:
            yield from _unknown(value, known[key], f"{prefix}{key}.")
