"""What to do with a module that the plan does not place, in words, and the check that a kind fits its module."""

from __future__ import annotations

from torch import nn

# torch's own modules without parameters that mix rows or columns: on a rank's block they would give other numbers.
_MIXING = (
    nn.Softmax,
    nn.LogSoftmax,
    nn.Softmax2d,
    nn.GLU,
    nn.Flatten,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
)
_MIXING_FILES = ("batchnorm", "conv", "fold", "instancenorm", "loss", "normalization", "padding", "pooling", "rnn")


def mixes(module: nn.Module) -> bool:
    """Whether this is one of torch's modules that cannot work on a block of rows and columns as it is."""
    home, _, file = type(module).__module__.rpartition(".")
    return isinstance(module, _MIXING) or (home == "torch.nn.modules" and file in _MIXING_FILES)


def advice(module: nn.Module) -> str:
    """Which kind suits a module of this type."""
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
    wanted = " or ".join(f"nn.{each.__name__}" for each in types)
    if not isinstance(module, types):
        raise ValueError(f"{name!r} is a {type(module).__name__}, and {kind} takes {wanted}. {advice(module)}.")
    if not any(type(module).forward is each.forward for each in types):
        raise ValueError(
            f"{name!r} is a {type(module).__name__}, whose forward is its own, and {kind} would replace it by that of "
            f"{wanted}. Say with kinds.replace(build) what takes its place."
        )
    check_parameter_names(module, name, kind)


def check_parameter_names(module: nn.Module, name: str, kind: object) -> None:
    """Raises ValueError unless `module` holds a weight, perhaps a bias, and no other parameter."""
    held = {parameter for parameter, _ in module.named_parameters(remove_duplicate=False)}
    if "weight" not in held or held - {"weight", "bias"}:
        raise ValueError(
            f"{kind} needs a weight, may take a bias, and no other parameter. {name!r} ({type(module).__name__}) holds "
            f"{', '.join(sorted(held)) or 'none'}. Remove its parametrization (a weight norm, adapters), or give it "
            "parameters (elementwise_affine=True); for anything else use kinds.replace(build)."
        )
