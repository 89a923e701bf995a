"""The known ways to split a transformer encoder over ranks, each by its own paper's formulas: rows to compare with.

`ways` gives the rows: what a rank receives, how often, and what it holds. `timed` makes seconds of them on a `Cluster`.
"""

from tensor3d.planning.known.encoder import Encoder, KnownWay, Move
from tensor3d.planning.known.seconds import Broadcasts, Timed, timed
from tensor3d.planning.known.ways import WAYS, known, ways

__all__ = [
    "WAYS",
    "Broadcasts",
    "Encoder",
    "KnownWay",
    "Move",
    "Timed",
    "known",
    "timed",
    "ways",
]
