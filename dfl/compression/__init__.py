"""Message formats, models and updates as bytes; importing this package registers them."""

from dfl.compression.base import COMPRESSORS, Compressor, Draw
from dfl.compression.exact import Exact
from dfl.compression.quantize import Quantize
from dfl.compression.sparse import RandomK, TopK

__all__ = [
    "COMPRESSORS",
    "Compressor",
    "Draw",
    "Exact",
    "Quantize",
    "RandomK",
    "TopK",
]
