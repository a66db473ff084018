"""Arrays whose dtype depends on the data."""

from __future__ import annotations

from typing import Any, TypeAlias

from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
"""Numbers in the dtype of a data set, which only a run knows."""
Arrays: TypeAlias = dict[str, Array]
"""Arrays by name, each name with its dtype."""
