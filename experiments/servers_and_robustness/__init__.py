"""Experiments on federated learning with a server, and on aggregation under attack."""
