"""Chapter 23: the KL over the top k tokens."""
