"""Imported where sweeps are forked from: what torch does once in a process is done there."""

from __future__ import annotations

from torture.sweeps import straight, tiny

straight(tiny().config.model_copy(update={"updates": 2}))
