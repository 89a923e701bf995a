"""What AdamW and LAMB share: two moments a parameter, one fused kernel on local blocks, steps that can be skipped."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.optim import Optimizer

from tensor3d.distributed.cube import Cube
from tensor3d.distributed.data_shares import (
    ShardOverData,
    check_shard_over_data,
    is_whole,
    lies_in_share,
    share,
    share_placements,
)
from tensor3d.optim.clip_grad import check_parameters
from tensor3d.optim.data_shards import check_share, gather_shares
from tensor3d.sharding.param_layout import local
from tensor3d.torch_private import fused_adamw_

Group = dict[str, Any]
Groups = Iterable[nn.Parameter] | Iterable[Group]


@dataclass(frozen=True, kw_only=True)
class ParamGroupShards:
    """This rank's blocks of those parameters of a group that have a gradient, of one type: its shares of them where the
    state is sharded over `data`. A block may be empty."""

    group: Group
    parameters: Sequence[nn.Parameter]
    """The logical ones."""
    weights: list[Tensor]
    gradients: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    lie: Sequence[Tensor]
    """Logical tensors that are cut as these blocks are: of them `owns_for_norm` is to be asked."""
    steps: list[Tensor]
    """Scalars, fp32: steps that were done, without the skipped ones."""

    def some(self, numbers: Sequence[int]) -> ParamGroupShards:
        """Those blocks alone."""
        lists: Mapping[str, Any] = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name != "group"
        }
        chosen: Any = {name: [values[number] for number in numbers] for name, values in lists.items()}
        return replace(self, **chosen)


class ShardedAdamBase(Optimizer):
    """An optimiser with Adam's two moments, on the parameters of a cube.

    Kernels run on local blocks, as the first operators on DTensors of a four-axis mesh are slow. State has the layout
    of its parameter (a DTensor where that is one), so `torch.distributed.checkpoint` moves it to any other cube. It
    exists from the start, so that a checkpoint can be saved or loaded before the first step.

    Args:
        groups: parameters, or groups of them as `torch.optim` takes them; see `decay_groups`.
        lr: may be changed in `param_groups` at any time.
        shard_over_data: "state" or True: each rank along `data` keeps the moments of its share of the parameters only,
            updates that share and sends it to the others (ZeRO stage 1, see optim/data_shards.py). Gradient buckets
            are then freed between steps, too (`ExecutionPolicy.keep_buckets`).
            "gradients": also, of a gradient that is summed over `data` alone each rank gets only its share of the sum,
            in `.grad` too. It holds for all parameters of this cube and of cubes made of it by `with_policy` (ZeRO
            stage 2, `GradReducer.shard_gradients`).
            The same on every rank. With `data=1` it changes nothing.

    Raises:
        ValueError: an option out of range, a plain parameter on a cube of several ranks, one that cannot be shared
            out over `data`, or, with "gradients", made within a backward pass or while `Cube.no_sync` holds back some.
    """

    found_inf: Tensor | None = None
    """Scalar fp32 on the cube's device, the same on all ranks. While it is exactly 1, a step changes nothing, to the
    bit, whatever the gradients hold. Read by the kernels: the host never waits for it."""

    def __init__(
        self,
        groups: Groups,
        cube: Cube,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        shard_over_data: ShardOverData = False,
    ) -> None:
        self.cube = cube
        self.shard_over_data = shard_over_data
        check_shard_over_data(shard_over_data)
        if shard_over_data:
            cube.ledger.spare_memory()
        if shard_over_data == "gradients" and cube.axis("data").size > 1:
            cube.ledger.shard_gradients()
        # "fused" tells torch's load_state_dict that step counts live on the device.
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True})

    def add_param_group(self, param_group: Group) -> None:
        """As in torch.optim. Raises ValueError for an option out of range or a plain parameter on several ranks."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        check_options(added)
        check_parameters(added["params"], self.cube)
        for parameter in added["params"] if self.shard_over_data else ():
            check_share(parameter, self.cube)
        for parameter in added["params"]:
            self.state[parameter] = self._fresh(parameter)

    def __getstate__(self) -> dict[str, Any]:
        own = {"cube": self.cube, "found_inf": self.found_inf, "shard_over_data": self.shard_over_data}
        return super().__getstate__() | own  # for deepcopy

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch.optim. Moments that lie as the parameters lie are cut where this optimiser shards them.

        Raises:
            ValueError: moments in shares over `data`, and this optimiser needs them whole; nothing is changed.
        """
        loaded = [value for state in state_dict["state"].values() for value in _tensors_of(state)]
        if not self.shard_over_data and any(not is_whole(value) for value in loaded):
            raise ValueError(
                "the state is in shares over data, and this optimiser needs it whole. Make it with "
                "shard_over_data=True, or write a checkpoint with tensor3d.checkpoint and load that."
            )
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            for key in ("exp_avg", "exp_avg_sq"):
                if self._shares(parameter) and key in state and is_whole(state[key]):
                    block = share(local(state[key]), self.cube.axis("data")).clone()
                    state[key] = _laid(block, parameter, share_placements(parameter))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on the gradients that are there; parameters without one stay. Every rank calls it alike.

        Raises:
            ValueError: gradients are still held back by `Cube.no_sync`, or `found_inf` is no scalar of fp32.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.cube.ledger.check_nothing_held()
        if self.found_inf is not None and (self.found_inf.dtype != torch.float32 or self.found_inf.numel() != 1):
            raise ValueError(
                f"found_inf must be one number of fp32: kernels read its memory as that. Got {self.found_inf.dtype} of "
                f"shape {tuple(self.found_inf.shape)}."
            )
        work = [blocks for group in self.param_groups for blocks in self._blocks(group)]
        self._advance(work)
        if self.shard_over_data:
            gather_shares((p for group in self.param_groups for p in group["params"]), self.cube)
        # Writing to a block is not seen on its DTensor, by which autograd and keepers of copies tell that it changed.
        torch.autograd.graph.increment_version([p for blocks in work for p in blocks.parameters])
        return loss

    @abstractmethod
    def _advance(self, work: list[ParamGroupShards]) -> None:
        """Updates weights and moments."""

    def _adam(self, blocks: ParamGroupShards, into: list[Tensor], *, lr: float, weight_decay: float) -> None:
        """Moves the moments, and `into` by Adam's step: torch's own kernel, in one launch for all blocks."""
        self._count(blocks)
        beta1, beta2 = blocks.group["betas"]
        fused_adamw_(
            into,
            blocks.gradients,
            blocks.exp_avg,
            blocks.exp_avg_sq,
            [],
            blocks.steps,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=blocks.group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=self.found_inf,
        )

    def _count(self, blocks: ParamGroupShards) -> None:
        """A step more of each, unless it is skipped."""
        if self.found_inf is None:
            torch._foreach_add_(blocks.steps, 1)
        else:  # a list: a lone scalar tensor would be read on the host
            torch._foreach_add_(blocks.steps, [1 - self.found_inf] * len(blocks.steps))

    def _blocks(self, group: Group) -> list[ParamGroupShards]:
        """One for each type: a kernel takes tensors of one type."""
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                by_type.setdefault(parameter.dtype, []).append(parameter)
        return [self._of_one_type(group, parameters) for parameters in by_type.values()]

    def _of_one_type(self, group: Group, parameters: list[nn.Parameter]) -> ParamGroupShards:
        for parameter in parameters:
            if not self.state[parameter]:  # a loaded state that knew nothing of it
                self.state[parameter] = self._fresh(parameter)
        states = [self.state[parameter] for parameter in parameters]
        return ParamGroupShards(
            group=group,
            parameters=parameters,
            weights=[self._mine(p, p) for p in parameters],
            gradients=[self._mine(p.grad, p) for p in parameters if p.grad is not None],
            exp_avg=[local(state["exp_avg"]) for state in states],
            exp_avg_sq=[local(state["exp_avg_sq"]) for state in states],
            lie=[state["exp_avg"] for state in states],
            steps=[state["step"] for state in states],
        )

    def _shares(self, parameter: Tensor) -> bool:
        return bool(self.shard_over_data) and lies_in_share(parameter, self.cube.axis("data"))

    def _mine(self, tensor: Tensor, parameter: nn.Parameter) -> Tensor:
        """What this rank steps of its block of a parameter or gradient, which may be its share alone."""
        block = local(tensor)
        return share(block, self.cube.axis("data")) if self._shares(parameter) and is_whole(tensor) else block

    def _fresh(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": self._zeros(parameter),
            "exp_avg_sq": self._zeros(parameter),
        }

    def _zeros(self, parameter: nn.Parameter) -> Tensor:
        """Zeros of its type that lie as it lies, or as this rank's share of it."""
        with torch.no_grad():
            block = torch.zeros_like(self._mine(parameter, parameter))
        if not isinstance(parameter, DTensor):
            return block
        return _laid(block, parameter, share_placements(parameter) if self._shares(parameter) else parameter.placements)


