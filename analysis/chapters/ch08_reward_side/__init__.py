"""Chapter 8: a KL in the reward or in the loss, and what group and length make of either."""
