"""Models by name, their layers, and how their parameters lie in one row."""
