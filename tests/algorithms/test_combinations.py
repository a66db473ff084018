"""Every method runs with every compressor, fault and attack, or refuses it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dfl.algorithms import ALGORITHMS
from dfl.compression import COMPRESSORS
from dfl.core.errors import InputError
from tests.support.quadratic import digits, final

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
