"""How the caller learns that a graph or its weights cannot be had: one line, never a traceback."""


class GraphError(ValueError):
    """A graph, option, file or matrix that cannot be used.

    The message is one line that names the thing, the value and what would be accepted.
    """
