"""Figures of merit of models: on test sets, of single peers and of all models together."""
