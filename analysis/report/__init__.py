"""From notebooks to pages: sessions, figures, runs with provenance, and the build of the book."""
