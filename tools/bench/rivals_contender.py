"""Who competes in `bench rivals`: a model that is split somehow, with its share of the work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from models.bert import BertForPreTraining
from tensor3d import Cube, TransformerLayer3D, clip_grad_norm_
from tensor3d.optim import AdamW, decay_groups
from tools.bench.plain import PlainBert, PlainLayer, copy_weights
from tools.bench.rivals_split import fully_sharded, replicated, sum_partial_gradients, tensor_parallel
from tools.bench.rivals_work import Work, packed_batch, packed_hidden, plain_batch, whole_hidden

RIVALS = ("tp", "fsdp2", "tp+fsdp2", "ddp")
# The same for all. Epsilon is BERT's; PyTorch's own default is another one.
_LR, _BETAS, _EPS, _DECAY, _MAX_NORM = 1e-4, (0.9, 0.999), 1e-6, 0.01, 1.0


def _nothing() -> None:
    pass


@dataclass(kw_only=True)
class Contender:
    """One model on one rank."""

    model: nn.Module
    forward: Callable[[], Tensor]
    """What backward begins with."""
    gradient: Tensor | None = None
    """Of what `forward` returns; None: it is a loss."""
    given: Tensor | None = None
    """What gets a gradient and is no parameter: the input of a layer."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """What forward and backward run in."""
    complete: Callable[[], None] = _nothing
    """Makes gradients whole after backward, where that is not done by itself."""
    clip: Callable[[], object] = _nothing
    optimizer: torch.optim.Optimizer | None = None
    """None: forward and backward are all."""

    def step(self) -> Tensor:
        """All of it. The loss of this rank, a scalar; of a layer, the sum of squares of the gradient of its input."""
        shown = self.passes()
        self.update()
        self.forget()
        return shown

    def passes(self) -> Tensor:
        """Forward and backward."""
        with self.around():
            result = self.forward()
            result.backward(self.gradient)
        self.complete()
        if self.given is None or self.given.grad is None:
            return result.detach()
        return torch.linalg.vector_norm(self.given.grad).square()

    def update(self) -> None:
        if self.optimizer is not None:
            self.clip()
            self.optimizer.step()

    def forget(self) -> None:
        """Drops all gradients."""
        self.model.zero_grad(set_to_none=True)
        if self.given is not None:
            self.given.grad = None


def make_ours(work: Work, cube: Cube) -> Contender:
    """`models.bert` on a cube."""
    model = _ours(work, cube)
    if work.what == "layer":
        x, gradient, sequences = packed_hidden(work, cube)
        x.requires_grad_()
        return Contender(model=model, forward=lambda: model(x, sequences), gradient=gradient, given=x)
    batch, targets = packed_batch(work, cube), work.sequences * work.masked
    return Contender(
        model=model,
        forward=lambda: model(batch, targets, work.sequences).loss,
        clip=lambda: clip_grad_norm_(model.parameters(), _MAX_NORM, cube),
        optimizer=AdamW(decay_groups(model, _DECAY), cube, lr=_LR, betas=_BETAS, eps=_EPS),
    )


def make_rival(name: str, work: Work, device: torch.device, tensor_size: int) -> Contender:
    """The plain model, split by PyTorch's own means over all processes, with the weights of ours.

    Args:
        name: one of `RIVALS`.
        tensor_size: ranks of the tensor-parallel dimension of "tp+fsdp2".
    """
    plain = PlainLayer(work.config) if work.what == "layer" else PlainBert(work.config)
    copy_weights(plain, _ours(work, Cube.single()))
    plain.to(device)
    mesh = _mesh(name, device, tensor_size)
    groups, members = mesh.shape
    if members > 1:
        tensor_parallel(plain, mesh["tensor"])
    if name.endswith("fsdp2"):
        fully_sharded(plain, mesh["data"])
    model: nn.Module = replicated(plain) if name == "ddp" else plain
    parameters = list(model.parameters())
    share = work.sequences // groups
    first = mesh.get_local_rank("data") * share
    complete = (lambda: sum_partial_gradients(parameters)) if members > 1 else _nothing
    if work.what == "layer":
        place = mesh.get_local_rank("tensor")
        own = (whole[first : first + share].chunk(members, 1)[place] for whole in whole_hidden(work))
        x, gradient = (part.to(device, copy=True) for part in own)
        x.requires_grad_()
        return Contender(model=model, forward=lambda: model(x), gradient=gradient, given=x, complete=complete)
    batch = plain_batch(work, first, first + share, device)
    return Contender(
        model=model,
        forward=lambda: model(*batch),
        around=loss_parallel if members > 1 else nullcontext,
        complete=complete,
        clip=lambda: nn.utils.clip_grad_norm_(parameters, _MAX_NORM),
        optimizer=torch.optim.AdamW(decay_groups(model, _DECAY), lr=_LR, betas=_BETAS, eps=_EPS, fused=True),
    )


def _mesh(name: str, device: torch.device, tensor_size: int) -> DeviceMesh:
    """Dimensions "data", whose ranks have different sequences, and "tensor", whose ranks share theirs."""
    world = dist.get_world_size()
    tensor = {"tp": world, "tp+fsdp2": tensor_size}.get(name, 1)
    mesh = init_device_mesh(device.type, (world // tensor, tensor), mesh_dim_names=("data", "tensor"))
    if 1 < tensor < world:
        mesh._flatten("all")  # norms over both dimensions are then summed at once
    return mesh


def _ours(work: Work, cube: Cube) -> nn.Module:
    """The model on a cube. From the same seed its weights are the same on every one."""
    cube.manual_seed(work.seed)
    c = work.config
    if work.what == "step":
        return BertForPreTraining(c, cube)
    return TransformerLayer3D(c.hidden, c.heads, cube, c.inner_size, activation=c.activation, eps=c.eps, std=c.std)
