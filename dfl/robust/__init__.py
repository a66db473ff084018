"""Byzantine-robust aggregation rules, and attacks on messages and data."""
