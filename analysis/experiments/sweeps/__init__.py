"""Members trained once and stored, whatever happens: shards, workers, checkpoints."""
