"""The commands of `dfl`, and those of them that print what there is: list, doctor, completion.

These three are started as `dfl list` or `python -m dfl list`. The others are modules of their own,
`python -m dfl.run`.
"""

COMMANDS = {
    "run": ("dfl.run", "Simulate a run."),
    "sweep": ("dfl.sweep.command", "Run the cells of a grid, here or on a cluster."),
    "compare": ("dfl.compare", "Compare runs in a table and a figure."),
    "report": ("dfl.report", "Write the report of runs, sweeps and comparisons."),
    "inference": ("dfl.inference.__main__", "Fit a model to the examples of sites."),
    "list": ("dfl.commands.list", "List the components, their options, sources and examples."),
    "doctor": ("dfl.commands.doctor", "Print what a bug report needs."),
    "completion": ("dfl.commands.completion", "Print a script that completes commands in a shell."),
}
"""Command -> the module whose `main` it is, and what it does."""
