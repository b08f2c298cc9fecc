"""A population of low-rank adapters on one frozen language model; adapters off is the reference."""
