"""Runs are distinguished by the settings by which they differ."""

from pathlib import Path

from dfl.config import Run
from dfl.reporting.differences import differences


def test_labels_are_the_settings_that_differ() -> None:
    folders = [Path("x/a"), Path("x/b"), Path("y/b")]
    assert differences([{"seed": 0, "lr": 1}, {"seed": 1, "lr": 1}, {"seed": 2}], folders) == [
        {"lr": "1", "seed": "0"}, {"lr": "1", "seed": "1"}, {"lr": str(Run().lr), "seed": "2"},
    ]  # fmt: skip
    other_settings = {
        "out": "here",
        "timeout": 3,
        "data_dir": "d",
        "checkpoint_every": 3,
        "resume": "r",
        "log_level": "debug",
        "report": False,
        "tensorboard": True,
        "profile": True,
    }
    assert differences([{"seed": 0}, {"seed": 0} | other_settings], folders[:2]) == [
        {"run": "a"},
        {"run": "b"},
    ]
    assert differences([{"seed": 0}, {"seed": 0}], folders[1:]) == [{"run": "x/b"}, {"run": "y/b"}]
    assert differences([{"seed": 0}, {"seed": 1}, {"seed": 1}], folders) == [
        {"run": "x/a", "seed": "0"}, {"run": "x/b", "seed": "1"}, {"run": "y/b", "seed": "1"},
    ]  # fmt: skip
    assert differences([{"seed": 0}], [Path("x/a")]) == [{"run": "a"}]


def test_a_setting_that_a_run_of_an_earlier_version_lacks_is_the_default() -> None:
    folders = [Path("x/a"), Path("x/b")]
    assert differences([{"norm_stats": "refuse"}, {}], folders) == [{"run": "a"}, {"run": "b"}]
