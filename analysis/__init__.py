"""The analysis behind the book: the population trainer, its recordings, the chapters, the site."""

from __future__ import annotations
