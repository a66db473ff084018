"""Callbacks that report on a run, one file each; the base class is in `dfl.store.callbacks`."""
