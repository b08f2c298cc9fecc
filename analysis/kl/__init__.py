"""Floor 0: divergences, their sampled estimators, and exact enumeration of what these optimise."""
