"""A tiny transformer of each run, trained from scratch on a task whose answers can be verified."""
