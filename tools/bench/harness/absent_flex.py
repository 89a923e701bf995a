"""FlexAttention's kernels, compiled for an NVIDIA GPU that need not be there (absent_gpu.py).

Backward is compiled apart: where there is no GPU, autograd follows no tensor of one, not even a fake one. So the
compiler is given the graph of forward, in which the operator of backward stands in the place of forward's, with the
same mask.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tensor3d import Sequences
from tensor3d.attention.backends import AttentionArgs
from tensor3d.attention.flex import block_mask, masked
from tensor3d.ops.compiled_regions import own_copy
from tools.bench.harness.absent_gpu import DEVICE, Architecture, RegionCode, graph_compiler, watched


@dataclass(frozen=True, kw_only=True)
class FlexKernel:
    """One of its kernels, for one size and mask."""

    dtype: torch.dtype
    rows: int
    heads: int
    head_dim: int
    causal: bool = False
    window: int | None = None
    backward: bool = False

    def compile(self, architecture: Architecture) -> RegionCode:
        """As `tensor3d.attention.flex.compiled` would on such a GPU. It raises as `compile_for`."""
        compile_graph = graph_compiler()

        def backend(graph: Any, examples: Any, **_: Any) -> Callable[..., Any]:
            outputs = len(graph.graph.output_node().args[0])
            if self.backward:
                _turn(graph)
            compile_graph(graph, examples)
            return lambda *_: [None] * outputs  # what was compiled cannot be run

        def call() -> None:
            sequences = Sequences.from_lengths([self.rows], device=DEVICE)
            mask = block_mask(
                AttentionArgs(sequences=sequences, queries=None, dropout=0.0, causal=self.causal, window=self.window)
            )
            q, k, v, result, gradient = (self._made() for _ in range(5))
            sums, gradient_of_sums = (torch.empty(1, self.heads, self.rows, device=DEVICE) for _ in range(2))
            region = torch.compile(own_copy(_with_saved), dynamic=False, fullgraph=True, backend=backend)
            region(q, k, v, mask, *((result, sums, gradient, gradient_of_sums) if self.backward else ()))

        return watched(architecture, call)

    def _made(self) -> Tensor:
        """(1, h, rows, d), in memory by rows, as `flex` gives it."""
        by_rows = torch.empty(self.rows, self.heads, self.head_dim, dtype=self.dtype, device=DEVICE)
        return by_rows.transpose(0, 1).unsqueeze(0)


def _with_saved(q: Tensor, k: Tensor, v: Tensor, mask: Any, *saved: Tensor) -> tuple[Tensor, ...]:
    """What else backward takes is an input of the graph because something is computed of it."""
    return masked(q, k, v, mask), *[each.clone() for each in saved]


def _turn(graph: fx.GraphModule) -> None:
    """Makes it return the gradients of q, k and v."""
    nodes, operators = graph.graph, torch.ops.higher_order
    (forward,) = nodes.find_nodes(op="call_function", target=operators.flex_attention)
    q, k, v, score, *others = forward.args
    result = nodes.output_node()
    saved = [each.args[0] for each in result.args[0][1:]]  # type: ignore[index, union-attr]
    graph.joint = fx.symbolic_trace(_unchanged)
    with nodes.inserting_before(result):
        joint = nodes.get_attr("joint")
        found = nodes.call_function(operators.flex_attention_backward, (q, k, v, *saved, score, joint, *others))
        result.args = (tuple(nodes.call_function(operator.getitem, (found, number)) for number in range(3)),)
    nodes.eliminate_dead_code()
    graph.recompile()


def _unchanged(score: Any, batch: Any, head: Any, query: Any, key: Any, gradient: Any) -> list[Any]:
    """From the gradient of a score as the mask takes it to that of a product: `flex` changes none."""
    return [gradient, None, None, None, None]
