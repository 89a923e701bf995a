"""What a checkpoint holds: one flat dictionary of named tensors, whatever the model, the optimiser and the cube.

    model.NAME              parameters and buffers; DTensors as they lie on the cube
    optimizer.NAME.KEY      what the optimiser remembers of a parameter
    fp8.NAME                of a weight whose products have delayed scaling: its history (distributed/fp8_scales.py)
    extra.NAME              small tensors of the caller, the same on all ranks
    random.cpu.RANK         the random stream of a rank; random.cuda.RANK where it has a GPU

The tensors share memory with the live ones, so a dictionary of a running training is read, or filled in place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tensor3d.distributed.cube import Cube
from tensor3d.distributed.fp8_scales import history_tensor, restore_history
from tensor3d.sharding.param_layout import detached, zeros_like
from tensor3d.torch_private import step_hooks

MODEL, OPTIMIZER, EXTRA, RANDOM = "model.", "optimizer.", "extra.", "random."
FP8 = "fp8."
CPU_STREAM, CUDA_STREAM = f"{RANDOM}cpu.", f"{RANDOM}cuda."
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile's and activation checkpointing's


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers under the names of a checkpoint; a tensor with two names has the first.

    Raises:
        ValueError: the module keeps a state that is not a tensor.
    """
    return {name: detached(value) for name, value in live_tensors(model).items()}


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What `model_tensors` has, the model's own: DTensors among those have version counters apart from these."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is {type(value).__name__}, and a checkpoint holds tensors. Make it a buffer.")
        if id(value) not in seen:
            seen.add(id(value))
            tensors[MODEL + _clean(name)] = value
    return tensors


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """What the optimiser remembers, under the names of a checkpoint. Its options are no part of it: the recipe's.

    Args:
        names: of these parameters alone.

    Raises:
        ValueError: it has parameters that are not the model's, or remembers what is not a tensor.
    """
    name_of = {id(parameter): _clean(name) for name, parameter in model.named_parameters()}
    tensors = {}
    for parameter in _parameters(optimizer):
        if id(parameter) not in name_of:
            raise ValueError(
                f"the optimiser has a parameter of shape {tuple(parameter.shape)} that is not the model's. Make it "
                "from the parameters of the model that is saved."
            )
        name = name_of[id(parameter)]
        if names is not None and name not in names:
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{name}.{key}"] = detached(value)
            elif value is not None:
                raise ValueError(
                    f"the optimiser's {key} of {name} is {type(value).__name__}, and a checkpoint holds tensors. Use "
                    "an optimiser that keeps it as a tensor."
                )
    return tensors


def fp8_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Histories of delayed scaling, fp32 (3, H), of the weights that have one: the same on all ranks."""
    found = {FP8 + _clean(name): history_tensor(each) for name, each in model.named_parameters()}
    return {name: each for name, each in found.items() if each is not None}


def has_delayed_scaling(model: nn.Module, cube: Cube) -> bool:
    """Whether a model's products have it: by its own cubes, which may have another precision than the one at hand."""
    cubes = (each for module in model.modules() if isinstance(each := getattr(module, "cube", None), Cube))
    return any(each.precision.fp8 == "delayed" for each in (cube, *cubes))


def fp8_places(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], cube: Cube) -> dict[str, Tensor]:
    """What is to be read of a checkpoint that has these: by their shapes, for the model's weights."""
    names = {FP8 + _clean(name) for name, _ in model.named_parameters()}
    return {name: torch.empty(shape, device=cube.device) for name, shape in shapes.items() if name in names}


def restore_fp8(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Of weights that the checkpoint has no history of, nothing is known any more."""
    for name, parameter in model.named_parameters():
        restore_history(parameter, stored.get(FP8 + _clean(name)))


def stream_tensors(cube: Cube) -> dict[str, Tensor]:
    """Copies of this rank's random streams."""
    streams = {f"{CPU_STREAM}{cube.rank}": torch.get_rng_state()}
    if cube.device.type == "cuda":
        streams[f"{CUDA_STREAM}{cube.rank}"] = torch.cuda.get_rng_state(cube.device)
    return streams


def extra_tensors(extra: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    return {EXTRA + name: tensor.detach() for name, tensor in (extra or {}).items()}


def restore_streams(state: Mapping[str, Tensor], cube: Cube) -> None:
    torch.set_rng_state(state[f"{CPU_STREAM}{cube.rank}"])
    if cube.device.type == "cuda" and f"{CUDA_STREAM}{cube.rank}" in state:
        torch.cuda.set_rng_state(state[f"{CUDA_STREAM}{cube.rank}"], cube.device)


def remembered(stored: Mapping[str, object]) -> set[str]:
    """The parameters of which a checkpoint has an optimiser's state. The others had no gradient yet."""
    return {name.removeprefix(OPTIMIZER).rpartition(".")[0] for name in stored if name.startswith(OPTIMIZER)}


def init_missing_state(model: nn.Module, optimizer: torch.optim.Optimizer, names: Collection[str]) -> list[Tensor]:
    """Makes the state of the named parameters that have none yet, by a step that changes nothing else: only they have
    a gradient, of 0, and the learning rate is 0. Returns those that have got a state, for `forget`."""
    parameters = list(_parameters(optimizer))
    wanted = {id(parameter) for name, parameter in model.named_parameters() if _clean(name) in names}
    missing = [p for p in parameters if id(p) in wanted and p.requires_grad and not optimizer.state.get(p)]
    if missing:
        gradients = [parameter.grad for parameter in parameters]
        rates = [group.get("lr") for group in optimizer.param_groups]
        try:
            _step_without_effect(optimizer, missing)
        except BaseException:
            forget(optimizer, missing)
            raise
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate
    return missing


def forget(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    """Drops what the optimiser remembers of some parameters."""
    for parameter in parameters:
        optimizer.state.pop(parameter, None)


def forget_others(model: nn.Module, optimizer: torch.optim.Optimizer, names: Collection[str]) -> None:
    """Drops what the optimiser remembers of all but the named parameters."""
    forget(optimizer, [parameter for name, parameter in model.named_parameters() if _clean(name) not in names])


def _step_without_effect(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
    for parameter in _parameters(optimizer):
        parameter.grad = None
    for parameter in parameters:
        parameter.grad = zeros_like(parameter)
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    with _without_hooks(optimizer):
        type(optimizer).step(optimizer)  # not what a schedule or a user has put in its place


@contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Hooks of steps, of this optimiser and of all, are told of training's alone: an average of the weights would move
    by weights that are about to be replaced."""
    places = step_hooks(optimizer)
    hooks = [dict(place) for place in places]
    for place in places:
        place.clear()
    try:
        yield
    finally:
        for place, before in zip(places, hooks, strict=True):
            place.update(before)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
