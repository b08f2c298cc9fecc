"""Chapter 24: a reference that moves, a coefficient that adapts."""
