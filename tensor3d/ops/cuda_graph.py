"""Forward and backward of a micro-batch as one CUDA graph: one launch of the host in place of some thousand.

A model of a few hundred million parameters leaves a fast GPU idle: the host needs longer to name the operators of a
micro-batch than the GPU to compute them. A graph (Nguyen et al. 2021, "Accelerating PyTorch with CUDA Graphs") records
the launches of one pass, and is replayed with new numbers in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_WARM_UP = 3  # passes before the capture: libraries are loaded, regions compiled, workspaces taken


class CapturedPass:
    """`run(**inputs)`, a forward and a backward pass of fixed shapes, replayed as a graph.

    What it must keep: the same shapes and types each time, nothing read by the host, no work that other processes take
    part in, and the same parameters in the same memory. Random numbers go on as without a graph: the generator of the
    device is part of it.

    Gradients lie in memory of the graph, to which `.grad` is set and in which passes add up; `zero_grad` of either kind
    starts them anew. Construction runs `run` a few times and leaves gradients and random numbers as they
    were, also where it raises.

    Args:
        run: takes the inputs, calls backward and returns what is wanted of the pass, without a graph of autograd.
        inputs: an example of them, on the device; copied.
        parameters: all whose gradients the pass makes.
        pool: of memory, shared with other passes (`torch.cuda.graph_pool_handle`) that never run at the same time.

    Raises:
        ValueError: an input that does not lie on a CUDA device.
        RuntimeError: PyTorch's, for a pass that cannot be captured.
    """

    def __init__(
        self,
        run: Callable[..., Tensor],
        inputs: Mapping[str, Tensor],
        parameters: Sequence[nn.Parameter],
        *,
        pool: Any = None,
    ) -> None:
        for name, tensor in inputs.items():
            if not tensor.is_cuda:
                raise ValueError(f"a CUDA graph needs its inputs on a CUDA device. Got {name} on {tensor.device}.")
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        before = [parameter.grad for parameter in self._parameters]
        device = next(iter(inputs.values())).device
        state = torch.cuda.get_rng_state(device)
        try:
            self._capture(run, device, pool)
        finally:  # also after a pass that cannot be captured, which leaves nothing of its own
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient
            torch.cuda.set_rng_state(state, device)

    def _capture(self, run: Callable[..., Tensor], device: torch.device, pool: Any) -> None:
        self._start_gradients(fresh=True)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    run(**self._inputs)
        finally:
            torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Of this thread alone: by default CUDA refuses meanwhile what other threads need to take memory, such as a
        # loader that pins the next batch, and the capture ends with it.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._result = run(**self._inputs)
        self._gradients = [parameter.grad for parameter in self._parameters]

    def __call__(self, **inputs: Tensor) -> Tensor:
        """The pass with other numbers. The next call overwrites the result.

        Raises:
            ValueError: other inputs than at construction, by name, shape or type.
        """
        if inputs.keys() != self._inputs.keys():
            raise ValueError(f"the graph was captured with {sorted(self._inputs)}. Got {sorted(inputs)}.")
        for name, tensor in inputs.items():
            own = self._inputs[name]
            if tensor.shape != own.shape or tensor.dtype != own.dtype:
                raise ValueError(
                    f"the graph was captured with {name} of shape {tuple(own.shape)} in {own.dtype}. Got "
                    f"{tuple(tensor.shape)} in {tensor.dtype}: capture another one for that."
                )
            own.copy_(tensor, non_blocking=True)
        self._start_gradients()
        self._graph.replay()
        return self._result

    def _start_gradients(self, *, fresh: bool = False) -> None:
        """Sets `.grad` of each parameter to the memory that the graph adds to: as it is where that stands there, else
        with what stands there, or zeros."""
        if fresh:
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter)
            return
        stale = []
        for parameter, own in zip(self._parameters, self._gradients, strict=True):
            assert own is not None, "capture has given every parameter a gradient"
            if parameter.grad is own:
                continue
            if parameter.grad is None:
                stale.append(_local(own))
            else:
                _local(own).copy_(_local(parameter.grad))
            parameter.grad = own
        if stale:
            torch._foreach_zero_(stale)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
