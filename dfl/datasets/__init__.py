"""Data sets, one file each, and in `partitions` how they are divided between the peers.

`DATASETS` and `PARTITIONS` are the registries that the command line reads.
"""

from dfl.datasets import (
    adult,
    cifar10,
    cifar100,
    digits,
    easy_vqa,
    femnist,
    gaussian,
    har,
    mnist,
    shakespeare,
    shakespeare_roles,
    vqa2,
    words,
)
from dfl.datasets.data import DATASETS, Data
from dfl.datasets.partitions import PARTITIONS, DataSplit, split_data

__all__ = ["DATASETS", "PARTITIONS", "Data", "DataSplit", "split_data"]
__all__ += ["adult", "cifar10", "cifar100", "digits", "easy_vqa", "femnist", "gaussian", "har"]
__all__ += ["mnist", "shakespeare", "shakespeare_roles", "vqa2", "words"]
