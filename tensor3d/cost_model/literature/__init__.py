"""The known ways to split a transformer encoder over ranks, each by its own paper's formulas: rows to compare with.

`ways` gives the rows: what a rank receives, how often, and what it holds. `timed` makes seconds of them on a `Cluster`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tensor3d.cost_model.literature.times import Broadcasts, MethodTime, timed
from tensor3d.cost_model.literature.volumes import (
    Collective,
    Method,
    MethodQuery,
    TransformerSpec,
    fully_sharded,
    one_d,
    one_d_sequence,
    three_d,
    two_and_a_half_d,
    two_d,
)

# --- All rows at once, or one by its name -----------------------------------------------------------------------------
#
# A layer keeps 8h + 2f numbers a token (h hidden size, f inner size; 16h with f = 4h): the inputs of its four products,
# q, k, v, the input of GELU and those of two LayerNorms. That is Korthikanti et al. 2022 (arXiv 2205.05198, eq. 1: 34
# bytes a token and h in half precision) without dropout masks, and without the attention's probabilities, which fused
# kernels do not keep. What is O(1) a token is left out everywhere: LayerNorm's statistics and their collectives, the
# sums of softmax. So are biases, and the traffic of embedding and heads, which goes with the masked tokens.

WAYS: Mapping[str, Callable[[MethodQuery], Method]] = MappingProxyType(
    {
        "1-D": one_d,
        "1-D, sequence": one_d_sequence,
        "2-D": two_d,
        "2.5-D": two_and_a_half_d,
        "3-D": three_d,
        "fully sharded": fully_sharded,
    }
)


def ways(encoder: TransformerSpec, ranks: int, *, kept: bool = False, recomputed: bool = False) -> tuple[Method, ...]:
    """Every known way on so many ranks; one that does not exist says why in `refused`.

    Args:
        kept: gathered operands stay for backward: less traffic, more memory. Off, as in the layers of this library.
        recomputed: layers keep their input alone and repeat their forward pass.

    Raises:
        ValueError: ranks that are not a whole number of at least 1.
    """
    return tuple(known(name, encoder, ranks, kept=kept, recomputed=recomputed) for name in WAYS)


def known(name: str, encoder: TransformerSpec, ranks: int, *, kept: bool = False, recomputed: bool = False) -> Method:
    """One way, by its name.

    Raises:
        ValueError: a name that is not in `WAYS`; ranks that are not a whole number of at least 1.
    """
    if name not in WAYS:
        raise ValueError(f"the known ways are {'; '.join(WAYS)}. Got {name!r}.")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"ranks must be a whole number of at least 1. Got {ranks!r}.")
    return WAYS[name](MethodQuery(encoder=encoder, ranks=ranks, kept=kept, recomputed=recomputed))


# --- The known ways to split a transformer encoder over ranks, each by its own paper's formulas -----------------------

__all__ = [
    "WAYS",
    "Broadcasts",
    "Collective",
    "Method",
    "MethodTime",
    "TransformerSpec",
    "known",
    "timed",
    "ways",
]
