"""What tables call the variants, one module a theme."""
