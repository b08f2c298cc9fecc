"""Chapter 4: KL terms trained, at one coefficient and at equal KL."""
