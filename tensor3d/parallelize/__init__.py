"""Existing single-device models on the cube: `parallelize`, the rules that its plan names, and a proposal for one."""

from tensor3d.parallelize import rules
from tensor3d.parallelize.api import parallelize
from tensor3d.parallelize.auto.proposal import Proposal
from tensor3d.parallelize.auto.propose import propose_plan
from tensor3d.parallelize.module_copy import ModuleBuilder
from tensor3d.parallelize.own_attention import AttentionCode3D, attend_packed
from tensor3d.parallelize.parallel_rule import ParallelRule
from tensor3d.parallelize.state_dict import full_state_dict, full_tensor, load_full_state_dict
from tensor3d.parallelize.torch_attention import PackedRows

__all__ = [
    "AttentionCode3D",
    "ModuleBuilder",
    "PackedRows",
    "ParallelRule",
    "Proposal",
    "attend_packed",
    "full_state_dict",
    "full_tensor",
    "load_full_state_dict",
    "parallelize",
    "propose_plan",
    "rules",
]
