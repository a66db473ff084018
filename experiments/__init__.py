"""Experiments, one file each, run from a checkout as `python -m experiments.FOLDER.NAME`.

    inference                estimates from several sites, with and without a server
    messages_and_graphs      bits of a message, graphs, losses, mixing, time
    methods                  decentralized methods on quadratics and on CIFAR-10
    servers_and_robustness   federated learning with a server, aggregation under attack
    personal_layers          models with shared and personal layers
    workloads                text by many people, deeper networks
    speed                    time and memory, and comparisons with other frameworks

The docstring of a file states what is compared, the command and its duration, the finding, and
the grid that was run. An experiment prints a table and its finding, and writes both with a figure
to results/NAME. Its runs are in results/NAME/cells, which `dfl.sweep` resumes. The tables of the
runs that the findings report are in experiments/results. `--only CELL`, as topology=ring,seed=0,
runs one cell again and prints its row; where a learning rate is part of the name, it is not chosen
anew. Where a folder of experiments/results has cells.zip, `cells` unpacks the runs behind its
tables, and the command of the experiment continues from them. `common` has what the files share.
"""
