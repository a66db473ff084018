"""Data sets, one file each, and how they are dealt to the peers.

`DATASETS` and `PARTITIONS` are the registries that the command line reads.
"""

from dfl.datasets import adult, cifar10, digits, gaussian, label_skew, mnist, quantity_skew
from dfl.datasets.data import DATASETS, Data
from dfl.datasets.partition import PARTITIONS, DataSplit, deal

__all__ = ["DATASETS", "PARTITIONS", "Data", "DataSplit", "deal"]
__all__ += ["adult", "cifar10", "digits", "gaussian", "label_skew", "mnist", "quantity_skew"]
