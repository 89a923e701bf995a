"""tensor3d: transformer training split three ways, without a token of padding."""

from typing import TYPE_CHECKING

from tensor3d.lazy_package import import_lazily
from tensor3d.versions import check_versions

if TYPE_CHECKING:
    from tensor3d.attention import attention
    from tensor3d.attention.relative import BiasBuckets, LogBuckets, RelativeTerms
    from tensor3d.batches.padded import PaddedPacks, local_shard, pack_padded
    from tensor3d.batches.row_selection import RowSelection
    from tensor3d.batches.sequences import Sequences
    from tensor3d.distributed.collectives import all_reduce_replicated, sum_gradient
    from tensor3d.distributed.comm_stats import CommStats
    from tensor3d.distributed.cube import Cube
    from tensor3d.distributed.cube_policies import ExecutionPolicy, MixedPrecisionPolicy
    from tensor3d.distributed.cube_shape import CubeShape
    from tensor3d.distributed.object_collectives import check_copies
    from tensor3d.explain import CostReport, explain
    from tensor3d.layers.attention import Attention3D
    from tensor3d.layers.dropout import Dropout3D
    from tensor3d.layers.embedding import Embedding3D, LookupEmbedding3D
    from tensor3d.layers.head_norm import HeadNorm3D
    from tensor3d.layers.heads import SmallHead3D, vocab_topk
    from tensor3d.layers.kept_operands import KeptOperands, keep_gathered
    from tensor3d.layers.linear import Linear3D, Projection3D, gather_together
    from tensor3d.layers.loss import cross_entropy
    from tensor3d.layers.mlp import GatedMLP3D
    from tensor3d.layers.norm import LayerNorm3D, RMSNorm3D
    from tensor3d.layers.relative import RelativeBias3D, RelativeEmbedding3D, RelativeRows
    from tensor3d.layers.transformer import MLP3D, Block3D, TransformerLayer3D
    from tensor3d.ops.rotary import rotary
    from tensor3d.optim.clip_grad import GradientNorm, check_parameters, clip_grad_norm_, clip_gradients
    from tensor3d.parallelize import PackedRows, full_state_dict, load_full_state_dict, parallelize, propose_plan, rules
    from tensor3d.sharding.activation_layout import Face, gather, gather_rows, local_block, shard
    from tensor3d.sharding.fused_rows import from_fused_rows, to_fused_rows
    from tensor3d.sharding.matmul import matmul, matmul_each
    from tensor3d.sharding.param_layout import (
        Layout,
        constant,
        distribute,
        init_parameter,
        local,
        local_param,
        logical_block,
        normal,
        vector,
    )
    from tensor3d.sharding.redistribute import (
        local_rows,
        redistribute,
        select,
        spread_rows,
        sum_rows,
        unfold_rows,
    )
else:
    check_versions()
    import_lazily(__name__)


__version__ = "0.1.0"

__all__ = [
    "MLP3D",
    "Attention3D",
    "BiasBuckets",
    "Block3D",
    "CommStats",
    "CostReport",
    "Cube",
    "CubeShape",
    "Dropout3D",
    "Embedding3D",
    "ExecutionPolicy",
    "Face",
    "GatedMLP3D",
    "GradientNorm",
    "HeadNorm3D",
    "KeptOperands",
    "LayerNorm3D",
    "Layout",
    "Linear3D",
    "LogBuckets",
    "LookupEmbedding3D",
    "MixedPrecisionPolicy",
    "PackedRows",
    "PaddedPacks",
    "Projection3D",
    "RMSNorm3D",
    "RelativeBias3D",
    "RelativeEmbedding3D",
    "RelativeRows",
    "RelativeTerms",
    "RowSelection",
    "Sequences",
    "SmallHead3D",
    "TransformerLayer3D",
    "all_reduce_replicated",
    "attention",
    "check_copies",
    "check_parameters",
    "clip_grad_norm_",
    "clip_gradients",
    "constant",
    "cross_entropy",
    "distribute",
    "explain",
    "from_fused_rows",
    "full_state_dict",
    "gather",
    "gather_rows",
    "gather_together",
    "init_parameter",
    "keep_gathered",
    "load_full_state_dict",
    "local",
    "local_block",
    "local_param",
    "local_rows",
    "local_shard",
    "logical_block",
    "matmul",
    "matmul_each",
    "normal",
    "pack_padded",
    "parallelize",
    "propose_plan",
    "redistribute",
    "rotary",
    "rules",
    "select",
    "shard",
    "spread_rows",
    "sum_gradient",
    "sum_rows",
    "to_fused_rows",
    "unfold_rows",
    "vector",
    "vocab_topk",
]
