"""Floor 3: the computations behind each chapter, from policies to tidy tables."""
