"""A few of the combinations of `tests.campaign_pairs`, for fewer rounds."""

import warnings

import pytest

from dfl import Run, simulate
from tests.campaign_pairs import drawn, played


@pytest.mark.parametrize("number", range(1000, 1020))
def test_a_run_stays_bounded_or_a_warning_says_why_not(number: int) -> None:
    how, text = played(drawn(number), rounds=60)
    assert how in ("bounded", "refused", "warned"), text


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
def test_messages_that_do_not_contract_are_warned_of(compressor: str, warned: int, exchange: str) -> None:
    run = Run(peers=4, rounds=0, mixing="lazy", algorithm=f"qdfedavgm:exchange={exchange}", compressor=compressor)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(simulate(run))
    said = [each for each in caught if f"--compressor {compressor}" in str(each.message)]
    assert len(said) == warned * (exchange == "replica")
