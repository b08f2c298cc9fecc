"""Chapter 2: what each KL term optimises in expectation, enumerated."""
