"""Real data, one file per data set, and how it is dealt to the peers.

`DATASETS` and `PARTITIONS` are the registries that the command line reads.
"""

from dfl.datasets import digits, mnist
from dfl.datasets.data import DATASETS, Data
from dfl.datasets.partition import PARTITIONS, Deal, deal

__all__ = ["DATASETS", "PARTITIONS", "Data", "Deal", "deal", "digits", "mnist"]
