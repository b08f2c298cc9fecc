"""Chapter 22: do I need a KL term? Rewards that can be gamed."""
