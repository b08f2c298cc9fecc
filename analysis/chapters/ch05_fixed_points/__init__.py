"""Chapter 5: where each KL term lets training stop, by closed forms, exact ascent and samples."""
