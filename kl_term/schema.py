"""The base of every configuration: frozen, strict, no unknown fields, no NaN or infinity."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Schema(BaseModel):
    """A validated, immutable configuration; equal fields mean equal configurations."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
