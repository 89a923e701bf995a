"""Filling packs of one capacity with whole sequences.

A planner turns a histogram of lengths into a `Plan`; `assign` puts real sequences into its packs.
"""

from tensor3d.packing.assign import Packs, assign
from tensor3d.packing.limits import Limits
from tensor3d.packing.lpfhp import lpfhp
from tensor3d.packing.plan import Plan, Strategy

__all__ = ["Limits", "Packs", "Plan", "Strategy", "assign", "lpfhp"]
