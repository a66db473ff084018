"""Experiments on the bits of a message, graphs, losses, mixing and time."""
