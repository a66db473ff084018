"""Callbacks that show a run: terminal, figures, report, TensorBoard."""
