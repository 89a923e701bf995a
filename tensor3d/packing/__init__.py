"""Filling packs of one capacity with whole sequences.

A planner turns a histogram of lengths into a `PackingPlan`; `assign` puts real sequences into its packs.
`StreamPacker` packs sequences as they come and `pack_batch` those of one batch, without a plan.
"""

from typing import TYPE_CHECKING

from tensor3d.lazy_package import import_lazily

if TYPE_CHECKING:
    from tensor3d.packing.assign import PackAssignment, assign
    from tensor3d.packing.balance import Work, attended, deal, imbalance
    from tensor3d.packing.limits import Limits
    from tensor3d.packing.one_batch import pack_batch, pack_evenly, restore_order
    from tensor3d.packing.plan import LowerBound, PackingPlan, PackPattern, fingerprint_of, load_plan, save_plan
    from tensor3d.packing.planners import PLANNERS, Planner, lp, lpfhp, nnlshp, padded, spfhp
    from tensor3d.packing.scaling_rules import packed_betas, packs_per_step
    from tensor3d.packing.stream import StreamPacker, pack_stream
else:
    import_lazily(__name__)


__all__ = [
    "PLANNERS",
    "Limits",
    "LowerBound",
    "PackAssignment",
    "PackPattern",
    "PackingPlan",
    "Planner",
    "StreamPacker",
    "Work",
    "assign",
    "attended",
    "deal",
    "fingerprint_of",
    "imbalance",
    "load_plan",
    "lp",
    "lpfhp",
    "nnlshp",
    "pack_batch",
    "pack_evenly",
    "pack_stream",
    "packed_betas",
    "packs_per_step",
    "padded",
    "restore_order",
    "save_plan",
    "spfhp",
]
