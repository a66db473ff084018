"""The sites of this rank, and what each computes from its own examples.

Tables of sites have axis -2 = sites, before it any repetitions of a study, and after it the numbers
of a site: (..., p, m) for the p sites of this rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dfl.inference.models import Model, Site

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch

Work = Callable[..., "Tensor"]
"""work(site, *rows): a site and some rows (..., m) of its own give (..., m')."""


@dataclass(frozen=True)
class Sites(ABC):
    """The sites of this rank.

    Attributes:
        model: the model of all sites.
        width: p, the parameters that are common to all sites, the first of θ.
    """

    model: Model
    width: int

    @abstractmethod
    def each(self, work: Work, *tables: Tensor) -> Tensor:
        """Return what every site computes from its examples and its row of each table, (..., p, m).

        Args:
            work: the computation.
            tables: (..., p, m), or (..., 1, m) where all sites have the same row.
        """

    @abstractmethod
    def some(self, places: Sequence[int]) -> Sites:
        """Return some of the sites here, by their places among them."""

    def with_common(self, width: int) -> Sites:
        """Return the sites with the first `width` parameters of θ in common."""
        return replace(self, width=width)


@dataclass(frozen=True)
class Separate(Sites):
    """Sites of any sizes, computed one by one, so that no site's numbers depend on the others.

    Attributes:
        sites: the examples of each.
        shape: a site with as many covariates, by which a rank without sites knows the widths.
    """

    sites: Sequence[Site]
    shape: Site

    def each(self, work: Work, *tables: Tensor) -> Tensor:
        """See `Sites`."""
        if not self.sites:
            nothing = (table.new_zeros(table.shape[1:]) for table in tables)
            return work(self.shape, *nothing)[None][:0]
        rows = [[_row(table, k) for table in tables] for k in range(len(self.sites))]
        return torch.stack([work(site, *own) for site, own in zip(self.sites, rows, strict=True)])

    def some(self, places: Sequence[int]) -> Separate:
        """See `Sites`."""
        return replace(self, sites=[self.sites[k] for k in places])


@dataclass(frozen=True)
class Stacked(Sites):
    """Sites of one size, and repetitions of a study, computed together.

    Attributes:
        site: the examples of all, with axes (..., p).
    """

    site: Site

    def each(self, work: Work, *tables: Tensor) -> Tensor:
        """See `Sites`."""
        return work(self.site, *tables)

    def some(self, places: Sequence[int]) -> Stacked:
        """See `Sites`."""
        axis, index = self.site.y.ndim - 2, torch.tensor(places, dtype=torch.int64)
        chosen = self.site.map(lambda values: values.index_select(axis, index))
        return replace(self, site=chosen)


def _row(table: Tensor, k: int) -> Tensor:
    return table[0 if len(table) == 1 else k]
