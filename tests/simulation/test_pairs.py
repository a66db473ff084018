"""A sample of the combinations of `tests.campaigns.pairs`, with fewer rounds."""

import warnings

import pytest

from dfl import Run, simulate
from tests.campaigns.pairs import drawn, outcome

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ended() -> dict[int, tuple[str, str]]:
    """The outcome and its description of 20 combinations, by number."""
    return {number: outcome(drawn(number), rounds=60) for number in range(1000, 1020)}


def test_runs_stay_bounded_or_warn(ended: dict[int, tuple[str, str]]) -> None:
    for number, (how, text) in ended.items():
        assert how in ("bounded", "refused", "warned"), (number, text)


def test_most_combinations_run(ended: dict[int, tuple[str, str]]) -> None:
    assert sum(how == "bounded" for how, _ in ended.values()) >= 10


@pytest.mark.parametrize(
    ("compressor", "warned"),
    [
        ("none", 0),
        ("quantize:bits=1", 0),
        ("quantize:bits=2", 0),
        ("quantize:bits=4", 0),
        ("quantize:bits=2,rounding=stochastic", 1),
        ("quantize:bits=3,rounding=stochastic", 0),
    ],
)
@pytest.mark.parametrize("exchange", ["replica", "paper"])
def test_messages_that_do_not_contract_give_a_warning(
    compressor: str, warned: int, exchange: str
) -> None:
    run = Run(
        peers=4,
        rounds=0,
        mixing="lazy",
        algorithm=f"qdfedavgm:exchange={exchange}",
        compressor=compressor,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(simulate(run))
    found = [each for each in caught if f"--compressor {compressor}" in str(each.message)]
    biased = compressor == "quantize:bits=1"
    assert len(found) == (warned if exchange == "replica" else biased)


@pytest.mark.parametrize(
    ("compressor", "faults", "warned"),
    [
        ("quantize:bits=2,block=0", "burst:p=0.5,length=4", True),  # number 169 of the campaign
        ("quantize:bits=2,block=0", "none", False),
        ("quantize:bits=4", "burst:p=0.5,length=4", False),
        ("none", "burst:p=0.5,length=4", False),
        ("none", "burst:p=0.9,length=20", True),
    ],
)
def test_growth_by_coarse_messages_and_losses_gives_a_warning(
    compressor: str, faults: str, warned: bool
) -> None:
    run = Run(
        peers=9,
        rounds=200,
        topology="one_peer_exponential",
        algorithm="qdfedavgm",
        compressor=compressor,
        faults=faults,
        model="softmax",
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        next(iter(simulate(run)))
    assert any("copies so old" in str(each.message) for each in caught) == warned
