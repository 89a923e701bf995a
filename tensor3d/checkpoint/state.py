"""What a checkpoint holds: one flat dictionary of named tensors, whatever the model, the optimiser and the cube.

    model.NAME              parameters and buffers; DTensors as they lie on the cube
    optimizer.NAME.KEY      what the optimiser remembers of a parameter
    extra.NAME              small tensors of the caller, the same on all ranks
    random.cpu.RANK         the random stream of a rank; random.cuda.RANK where it has a GPU

The tensors share memory with the live ones, so a dictionary of a running training is read, or filled in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tensor3d.cube import Cube

MODEL, OPTIMIZER, EXTRA, RANDOM = "model.", "optimizer.", "extra.", "random."
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile's and activation checkpointing's


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers under the names of a checkpoint; a tensor with two names has the first.

    Raises:
        ValueError: the module keeps a state that is not a tensor.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is {type(value).__name__}, and a checkpoint holds tensors. Make it a buffer.")
        if id(value) not in seen:
            seen.add(id(value))
            tensors[MODEL + _clean(name)] = value.detach()
    return tensors


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimiser remembers, under the names of a checkpoint. Its options are no part of it: the recipe's.

    Raises:
        ValueError: it has parameters that are not the model's, or remembers what is not a tensor.
    """
    names = {id(parameter): _clean(name) for name, parameter in model.named_parameters()}
    tensors = {}
    for parameter in _parameters(optimizer):
        if id(parameter) not in names:
            raise ValueError(
                f"the optimiser has a parameter of shape {tuple(parameter.shape)} that is not the model's. Make it "
                "from the parameters of the model that is saved."
            )
        name = names[id(parameter)]
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}{name}.{key}"] = value.detach()
            elif value is not None:
                raise ValueError(
                    f"the optimiser's {key} of {name} is {type(value).__name__}, and a checkpoint holds tensors. Use "
                    "an optimiser that keeps it as a tensor."
                )
    return tensors


def stream_tensors(cube: Cube) -> dict[str, Tensor]:
    """Copies of this rank's random streams."""
    streams = {f"{RANDOM}cpu.{cube.rank}": torch.get_rng_state()}
    if cube.device.type == "cuda":
        streams[f"{RANDOM}cuda.{cube.rank}"] = torch.cuda.get_rng_state(cube.device)
    return streams


def extra_tensors(extra: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    return {EXTRA + name: tensor.detach() for name, tensor in (extra or {}).items()}


def restore_streams(state: Mapping[str, Tensor], cube: Cube) -> None:
    torch.set_rng_state(state[f"{RANDOM}cpu.{cube.rank}"])
    if cube.device.type == "cuda" and f"{RANDOM}cuda.{cube.rank}" in state:
        torch.cuda.set_rng_state(state[f"{RANDOM}cuda.{cube.rank}"], cube.device)


def fill_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Makes the state of an optimiser that has not stepped, by a step that changes nothing. Gradients are dropped."""
    trained = [parameter for parameter in _parameters(optimizer) if parameter.requires_grad]
    if all(parameter in optimizer.state for parameter in trained):
        return
    optimizer.state.clear()
    optimizer.zero_grad(set_to_none=True)
    get_optimizer_state_dict(model, optimizer)  # PyTorch's way: gradients of 0 at a learning rate of 0


def forget_missing(model: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, object]) -> None:
    """Drops the state of parameters of which a checkpoint has none: they had no gradient yet when it was written."""
    remembered = {name.rpartition(".")[0] for name in stored if name.startswith(OPTIMIZER)}
    for name, parameter in model.named_parameters():
        if OPTIMIZER + _clean(name) not in remembered:
            optimizer.state.pop(parameter, None)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
