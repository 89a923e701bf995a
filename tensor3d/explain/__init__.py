"""What a model costs, layer by layer, found out by one rank alone: see `explain`."""

from tensor3d.explain.explain import CostReport, explain
from tensor3d.explain.report import ReportRow

__all__ = ["CostReport", "ReportRow", "explain"]
