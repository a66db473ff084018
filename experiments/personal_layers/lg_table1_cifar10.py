"""Accuracy and parameters sent with shared convolutions under local layers: CIFAR-10 in Table 1 of
LG-FedAvg.

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global
Representations", 2020.

Command, half an hour to an hour of a core for every seed:

    python -m experiments.personal_layers.lg_table1_cifar10 --data-dir DIR \\
        --methods fedavg lg ring

Finding: FedAvg is not reproduced: it has 52.4 % of the new images right in the mean over its last
rounds (published 59.94), and LG-FedAvg, which goes on from it, 88.7 % on the devices' own labels
(89.66; a difference of 0.75 is allowed). By all models together LG-FedAvg has 57.4 % of the new
images right (59.63), which is within the allowed 2.3 since five seeds differ much, 55.2 to 61.2 %;
with the first three, 56.9 %, it was not. FedAvg swings from round to round, and the released code
of the paper takes the round that is best on test data: the best evaluated rounds have 54.5 to 59.8
%. Chosen so, FedAvg has 57.6 % and LG-FedAvg 88.9 % on the devices' own labels, each just outside
of the allowed difference, and LG-FedAvg 57.8 % on new images. Three of five seeds have 57 % after
1,242 to 1,791 rounds, and two never (published 1,200, the switch). LG-FedAvg sends 8.480e+09
parameters by the paper's count, its very figure. Without a server, from the same model on, six
rounds on a ring do as well as 60 with one: 89.1 and 58.0 %. Devices that train alone were not run,
and five seeds were (published: ten).

Grid: 100 devices of 500 images with two label shards each, cropped and flipped; LeNet, of which
the two convolutions are shared, batches of 50, one epoch a round, learning rate 0.1, momentum 0.5,
C = 0.1. Methods, rounds and columns are those of `lg_table1`. Nothing was tuned.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from experiments import common
from experiments.personal_layers import lg_table1


@dataclass(frozen=True, kw_only=True)
class Options(lg_table1.Options):
    """The options of this experiment."""

    out: Path = Path("results/lg_table1_cifar10")
    dataset: str = "cifar10"
    """The data set."""
    seeds: int = 5
    epochs: int = 1200


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure local test, new test and parameters sent of every method."""
    lg_table1.experiment(options)


if __name__ == "__main__":
    sys.exit(common.start(experiment, "personal_layers.lg_table1_cifar10"))
