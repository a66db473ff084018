"""A table of patients of several hospitals, and the command line of `dfl.inference` on it."""

from pathlib import Path

import numpy as np
import pandas as pd


def frame(sites: int = 4, n: int = 80) -> pd.DataFrame:
    """Return rows of patients in random order, 7 of which are left out."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sites, n, 2)).round(3)
    chance = 1 / (1 + np.exp(-(x @ [1.0, -1.0] + np.linspace(-1, 1, sites)[:, None])))
    rows = {
        "hospital": np.repeat([f"H{k}" for k in range(sites)], n),
        "y": (rng.uniform(size=(sites, n)) < chance).astype(int).ravel(),
        "age": x[..., 0].ravel(),
        "dose": x[..., 1].ravel(),
    }
    return pd.DataFrame(rows).sample(frac=1, random_state=0).iloc[: sites * n - 7]


def command_line(table: Path, *arguments: str) -> list[str]:
    """Return the arguments of `python -m dfl.inference` for a file with such a table."""
    named = ["--sites", "hospital", "--outcome", "y", "--covariates", "age", "dose"]
    return [str(table), *named, *arguments]
