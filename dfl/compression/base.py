"""Message formats, `COMPRESSORS`: m floats as B bytes.

`encode` turns messages (q, m) into bytes (q, B) and `decode` turns them back; q counts the senders,
peers or directed edges. The bytes are what MPI sends, so the traffic of a round is read off the
buffer. A compressor is a frozen dataclass whose fields are its options; to add one, decorate it
with `@COMPRESSORS.register("name")`.

The bytes of a row depend on that row and on its address alone, not on other rows. Rows are encoded
in tiles of some 262,144 numbers, whose temporaries are reused and stay in the cache: one temporary
as large as the messages costs more in page faults than all the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dfl.core.registry import Registry

if TYPE_CHECKING:
    import torch
else:
    from dfl.core.lazy import torch

Draw = Callable[[slice, slice], "torch.Tensor"]
"""draw(rows, places) -> int32, (number of rows, number of places): 32 random bits each.

`rows` is a slice of the q messages, `places` one of numbers from 0 on that has both ends; they may
exceed m. The bits are uniform over all values of int32 and independent of each other. They are a
function of the seed, the round, the exchange, the sender or edge of the row, and the place alone.
So results depend neither on the ranks nor on a resume, and a second call returns the same bits.
They come from `randomness.draws`, on the device of the messages.
"""

TILE = 1 << 18
"""Coordinates of a tile."""


class Compressor(Protocol):
    """A message format, as the network uses it.

    Those of this package also state `unbiased`, whether the mean of Q(x) over the random numbers is
    x, and `bound(m)`, the largest E ||Q(x) - x||^2 / ||x||^2 over messages of m coordinates. A
    format with a bound below 1 contracts.
    """

    def encode(self, messages: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return messages as bytes.

        Args:
            messages: (q, m), float32 or float64.
            draw: returns random bits, see `dfl.compression.Draw`; called only by formats that need
                them. Numbers from another generator would depend on the ranks, and change after a
                resume.

        Returns:
            (q, B) uint8.
        """
        ...

    def decode(self, encoded: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the messages that bytes hold, (q, m).

        Args:
            encoded: (q, B) uint8.
            m: coordinates of a message.
            dtype: of the messages.
        """
        ...


@runtime_checkable
class Shaped(Protocol):
    """A message format that works on parameters of known shapes."""

    def shaped(self, shapes: Sequence[tuple[int, ...]]) -> Compressor:
        """Return the format of messages whose m coordinates are parameters of these shapes.

        Args:
            shapes: those of the parameters in their order; the first of them fill a message.
        """
        ...


def fitted(compressor: Compressor, shapes: Sequence[tuple[int, ...]]) -> Compressor:
    """Return a compressor that knows the shapes of the parameters, where it uses them."""
    return compressor.shaped(shapes) if isinstance(compressor, Shaped) else compressor


COMPRESSORS: Registry[type[Compressor]] = Registry("compressor", "dfl.compressors")
"""Name -> frozen dataclass whose fields are the compressor's options."""


def tiles(q: int, m: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Yield the (rows, places) of rectangles that cover (q, m).

    They are at most `width` wide and have about `TILE` numbers.
    """
    height = max(1, TILE // max(1, min(width, m)))
    for row in range(0, q, height):
        for place in range(0, m, max(1, width)):
            yield slice(row, min(row + height, q)), slice(place, min(place + width, m))


def floats(encoded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View bytes (q, B) as floats.

    They are copied where they have gaps or begin in the middle of a float.
    """
    flat = encoded.reshape(-1)
    if flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(len(encoded), encoded.shape[1] // dtype.itemsize)


def as_bytes(messages: torch.Tensor) -> torch.Tensor:
    """View floats (q, n) as bytes (q, B); those that lie contiguously are not copied."""
    # Flat first: torch cannot view the rows of a rank without peers.
    flat = messages.reshape(-1).contiguous().view(torch.uint8)
    return flat.view(len(messages), messages.shape[1] * messages.element_size())
