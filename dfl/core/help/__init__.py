"""The texts of --help and `dfl list`: pages of flags, and components by their docstrings."""
