"""A bill of materials: every locked package with its hashes, as CycloneDX 1.6 in JSON.

``python packaging/bill_of_materials.py requirements.lock torch.lock > kl-term.cdx.json``
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_PIN = re.compile(r"^(?P<name>[a-z0-9][a-z0-9._-]*)==(?P<version>[^\s;\\\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def bill(locks: Iterable[Path]) -> dict[str, Any]:
    """Of the packages of some locks; a package with two versions is listed with each."""
    components: dict[str, dict[str, Any]] = {}
    for lock in locks:
        for block in re.split(r"\n(?=\S)", lock.read_text(encoding="utf-8")):
            if not (pin := _PIN.match(block)):
                continue
            name, version = pin["name"], pin["version"]
            reference = f"pkg:pypi/{name}@{version}"
            components[reference] = {
                "type": "library",
                "bom-ref": reference,
                "name": name,
                "version": version,
                "purl": reference,
                "externalReferences": [
                    {
                        "type": "distribution",
                        "url": f"https://pypi.org/project/{name}/{version}/",
                        "hashes": [
                            {"alg": "SHA-256", "content": digest} for digest in _HASH.findall(block)
                        ],
                    }
                ],
            }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "kl-term"}},
        "components": [components[reference] for reference in sorted(components)],
    }


if __name__ == "__main__":
    print(json.dumps(bill(map(Path, sys.argv[1:])), indent=1))
