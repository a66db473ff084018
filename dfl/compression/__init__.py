"""Message formats, models and updates as bytes; importing this package registers them."""

from dfl.compression.base import COMPRESSORS, Compressor, Draw, fitted
from dfl.compression.exact import Exact
from dfl.compression.low_rank import LowRank
from dfl.compression.quantize import Quantize
from dfl.compression.sparse import RandomK, TopK

__all__ = [
    "COMPRESSORS",
    "Compressor",
    "Draw",
    "Exact",
    "LowRank",
    "Quantize",
    "RandomK",
    "TopK",
    "fitted",
]
