"""The computations of the chapters, one module a theme."""
