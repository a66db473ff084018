"""Partitions of a data set between the peers; importing this package registers them."""

from dfl.datasets.partitions import label_skew, quantity_skew
from dfl.datasets.partitions.base import PARTITIONS, Assignment, DataSplit, Labels, split_data

__all__ = [
    "PARTITIONS", "Assignment", "DataSplit", "Labels", "label_skew", "quantity_skew", "split_data",
]  # fmt: skip
