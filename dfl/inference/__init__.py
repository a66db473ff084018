"""Statistical inference over a network: one parameter in common, nuisance parameters that differ.

Sites, as hospitals, keep their examples. They share β and differ in γ_j and in their data.

    result = dfl.inference.fit(
        frame, outcome="y", covariates=["age", "dose"], site="hospital", model="logistic"
    )
    print(result.summary())
    result.params, result.cov, result.conf_int()

On the command line: `python -m dfl.inference FILE --sites hospital --outcome y --covariates age`.
"""

from typing import TYPE_CHECKING

from dfl.core.lazy import attributes

if TYPE_CHECKING:
    from dfl.inference.fitting import fit
    from dfl.inference.models import Density
    from dfl.inference.result import Result

__all__ = ["Density", "Result", "fit"]

# Imported at their first use, as torch is.
__getattr__ = attributes(
    __name__,
    {
        "fit": "dfl.inference.fitting",
        "Density": "dfl.inference.models",
        "Result": "dfl.inference.result",
    },
)


def __dir__() -> list[str]:
    return __all__
