"""What people use today, driven through its public API: one driver per baseline, and what puts each
on its feet.

    install        python -m experiments.speed.baselines.install: an environment of its own for each
    job            what a driver is asked on its command line, and the line of JSON that it answers
    drive_*        one per baseline, run by that baseline's python; they import neither dfl nor the lab book, only `job`

`experiments.speed.benchmark_peers` runs them.
"""
