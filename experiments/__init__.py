"""The lab book: one file per question, run from a checkout as `python -m experiments.NAME`.

A page says what it asks, the command that answers it and how long that takes, what was found, and the grid that was
run. It prints a table and its finding, and leaves both with a figure under results/NAME; the runs themselves stay in
results/NAME/cells, and a page that is run again picks up where it was. What the pages' own commands left is kept in
experiments/results. `lab` holds what the pages share.
"""
