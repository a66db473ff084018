"""The version of dfl."""

VERSION = "0.1.0"
