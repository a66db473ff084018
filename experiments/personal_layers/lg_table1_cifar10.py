"""Accuracy and parameters sent with shared convolutions under local layers: CIFAR-10 in Table 1 of
LG-FedAvg.

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global
Representations", 2020.

Command, half an hour of a core for every seed:

    python -m experiments.personal_layers.lg_table1_cifar10 --data-dir DIR \\
        --methods fedavg lg ring

Finding: FedAvg is not reproduced: it has 52.3 % of the new images right in the mean over its last
rounds (published 59.94), and LG-FedAvg, which goes on from it, 56.9 % by all models together
(59.63). Accuracy after a round swings between 42 and 59 %, with a std of 3 points over the last 66
rounds, and the released code of the paper takes the round that is best on test data: the best
evaluated rounds have 58.9, 56.0 and 59.0 % with seeds 0 to 2. Chosen so, FedAvg has 57.9 % and
LG-FedAvg 89.1 % on the devices' own labels, both within the allowed difference, and LG-FedAvg 57.3
% on new images, which is not. Seeds 0 and 2 have 57 % after 1,635 and 1,791 rounds, and seed 1
never (published 1,200, the switch). On the devices' own labels LG-FedAvg has 89.0 % (89.66), where
FedAvg has 52.3, and sends 8.480e+09 parameters by the paper's count, its very figure. Without a
server, from the same model on, six rounds on a ring do as well as 60 with one: 89.3 and 57.6 %.
Devices that train alone were not run, and three seeds were (published: ten).

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
    seeds: int = 3
    epochs: int = 1200


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure local test, new test and parameters sent of every method."""
    lg_table1.experiment(options)


if __name__ == "__main__":
    sys.exit(common.start(experiment, "personal_layers.lg_table1_cifar10"))
