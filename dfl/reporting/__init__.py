"""Reports on runs: callbacks, figures and pages, and `dfl.simulate`, which adds the callbacks."""
