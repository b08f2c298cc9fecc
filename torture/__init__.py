"""Break the store, the recordings and the book on purpose, and count what gets past."""
