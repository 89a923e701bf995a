"""What a model costs, layer by layer, found out by one rank alone: see `explain`."""

from tensor3d.explain.explain import Explanation, explain
from tensor3d.explain.report import Row

__all__ = ["Explanation", "Row", "explain"]
