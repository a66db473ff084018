"""Components for dfl, which finds them by the entry points of this package."""
