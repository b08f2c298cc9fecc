"""The tests; a package, because frameworks install a top-level one of that name."""
