"""Every method runs with every compressor, or refuses it."""

import pytest

from dfl.algorithms import ALGORITHMS
from dfl.compression import COMPRESSORS
from dfl.core.errors import InputError
from tests.support.quadratic import digits, final

SPECS = {
    "top_k": "top_k:share=0.1",
    "random_k": "random_k:share=0.1",
    "low_rank": "low_rank:rank=1",
}


@pytest.mark.parametrize("compressor", [SPECS.get(name, name) for name in COMPRESSORS])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a_method_runs_with_a_compressor_or_refuses_it(algorithm: str, compressor: str) -> None:
    settings = {"peers": 4, "local_steps": 1} if algorithm != "fedsgd" else {"peers": 4}
    if "compressor" in ALGORITHMS[algorithm].applies or compressor == "none":
        setting = digits(algorithm=algorithm, compressor=compressor, **settings)
        assert final(setting, 2).isfinite().all()
    else:
        with pytest.raises(InputError, match=f"--compressor {compressor} has no part in"):
            digits(algorithm=algorithm, compressor=compressor, **settings)
