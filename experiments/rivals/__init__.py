"""What people use today, driven through its public API: one driver per rival, and what puts each on its feet.

    install        python -m experiments.rivals.install: an environment of its own for each
    job            what a driver is asked on its command line, and the line of JSON that it answers
    drive_*        one per rival, run by that rival's python; they import neither dfl nor the lab book, only `job`

`experiments.benchmark_peers` runs them.
"""
