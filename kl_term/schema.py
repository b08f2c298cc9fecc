"""The base of every configuration: frozen, strict, no unknown fields, no NaN or infinity."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer


class Schema(BaseModel):
    """A validated, immutable configuration; equal fields mean equal configurations."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Extended(Schema):
    """A configuration that got fields after it was first recorded.

    At its default such a field is left out of what is written, so that what was recorded without it
    keeps its name.
    """

    #: The fields that came later, each with a default.
    later: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _as_recorded(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = fields(self)
        for name in self.later:
            if getattr(self, name) == type(self).model_fields[name].default:
                found.pop(name, None)
        return found
