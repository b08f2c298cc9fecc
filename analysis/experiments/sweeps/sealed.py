"""Stored JSON that notices any change: a configuration-like body and the SHA-256 of its text.

The text is canonical (sorted keys, no spaces), so equal bodies are equal files, and a file is
intact exactly when sealing what it says gives its bytes again.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import ValidationError

from analysis.errors import first_problem
from analysis.files import sha256_bytes
from analysis.schema import Schema

Body = TypeVar("Body", bound=Schema)


class Damaged(ValueError):
    """A stored file is not what was written; the message says how, not which."""


def canonical(model: Schema) -> bytes:
    """The one JSON text of a validated model: 1 and 1.0, or fields in another order, are one."""
    checked = type(model).model_validate(model.model_dump())
    return _encode(json.loads(checked.model_dump_json()))


def seal(body: Schema) -> bytes:
    """The bytes to store."""
    return _seal(json.loads(canonical(body)))


def unseal(data: bytes, model: type[Body]) -> Body:
    """What :func:`seal` was given.

    Raises:
        Damaged: a bit differs, or the body has not the fields of ``model``.
    """
    try:
        body = json.loads(data)["body"]
        intact = data == _seal(body)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged("no sealed JSON: it is torn or overwritten") from None
    if not intact:
        raise Damaged("its checksum does not match")
    try:
        return model.model_validate_json(_encode(body))
    except ValidationError as error:
        problem = first_problem(error, whole="body")
        raise Damaged(f"written by another version: {problem}") from None


def _seal(body: Any) -> bytes:
    return _encode({"body": body, "sha256": sha256_bytes(_encode(body))})


def _encode(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
