"""The version of dfl, and the name under which it is installed."""

VERSION = "0.1.0"
DISTRIBUTION = "dfl-sim"
"""The name of the distribution: dfl was taken on the package index."""
