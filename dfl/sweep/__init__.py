"""Grids of runs: cells, scheduler, status, tables, figures, Slurm."""
