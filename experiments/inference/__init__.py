"""Estimates of parameters that sites share."""
