"""Training a population: all variants and seeds of an ablation as one batch of tiny policies."""
