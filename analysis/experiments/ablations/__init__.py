"""Presets of populations, their runs, tables and recordings."""
