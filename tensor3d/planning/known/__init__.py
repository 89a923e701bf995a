"""The known ways to split a transformer encoder over ranks, each by its own paper's formulas: rows to compare with.

`ways` gives the rows: what a rank receives, how often, and what it holds. `timed` makes seconds of them on a `Cluster`,
`scaled` does so for a list of rank counts, and `crossings` finds where one way overtakes another.
"""

from tensor3d.planning.known.encoder import Encoder, KnownWay, Move
from tensor3d.planning.known.scaling import Crossing, crossings, scaled
from tensor3d.planning.known.seconds import Broadcasts, Timed, timed
from tensor3d.planning.known.ways import WAYS, known, ways

__all__ = [
    "WAYS",
    "Broadcasts",
    "Crossing",
    "Encoder",
    "KnownWay",
    "Move",
    "Timed",
    "crossings",
    "known",
    "scaled",
    "timed",
    "ways",
]
