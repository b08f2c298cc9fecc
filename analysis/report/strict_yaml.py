"""YAML in which a key written twice is an error, ``true:`` is a key like any other, and no part
holds itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from kl_term.errors import UserError


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, and reads each word before a colon as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:bool":
                key_node.tag = "tag:yaml.org,2002:str"
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_yaml(path: Path, label: str | None = None) -> Any:
    """The content of a YAML file."""
    label = label or str(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
        json.dumps(content, default=str)  # which refuses what holds itself
        return content
    except OSError as error:
        raise UserError(f"{label}: cannot be read ({error.strerror})") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{label}{line}: {error.problem}") from None
    except RecursionError:
        raise UserError(f"{label}: nested too deeply") from None
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise UserError(f"{label}: no valid YAML ({str(error).splitlines()[0]})") from None
