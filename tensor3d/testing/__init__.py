"""For the tests of layers of one's own: real ranks on the CPU, and a layer compared with one device on many cubes."""

from tensor3d.testing.check_layer import CUBES, check_layer
from tensor3d.testing.inputs import on_face, per_row, whole
from tensor3d.testing.processes import RankError, run_ranks
from tensor3d.testing.report import Report, TensorError
from tensor3d.testing.standing_ranks import StandingRanks

__all__ = [
    "CUBES",
    "RankError",
    "Report",
    "StandingRanks",
    "TensorError",
    "check_layer",
    "on_face",
    "per_row",
    "run_ranks",
    "whole",
]
