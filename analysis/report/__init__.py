"""Floor 4: figures, notebooks, provenance and the pages of the book."""
