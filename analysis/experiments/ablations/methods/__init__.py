"""Populations that compare methods, one module a chapter."""
