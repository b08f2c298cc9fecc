"""Example dumps: one healthy run, and runs each broken in one known way. Seeded; see `generate`."""
