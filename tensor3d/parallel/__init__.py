"""Existing single-device models on the cube: `parallelize`, the kinds that its plan names, and a proposal for one."""

from tensor3d.parallel import kinds
from tensor3d.parallel.kind import Kind
from tensor3d.parallel.packed_rows import PackedRows
from tensor3d.parallel.proposal import Proposal
from tensor3d.parallel.propose import propose_plan
from tensor3d.parallel.rebuild import parallelize
from tensor3d.parallel.state import full_state_dict, full_tensor, load_full_state_dict
from tensor3d.parallel.workshop import Workshop

__all__ = [
    "Kind",
    "PackedRows",
    "Proposal",
    "Workshop",
    "full_state_dict",
    "full_tensor",
    "kinds",
    "load_full_state_dict",
    "parallelize",
    "propose_plan",
]
