"""Populations trained to the end: shards, the store of finished runs, workers, reproduction."""
