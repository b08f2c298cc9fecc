"""Notebooks: planned, run a few at a time, each in a process of its own, and stored."""