def check_options(group: Group) -> None:
    """Raises ValueError for an option of a group that is out of its range: that of the type which its kernels compute
    in, where a smaller eps is 0."""
    wide = (torch.promote_types(p.dtype, torch.float32) for p in group["params"])
    bounds = min((torch.finfo(dtype) for dtype in wide), key=lambda each: each.max, default=torch.finfo(torch.float64))
    for name in ("lr", "weight_decay"):
        if not 0 <= group[name] <= bounds.max:
            raise ValueError(f"{name} must be at least 0 and finite in {bounds.dtype}. Got {group[name]}.")
    if not bounds.tiny <= group["eps"] <= bounds.max:
        raise ValueError(
            f"eps must be above 0 and finite in {bounds.dtype}, from {bounds.tiny:.3g} on: an element that has had no "
            f"gradient yet would become 0/0. Got {group['eps']}. BERT's is 1e-6."
        )
    if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas must be two rates, each at least 0 and below 1. Got {group['betas']}.")


def _laid(block: Tensor, parameter: Tensor, placements: Sequence[Placement]) -> Tensor:
    """A logical tensor of a parameter's shape and mesh, of which `block` is this rank's part."""
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        block, parameter.device_mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def _tensors_of(state: Mapping[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


# --- AdamW on the cube ------------------------------------------------------------------------------------------------


class AdamW(ShardedAdamBase):
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101, Algorithm 2): torch's fused kernel on local blocks.

    It works element by element, so nothing is sent, except the weights over `data` with `shard_over_data`. State of a
    parameter: `step`, `exp_avg` and `exp_avg_sq`, named and stored as by `torch.optim.AdamW`, whose checkpoints it
    reads.

    Args, Raises: see `ShardedAdamBase`.
    """

    def _advance(self, work: list[ParamGroupShards]) -> None:
        for blocks in work:
            _check_types(blocks)
        for blocks in work:
            self._adam(blocks, blocks.weights, lr=blocks.group["lr"], weight_decay=blocks.group["weight_decay"])


def _check_types(blocks: ParamGroupShards) -> None:
    """Raises ValueError where parameters have another type than their moments: torch's kernel knows one alone."""
    for weight, moment in zip(blocks.weights, blocks.exp_avg, strict=True):
        if weight.dtype != moment.dtype:
            raise ValueError(
                f"a parameter of shape {tuple(weight.shape)} is of {weight.dtype}, and its moments are of "
                f"{moment.dtype}, as they were made before the model was converted. Convert first (model.bfloat16() "
                "and the like), then make the optimiser; or leave weights in fp32 and compute in bf16: "
                "MixedPrecisionPolicy(compute=...)."
            )


# --- Which parameters decay -------------------------------------------------------------------------------------------


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimiser: tensors of two or more dims decay, those of one do not.

    The dims of the logical tensor decide, not its name, as names differ from model to model: in a transformer, biases
    and the gains of LayerNorm are vectors; weights, embeddings and tables are matrices. A tied weight comes once.
    Frozen parameters and an empty group are left out.

    Raises:
        ValueError: `weight_decay` is negative or not finite, or the model has nothing to train.
    """
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay must be at least 0 and finite. Got {weight_decay}.")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("no parameter of the model takes a gradient. Set requires_grad of what is to be trained.")
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
