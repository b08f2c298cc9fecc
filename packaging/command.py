"""The command `analysis` in an editable install of a clone, and in no wheel."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Command(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling before it builds a wheel; an editable install is one too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            build_data["shared_scripts"] = {f"{self.root}/packaging/analysis": "analysis"}
