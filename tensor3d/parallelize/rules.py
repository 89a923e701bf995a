"""The rules that a plan may name (`tensor3d.rules`), each for one sort of module.

rule                          for                                   reads            gives
linear(face)                  nn.Linear                             face             the other face
linear(face, turn=True)       the same, after a turn                the other face   the other face
projection()                  nn.Linear to a vocabulary             z (turn: y)      logits on face y
norm(face)                    what computes a LayerNorm or RMSNorm  face             the same
embedding(), table()          nn.Embedding                          ids of a plane   z
head(face)                    nn.Linear to a handful of outputs     face             copies over the face's axis
attention(rows)               nn.MultiheadAttention                 z                z
own_attention(rows, ...)      code that calls SDPA on heads         z                z
own_mlp(output, ...)          code between linears, gates among it  z                z
dropout()                     nn.Dropout                            any              the same
wrapped({...})                elementwise code with parameters      any              the same
replicated(sum_over, enters)  code that must see whole rows         copies           copies, or `enters`
replace(build)                anything                              up to you        up to you
keep()                        modules without parameters            any              up to its code
"""

from __future__ import annotations

from tensor3d.parallelize.own_attention import OwnAttention
from tensor3d.parallelize.own_attention import own_mlp as own_mlp
from tensor3d.parallelize.parallel_rule import Keep, Replace, Replicated, Wrapped
from tensor3d.parallelize.torch_attention import Attention
from tensor3d.parallelize.torch_layer_rules import Dropout, Embedding, Head, Linear, Norm, Projection, Table

__all__ = [
    "attention",
    "dropout",
    "embedding",
    "head",
    "keep",
    "linear",
    "norm",
    "own_attention",
    "own_mlp",
    "projection",
    "replace",
    "replicated",
    "table",
    "wrapped",
]

# A plan reads like a call: `{"mlp.up": rules.linear("z"), ...}`.
linear = Linear
projection = Projection
head = Head
norm = Norm
embedding = Embedding
table = Table
dropout = Dropout
attention = Attention
own_attention = OwnAttention
wrapped = Wrapped
replicated = Replicated
replace = Replace
keep = Keep
