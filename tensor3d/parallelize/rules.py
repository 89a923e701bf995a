"""The rules that a plan may name (`tensor3d.rules`), each for one sort of module.

rule                          for                                   reads            gives
linear(face)                  nn.Linear                             face             the other face
linear(face, turn=True)       the same, after a turn                the other face   the other face
projection()                  nn.Linear to a vocabulary             z (turn: y)      logits on face y
norm(face)                    nn.LayerNorm, nn.RMSNorm, *RMSNorm    face             the same
embedding(), table()          nn.Embedding                          ids of a plane   z
head(face)                    nn.Linear to a handful of outputs     face             copies over the face's axis
attention(rows)               nn.MultiheadAttention                 z                z
dropout()                     nn.Dropout                            any              the same
wrapped({...})                elementwise code with parameters      any              the same
replicated(sum_over, enters)  code that must see whole rows         copies           copies, or `enters`
replace(build)                anything                              up to you        up to you
keep()                        modules without parameters            any              up to its code
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from tensor3d.distributed.cube_shape import AxisName
from tensor3d.parallelize import own_code_rules, torch_layer_rules
from tensor3d.parallelize.module_copy import ModuleBuilder
from tensor3d.parallelize.parallel_rule import ParallelRule
from tensor3d.parallelize.torch_attention import Attention, PackedRows
from tensor3d.sharding.activation_layout import Face
from tensor3d.sharding.param_layout import Layout

__all__ = [
    "attention",
    "dropout",
    "embedding",
    "head",
    "keep",
    "linear",
    "norm",
    "projection",
    "replace",
    "replicated",
    "table",
    "wrapped",
]


def linear(face: Face, turn: bool = False) -> ParallelRule:
    """nn.Linear as a `Linear3D` that reads `face`. `turn`: its input arrives on the other face and is turned first."""
    return torch_layer_rules.Linear(face=face, turn=turn)


def projection(turn: bool = False) -> ParallelRule:
    """nn.Linear to a vocabulary as a `Projection3D`, face z to face y: odd sizes, its own weight or an embedding's.

    `turn`: its input arrives on face y and is turned first.
    """
    return torch_layer_rules.Projection(turn=turn)


def norm(face: Face) -> ParallelRule:
    """nn.LayerNorm (with or without bias), nn.RMSNorm and classes named *RMSNorm, over the columns of `face`."""
    return torch_layer_rules.Norm(face=face)


def embedding() -> ParallelRule:
    """nn.Embedding as an `Embedding3D`. The row of `padding_idx` gets no gradient from lookups, as in torch."""
    return torch_layer_rules.Embedding()


def table() -> ParallelRule:
    """nn.Embedding with few rows (positions, token types) as a `LookupEmbedding3D`."""
    return torch_layer_rules.Table()


def head(face: Face) -> ParallelRule:
    """nn.Linear with a handful of outputs as a `SmallHead3D`; computed in fp32 at least."""
    return torch_layer_rules.Head(face=face)


def attention(rows: PackedRows, causal: bool = False) -> ParallelRule:
    """nn.MultiheadAttention as self-attention within the sequences that `rows` holds while the model runs.

    In nn.TransformerEncoderLayer it works as it is. Rows of `in_proj_weight` and `in_proj_bias` are in another order
    than the original's, (head, q/k/v, d): take them out with `full_state_dict`, put them in with
    `load_full_state_dict`.
    """
    return Attention(rows=rows, causal=causal)


def dropout() -> ParallelRule:
    """nn.Dropout as `Dropout3D`; also what becomes of one that no pattern names."""
    return torch_layer_rules.Dropout()


def wrapped(layouts: Mapping[str, Layout]) -> ParallelRule:
    """The module's own code, given this rank's block of each of its own parameters, e.g. `{"gamma": vector("z")}`.

    For elementwise code: a LayerScale, a learned gate. Modules inside have rules of their own. Blocks are given while
    its forward runs: code around it must call the module, not another of its methods.
    """
    return own_code_rules.Wrapped(layouts=dict(layouts))


def replicated(sum_over: tuple[AxisName, ...], enters: Face | None = None) -> ParallelRule:
    """The module's own code and whole parameters on every rank, with all that lies inside.

    Args:
        sum_over: axes over which the ranks' gradients are parts of one sum. All four where each rank uses a part of
            what it makes, as with `enters`; not those over which every rank has the whole gradient already.
        enters: its result, the (rows, columns) of a plane that each of its ranks has made, goes on as this rank's block
            on this face. A result of more dims has all but the last taken together, as (1, rows, columns).

    Batch norm inside has the statistics of what its rank sees: in training that is the batch only where x and data are
    1. Dropout inside draws other masks on each rank.
    """
    return own_code_rules.Replicated(sum_over=tuple(sum_over), enters=enters)


def replace(build: Callable[[nn.Module, str, ModuleBuilder], nn.Module]) -> ParallelRule:
    """What `build(module, name, workshop)` returns, for what none of the other rules does.

    `workshop.cube` is the cube, and `workshop.parameter(source, layout)` makes this rank's block of one of the
    original's parameters. Parts of the module may be built by rules: as in
    `rules.linear("z").build(module.q, name, workshop)`.
    """
    return own_code_rules.Replace(maker=build)


def keep() -> ParallelRule:
    """A module without parameters, copied as it is with all inside. Only needed where parallelize asks for a word."""
    return own_code_rules.Keep()
