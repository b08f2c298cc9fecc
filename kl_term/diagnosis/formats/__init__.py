"""One module a format of a dump, and what two of them share."""
