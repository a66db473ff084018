"""Every method runs with every compressor, fault and attack, or refuses it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dfl.algorithms import ALGORITHMS
from dfl.comm.exchange import Net
from dfl.comm.mpi import World
from dfl.compression import COMPRESSORS
from dfl.config import Run
from dfl.core.errors import InputError
from dfl.simulation.prepare import prepare
from dfl.simulation.run_state import RunState, begin, narrowed
from tests.support.quadratic import digits, final, half_square, points

SPECS = {
    "top_k": "top_k:share=0.1",
    "random_k": "random_k:share=0.1",
    "low_rank": "low_rank:rank=1",
}
ADVERSE = {
    "links": {"faults": "link_loss:p=0.4"},
    "peers": {"faults": "outage:p=0.4"},
    "work": {"faults": "stragglers:work=0.4"},
    "messages": {"attack": "sign_flip:peers=1"},
    "labels": {"attack": "label_flip:peers=1"},
}
"""What faults and attacks touch -> settings."""
REFUSED = {
    "clique_averaging": ("peers",),
    "d2": ("links", "peers"),
    "decentlam": ("peers",),
    "exact_diffusion": ("links", "peers"),
    "gradient_tracking": ("links",),
    "local_only": ("links", "messages"),
    "momentum_tracking": ("links",),
    "pooled": ("links", "peers", "work", "messages", "labels"),
    "power_gossip": ("links", "peers", "messages"),
    "relay_sgd": ("links", "peers"),
}
"""Method -> what must not be touched; others run under all faults and attacks."""
UNTOUCHED = {("fedsgd", "work")}
"""A straggler takes its one step."""


def models(algorithm: str, **settings: Any) -> Tensor:
    """The models of four peers after three rounds with momentum."""
    steps = {} if algorithm == "fedsgd" else {"local_steps": 3}
    return final(digits(algorithm=algorithm, peers=4, momentum=0.9, **steps, **settings), 3)


@pytest.mark.parametrize("compressor", [SPECS.get(name, name) for name in COMPRESSORS])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a_method_runs_with_a_compressor_or_refuses_it(algorithm: str, compressor: str) -> None:
    if "compressor" in ALGORITHMS[algorithm].applies or compressor == "none":
        assert models(algorithm, compressor=compressor).isfinite().all()
    else:
        with pytest.raises(InputError, match=f"--compressor {compressor} has no part in"):
            models(algorithm, compressor=compressor)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a_method_runs_under_faults_and_attacks_or_refuses_them(algorithm: str) -> None:
    calm = models(algorithm)
    for touched, settings in ADVERSE.items():
        if touched in REFUSED.get(algorithm, ()):
            ((field, spec),) = settings.items()
            with pytest.raises(InputError, match=f"--{field} {spec}"):
                models(algorithm, **settings)
            continue
        found = models(algorithm, **settings)
        assert found.isfinite().all(), touched
        assert torch.equal(found, calm) == ((algorithm, touched) in UNTOUCHED), touched


class Halves(nn.Module):
    """A `Point` of two parameters, of four and three coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, c: Tensor) -> Tensor:
        return c - torch.cat([self.first, self.second])


def on_halves(algorithm: str, switch: int, **settings: Any) -> Tensor:
    """The first four coordinates of the models after six rounds; the others are personal from a
    round on.
    """
    run = Run(
        algorithm=algorithm, peers=7, lr=0.1, momentum=0.5, rounds=6, share="first",
        share_all_until=str(switch), **settings,
    )  # fmt: skip
    run = replace(run, model=Halves(), dataset=points(7, 7), loss=half_square)
    prepared = prepare(run, World())
    run_state = begin(prepared)
    for t in range(6):
        if t == switch:
            run_state = narrowed(run_state, prepared)
            assert run_state.task.parameter_layout.shared == 4
        net = Net(prepared.network, t)
        state = prepared.algorithm.round(run_state.state, run_state.task.paced(net.work), net)
        run_state = RunState(t + 1, run_state.task, state)
    return run_state.models[:, :4]


COUPLED = {
    "clique_averaging", "dfedsam", "fltrust", "local_only", "pooled", "power_gossip",
}  # fmt: skip
"""Methods that make one coordinate depend on others, share nothing, or need labels."""
SEPARABLE: dict[str, tuple[str, dict[str, str]]] = {
    **{name: (name, {}) for name in ALGORITHMS if name not in COUPLED},
    "relay_sgd on two trees": ("relay_sgd", {"topology": "double_tree"}),
}
"""Other methods, and settings."""


@pytest.mark.parametrize("case", SEPARABLE)
def test_what_stays_shared_does_not_depend_on_what_becomes_personal(case: str) -> None:
    """The coordinates of this problem are independent; a server has one row for all peers."""
    algorithm, settings = SEPARABLE[case]
    expected = on_halves(algorithm, 6, **settings)
    found = on_halves(algorithm, 2, **settings)
    torch.testing.assert_close(found, expected.expand(7, 4), rtol=0, atol=1e-12)
    assert expected.abs().max() > 0.01
