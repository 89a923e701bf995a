"""What a model costs, layer by layer, found out by one rank alone: see `explain`."""

from tensor3d.explain.explaining import explain
from tensor3d.explain.explanation import Explanation
from tensor3d.explain.row import Row

__all__ = ["Explanation", "Row", "explain"]
