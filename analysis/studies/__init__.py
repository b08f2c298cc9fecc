"""What the book trains and measures: presets as data, and measurements beyond a sweep."""
