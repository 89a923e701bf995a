"""What to do with a module that the plan does not place, in words, and the check that a kind fits its module."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from tensor3d.cube import Cube
from tensor3d.parallel.wrapped import Recomputed3D

# torch's own modules without parameters that mix rows or columns: on a rank's block they would give other numbers.
_MIXING = (
    nn.Softmax,
    nn.LogSoftmax,
    nn.Softmax2d,
    nn.Softmin,
    nn.GLU,
    nn.Flatten,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.FeatureAlphaDropout,
)
_MIXING_FILES = (
    "batchnorm",
    "channelshuffle",
    "conv",
    "distance",
    "fold",
    "instancenorm",
    "loss",
    "normalization",
    "padding",
    "pixelshuffle",
    "pooling",
    "rnn",
    "upsampling",
)


def mixes(module: nn.Module) -> bool:
    """Whether this is one of torch's modules that cannot work on a block of rows and columns as it is."""
    home, _, file = type(module).__module__.rpartition(".")
    return isinstance(module, _MIXING) or (home == "torch.nn.modules" and file in _MIXING_FILES)


def is_torchs_layer(module: nn.Module) -> bool:
    """Whether code of torch's own uses the module's parameters: it cannot go on with what lies on a cube."""
    forward = next((each for each in type(module).__mro__ if "forward" in vars(each)), nn.Module)
    home, _, file = forward.__module__.rpartition(".")
    return home == "torch.nn.modules" and file not in ("container", "module", "transformer")


def is_on_cube(module: nn.Module) -> bool:
    """Whether it is a 3-D layer, code that is wrapped, or holds a parameter that lies on a cube."""
    is_3d = isinstance(vars(module).get("cube"), Cube) or isinstance(module, Recomputed3D)
    return is_3d or any(isinstance(each, DTensor) for each in module._parameters.values())


def advice(module: nn.Module) -> str:
    """Which kind suits a module of this type."""
    if is_on_cube(module):
        return (
            "It is on a cube already, and parallelize is for single-device models. Parallelize before you put 3-D "
            "layers in, or take it as it is: kinds.replace(lambda module, name, workshop: copy.deepcopy(module))"
        )
    replicated = (
        'Keep it replicated, with its gradient summed: kinds.replicated(("data", "x", "y", "z"), enters="z") where it '
        "makes hidden states from what every rank of a plane holds whole (patches of images)"
    )
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return (
            "Batch norm has no 3-D kind: its statistics run over the batch, of which x and data hold parts. "
            f"{replicated}, in training only where x and data are 1; or freeze its statistics with eval(), or use a "
            "layer norm"
        )
    if isinstance(module, nn.modules.conv._ConvNd):
        return f"A convolution has no 3-D kind. {replicated}"
    if isinstance(module, nn.MultiheadAttention):
        return "kinds.attention(rows) is for it"
    if isinstance(module, nn.Linear):
        return 'kinds.linear("z"), kinds.linear("y"), kinds.projection() or kinds.head(face) is for it'
    if isinstance(module, nn.Embedding):
        return "kinds.embedding() or, with few rows, kinds.table() is for it"
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or type(module).__name__.endswith("RMSNorm"):
        return "kinds.norm(face) is for it"
    return (
        'kinds.wrapped({"name": vector(face)}) is for elementwise code with parameters along the columns of a face, '
        f"kinds.replace(build) for a 3-D module of your own. {replicated}"
    )


def check_type(module: nn.Module, name: str, kind: object, types: tuple[type[nn.Module], ...]) -> None:
    """Raises ValueError unless `module` is of one of `types`, runs their code and holds their parameters alone."""
    check_code(module, name, kind, types)
    check_parameter_names(module, name, kind)


def check_code(module: nn.Module, name: str, kind: object, types: tuple[type[nn.Module], ...]) -> None:
    """Raises ValueError unless `module` is of one of `types` and runs their code."""
    wanted = " or ".join(f"nn.{each.__name__}" for each in types)
    if not isinstance(module, types):
        raise ValueError(f"{name!r} is a {type(module).__name__}, and {kind} takes {wanted}. {advice(module)}.")
    if not runs_code_of(module, types):
        raise ValueError(
            f"{name!r} is a {type(module).__name__}, whose forward is its own, and {kind} would replace it by that of "
            f"{wanted}. Say with kinds.replace(build) what takes its place."
        )


def runs_code_of(module: nn.Module, types: tuple[type[nn.Module], ...]) -> bool:
    """Whether its forward is that of one of `types`: no subclass has another, and none was set on the module."""
    return "forward" not in vars(module) and any(type(module).forward is each.forward for each in types)


def check_parameter_names(module: nn.Module, name: str, kind: object) -> None:
    """Raises ValueError unless `module` holds a weight, perhaps a bias, and no other parameter."""
    held = {parameter for parameter, _ in module.named_parameters(remove_duplicate=False)}
    if "weight" not in held or held - {"weight", "bias"}:
        raise ValueError(
            f"{kind} needs a weight, may take a bias, and no other parameter. {name!r} ({type(module).__name__}) holds "
            f"{', '.join(sorted(held)) or 'none'}. Remove its parametrization (a weight norm, adapters), or give it "
            "parameters (elementwise_affine=True); for anything else use kinds.replace(build)."
        )
