"""Measurements of time and memory, and comparisons with other frameworks."""
