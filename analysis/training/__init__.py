"""Training a population: all arms and seeds of an ablation as one batch of tiny policies."""
