"""Experiments, one file per question, run from a checkout as `python -m experiments.FOLDER.NAME`.

    messages_and_graphs      bits of a message, graphs, losses, mixing, time
    servers_and_robustness   federated learning with a server, aggregation under attack
    personal_layers          models with shared and personal layers
    speed                    time and memory, and comparisons with other frameworks

The docstring of a file has the question, the command and its duration, the finding, and the grid
that was run. An experiment prints a table and its finding, and writes both with a figure to
results/NAME. The runs stay in results/NAME/cells, and an experiment that is run again resumes
there. The tables of the runs that the findings report are in experiments/results. `common` has what
the files share.
"""
