"""tensor3d: transformer training split three ways, without a token of padding."""

from tensor3d.attention import attention
from tensor3d.chosen import ChosenRows
from tensor3d.clip import GradientNorm, check_parameters, clip_grad_norm_, clip_gradients
from tensor3d.collectives import sum_copies
from tensor3d.cube import Cube
from tensor3d.explain import Explanation, explain
from tensor3d.faces import Face, gather, gather_rows, own_block, shard
from tensor3d.layers.attention import Attention3D
from tensor3d.layers.dropout import Dropout3D
from tensor3d.layers.embedding import Embedding3D, TableEmbedding3D, TiedProjection3D
from tensor3d.layers.gated import GatedMLP3D
from tensor3d.layers.heads import NarrowHead3D
from tensor3d.layers.likeliest import likeliest
from tensor3d.layers.linear import Linear3D
from tensor3d.layers.loss import cross_entropy
from tensor3d.layers.norm import LayerNorm3D, RMSNorm3D
from tensor3d.layers.projection import Projection3D
from tensor3d.layers.transformer import MLP3D, Block3D, TransformerLayer3D
from tensor3d.layout import Layout, distribute, local
from tensor3d.matmul import matmul
from tensor3d.padded import PaddedPacks, own_share, pack_padded
from tensor3d.parallel import PackedRows, full_state_dict, kinds, load_full_state_dict, parallelize, propose_plan
from tensor3d.parameters import constant, normal, use
from tensor3d.precision import Precision
from tensor3d.queries import Queries
from tensor3d.rotary import rotary
from tensor3d.rows import own_rows, select, turn
from tensor3d.sequences import Sequences
from tensor3d.shape import CubeShape
from tensor3d.speed import Speed
from tensor3d.traffic import TrafficCount

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
    "kinds",
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
    "select",
    "shard",
    "sum_copies",
    "turn",
    "use",
]
