"""The run directory: its record, results, checkpoint files and logs."""
