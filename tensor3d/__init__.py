"""tensor3d: transformer training split three ways, without a token of padding."""

from tensor3d.attention import attention
from tensor3d.batches.padded import PaddedPacks, own_share, pack_padded
from tensor3d.batches.row_queries import ChosenRows, Queries
from tensor3d.batches.sequences import Sequences
from tensor3d.distributed.collectives import sum_copies
from tensor3d.distributed.comm_stats import TrafficCount
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import CubeShape
from tensor3d.distributed.policies import Precision, Speed
from tensor3d.explain import Explanation, explain
from tensor3d.layers.attention import Attention3D
from tensor3d.layers.dropout import Dropout3D
from tensor3d.layers.embedding import Embedding3D, TableEmbedding3D, TiedProjection3D
from tensor3d.layers.heads import NarrowHead3D, likeliest
from tensor3d.layers.linear import Linear3D, Projection3D
from tensor3d.layers.loss import cross_entropy
from tensor3d.layers.mlp import GatedMLP3D
from tensor3d.layers.norm import LayerNorm3D, RMSNorm3D
from tensor3d.layers.transformer import MLP3D, Block3D, TransformerLayer3D
from tensor3d.ops.rotary import rotary
from tensor3d.optim.clip_grad import GradientNorm, check_parameters, clip_grad_norm_, clip_gradients
from tensor3d.parallelize import PackedRows, full_state_dict, load_full_state_dict, parallelize, propose_plan, rules
from tensor3d.sharding.activation_layout import Face, gather, gather_rows, own_block, shard
from tensor3d.sharding.matmul import matmul
from tensor3d.sharding.param_layout import Layout, constant, distribute, local, normal, use, vector
from tensor3d.sharding.redistribute import own_rows, select, turn

__version__ = "0.1.0"

__all__ = [
    "MLP3D",
    "Attention3D",
    "Block3D",
    "ChosenRows",
    "Cube",
    "CubeShape",
    "Dropout3D",
    "Embedding3D",
    "Explanation",
    "Face",
    "GatedMLP3D",
    "GradientNorm",
    "LayerNorm3D",
    "Layout",
    "Linear3D",
    "NarrowHead3D",
    "PackedRows",
    "PaddedPacks",
    "Precision",
    "Projection3D",
    "Queries",
    "RMSNorm3D",
    "Sequences",
    "Speed",
    "TableEmbedding3D",
    "TiedProjection3D",
    "TrafficCount",
    "TransformerLayer3D",
    "attention",
    "check_parameters",
    "clip_grad_norm_",
    "clip_gradients",
    "constant",
    "cross_entropy",
    "distribute",
    "explain",
    "full_state_dict",
    "gather",
    "gather_rows",
    "likeliest",
    "load_full_state_dict",
    "local",
    "matmul",
    "normal",
    "own_block",
    "own_rows",
    "own_share",
    "pack_padded",
    "parallelize",
    "propose_plan",
    "rotary",
    "rules",
    "select",
    "shard",
    "sum_copies",
    "turn",
    "use",
    "vector",
]
