"""The round loop and what it needs: set-up, preflight, checkpointing, evaluation schedule."""
