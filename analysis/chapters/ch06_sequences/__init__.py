"""Chapter 6: which token answers for the KL that comes later, and what products of ratios cost."""
