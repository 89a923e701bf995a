"""Rules for torch's own layers, one each: a layer of the library with the original's weights under the same names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tensor3d.distributed.cube import Cube
from tensor3d.layers.dropout import Dropout3D
from tensor3d.layers.embedding import Embedding3D, LookupEmbedding3D
from tensor3d.layers.heads import SmallHead3D
from tensor3d.layers.linear import Linear3D, Projection3D
from tensor3d.layers.norm import LayerNorm3D, RMSNorm3D
from tensor3d.parallelize.module_copy import ModuleBuilder
from tensor3d.parallelize.parallel_rule import ParallelRule
from tensor3d.parallelize.trials import NormFormula, embedding_scale, norm_formula
from tensor3d.parallelize.wrapped_module import ReplicatedModule3D
from tensor3d.sharding.activation_layout import Face, check_face, in_batch, lies, other
from tensor3d.sharding.param_layout import Layout, copies, matrix, narrow, table, vector
from tensor3d.sharding.redistribute import local_rows, redistribute

# --- What to do with a module that the plan does not place, in words, and the check that a rule fits its module -------

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
    is_3d = isinstance(vars(module).get("cube"), Cube) or isinstance(module, ReplicatedModule3D)
    return is_3d or any(isinstance(each, DTensor) for each in module._parameters.values())


def advice(module: nn.Module) -> str:
    """Which kind suits a module of this type."""
    if is_on_cube(module):
        return (
            "It is on a cube already, and parallelize is for single-device models. Parallelize before you put 3-D "
            "layers in, or take it as it is: rules.replace(lambda module, name, workshop: copy.deepcopy(module))"
        )
    replicated = (
        'Keep it replicated, with its gradient summed: rules.replicated(("data", "x", "y", "z"), enters="z") where it '
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
        return "rules.attention(rows) is for it"
    if isinstance(module, nn.Linear):
        return 'rules.linear("z"), rules.linear("y"), rules.projection() or rules.head(face) is for it'
    if isinstance(module, nn.Embedding):
        return "rules.embedding() or, with few rows, rules.table() is for it"
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or type(module).__name__.endswith("RMSNorm"):
        return "rules.norm(face) is for it"
    if not has_forward(module):
        return (
            "It has no forward that rules.wrapped could run: hold the parameters in the module whose forward uses them "
            "or say with rules.replace(build) what takes that module's place"
        )
    return (
        'rules.wrapped({"name": vector(face)}) is for elementwise code with parameters along the columns of a face, '
        f"rules.replace(build) for a 3-D module of your own. {replicated}"
    )


def has_forward(module: nn.Module) -> bool:
    """No nn.ParameterList has, nor an nn.ModuleList: another module's code uses what they hold."""
    return type(module).forward is not nn.Module.forward


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
            f"{wanted}. Say with rules.replace(build) what takes its place."
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
            "parameters (elementwise_affine=True); for anything else use rules.replace(build)."
        )


# --- Kinds for torch's own layers, one each ---------------------------------------------------------------------------


@dataclass(frozen=True)
class OnFace(ParallelRule):
    """A kind that is told which face its module reads."""

    face: Face

    def __post_init__(self) -> None:
        check_face(self.face)


@dataclass(frozen=True)
class Linear(OnFace):
    """nn.Linear as a `Linear3D` that reads `face`. `turn`: its input arrives on the other face and is turned first."""

    turn: bool = False

    def build(self, module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        check_type(module, name, self, (nn.Linear,))
        assert isinstance(module, nn.Linear)
        make = TurnedLinear3D if self.turn else Linear3D
        with workshop.cube.skip_init():
            layer = make(module.in_features, module.out_features, workshop.cube, self.face, module.bias is not None)
        return filled(layer, module, workshop, matrix(self.face), vector(other(self.face)))


@dataclass(frozen=True)
class Projection(ParallelRule):
    """nn.Linear to a vocabulary as a `Projection3D`, face z to face y: odd sizes, its own weight or an embedding's.

    `turn`: its input arrives on face y and is turned first.
    """

    turn: bool = False

    def build(self, module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        check_type(module, name, self, (nn.Linear,))
        assert isinstance(module, nn.Linear)
        make = TurnedProjection3D if self.turn else Projection3D
        weight = workshop.parameter(module.weight, matrix("z"))
        with workshop.cube.skip_init():
            layer = make(module.in_features, module.out_features, workshop.cube, module.bias is not None, weight=weight)
        return filled(layer, module, workshop, matrix("z"), vector("y"))


@dataclass(frozen=True)
class Head(OnFace):
    """nn.Linear with a handful of outputs as a `SmallHead3D`; computed in fp32 at least."""

    def build(self, module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        check_type(module, name, self, (nn.Linear,))
        assert isinstance(module, nn.Linear)
        with workshop.cube.skip_init():
            layer = SmallHead3D(
                module.in_features, module.out_features, workshop.cube, self.face, module.bias is not None
            )
        return filled(layer, module, workshop, narrow(self.face), copies(self.face))


@dataclass(frozen=True)
class Norm(OnFace):
    """A norm over the columns of `face`: nn.LayerNorm, nn.RMSNorm, and modules of others that compute what these do.

    Those are tried on numbers: x / sqrt(mean(x^2) + eps), of x or of x less its mean, times weight, or 1 + weight, or
    nothing, and with a mean perhaps plus a bias. `columns`: of one that has no weight and does not say them itself.
    """

    columns: int | None = None

    def build(self, module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        formula, bias = self._formula(module, name), getattr(module, "bias", None)
        columns = formula.columns or self.columns
        if columns is None or columns != (self.columns or columns):
            raise ValueError(
                f"{self} needs the columns that {name!r} ({type(module).__name__}) normalises over, which that "
                f"{'does not say' if columns is None else f'says to be {formula.columns}'}. Say "
                f'rules.norm("{self.face}", columns={formula.columns or "H"}).'
            )
        make = partial(LayerNorm3D, bias=bias is not None) if formula.centered else RMSNorm3D
        with workshop.cube.skip_init():
            layer = make(
                columns,
                workshop.cube,
                self.face,
                eps=formula.eps,
                zero_centered=formula.gain == "1 + weight",
                elementwise_affine=formula.gain != "none",
            )
        if formula.gain == "none":
            return with_settings(layer, module).train(module.training)
        return filled(layer, module, workshop, vector(self.face), vector(self.face))

    def _formula(self, module: nn.Module, name: str) -> NormFormula:
        """What the module computes: of torch's own code that is known.

        Raises:
            ValueError: it is no norm over columns.
        """
        types = (nn.LayerNorm, nn.RMSNorm)
        weight = getattr(module, "weight", None)
        if isinstance(module, types) and runs_code_of(module, types) and isinstance(weight, Tensor):
            check_parameter_names(module, name, self)
            if weight.dim() != 1:
                shape = tuple(weight.shape)
                raise ValueError(
                    f"{self} normalises over columns, with a weight of one dim. {name!r} has one of {shape}."
                )
            eps = module.eps  # without one, torch takes that of its arithmetic
            eps = torch.finfo(torch.promote_types(weight.dtype, torch.float32)).eps if eps is None else eps
            return NormFormula(centered=isinstance(module, nn.LayerNorm), gain="weight", eps=eps, columns=len(weight))
        found = norm_formula(module)
        if found is None:
            foreign = mixes(module) or not isinstance(weight, Tensor) or weight.dim() != 1
            if isinstance(module, types) or foreign or "forward" in vars(module):
                check_type(module, name, self, types)
            check_parameter_names(module, name, self)
            raise ValueError(
                f"{name!r} ({type(module).__name__}) computes something else than x / sqrt(mean(x^2) + eps), of x or "
                "of x less its mean, times weight or 1 + weight: tried on numbers, it is no norm that a cube has. Say "
                "with rules.replace(build) what takes its place."
            )
        return found


@dataclass(frozen=True)
class Embedding(ParallelRule):
    """nn.Embedding as an `Embedding3D`. The row of `padding_idx` gets no gradient from lookups, as in torch.

    A class of one's own may multiply the rows by a number behind that: it is tried on ids.
    """

    def build(self, module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        return embedding(self, module, name, workshop, _EMBEDDINGS, matrix("z"))


@dataclass(frozen=True)
class Table(ParallelRule):
    """nn.Embedding with few rows (positions, token types) as a `LookupEmbedding3D`."""

    def build(self, module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        return embedding(self, module, name, workshop, _TABLES, table("z"))


@dataclass(frozen=True)
class Dropout(ParallelRule):
    """nn.Dropout as `Dropout3D`; also what becomes of one that no pattern names."""

    def build(self, module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        check_code(module, name, self, (nn.Dropout,))
        assert isinstance(module, nn.Dropout)
        # Where all is dropped there is no mask to draw.
        layer = Dropout3D(module.p if module.p < 1.0 else 0.0, workshop.cube)
        layer.p = module.p
        return with_settings(layer, module).train(module.training)


def filled(
    layer: nn.Module, module: nn.Module, workshop: ModuleBuilder, weight: Layout, bias: Layout | None = None
) -> nn.Module:
    """`layer` with the weights, the settings and the mode of the original."""
    layer.weight = workshop.parameter(module.get_parameter("weight"), weight)
    if bias is not None and getattr(module, "bias", None) is not None:
        layer.bias = workshop.parameter(module.get_parameter("bias"), bias)
    return with_settings(layer, module).train(module.training)


def with_settings(layer: nn.Module, module: nn.Module) -> nn.Module:
    """`layer` with the plain values that code around it may ask the original for: `embedding_dim`, `padding_idx`."""
    for name, value in vars(module).items():
        values = value if isinstance(value, tuple) else (value,)
        plain = all(each is None or isinstance(each, bool | int | float | str) for each in values)
        if plain and not name.startswith("_") and not hasattr(layer, name):
            setattr(layer, name, value)
    return layer


def embedding(
    rule: ParallelRule,
    module: nn.Module,
    name: str,
    workshop: ModuleBuilder,
    makers: tuple[Callable[..., nn.Module], ...],
    layout: Layout,
) -> nn.Module:
    """The layer for an nn.Embedding, of the `makers` for one without and with a row for padding, each unscaled, scaled.

    Raises:
        ValueError: another module, or an option that the 3-D ones do not have.
    """
    scale: float | None = None
    if isinstance(module, nn.Embedding) and not runs_code_of(module, (nn.Embedding,)):
        scale = embedding_scale(module)
        check_parameter_names(module, name, rule)
    if scale is None:
        check_type(module, name, rule, (nn.Embedding,))
    assert isinstance(module, nn.Embedding)
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise ValueError(
                f"an embedding on a cube has no {option}. Got {option}={getattr(module, option)} at {name!r}. Make the "
                "original without it."
            )
    rows, hidden, padding, cube = *module.weight.shape, module.padding_idx, workshop.cube
    make = makers[2 * (padding is not None) + (scale is not None)]
    with cube.skip_init():
        layer = make(rows, hidden, cube, *(each for each in (scale, padding) if each is not None))
    saved = module.state_dict()
    for each, buffer in module.named_buffers():
        layer.register_buffer(each, workshop.buffer(buffer), persistent=each in saved)
    return filled(layer, module, workshop, layout)


class TurnedLinear3D(Linear3D):
    """A `Linear3D` whose input arrives on the other face than its product reads, and is turned first."""

    @property
    def reads(self) -> Face:
        """The face of the input, before it is turned."""
        return other(self.face)

    def extra_repr(self) -> str:
        return f"turned from {lies(self.in_features, self.reads, self.cube)}, {super().extra_repr()}"

    def forward(self, x: Tensor) -> Tensor:
        """(M/xz, K/y) on face y to the same face, (M/xz, N/y), where `face` is z; y and z swapped for face y."""
        if x.dim() == 3:
            return in_batch(self.forward, x, "Linear3D")
        return super().forward(redistribute(x, self.cube, to=self.face))


class TurnedProjection3D(Projection3D):
    """A `Projection3D` whose input arrives on face y, and is turned first."""

    @property
    def reads(self) -> Face:
        """The face of the input, before it is turned."""
        return "y"

    def extra_repr(self) -> str:
        return f"turned from {lies(self.hidden, self.reads, self.cube)}, {super().extra_repr()}"

    def forward(self, x: Tensor, weight: nn.Parameter | None = None) -> Tensor:
        """(R/xz, H/y) on face y, to (R/xz, V/y) on the same."""
        if x.dim() == 3:
            return in_batch(lambda rows: self.forward(rows, weight), x, "Projection3D")
        return super().forward(redistribute(x, self.cube, to="z"), weight)


class _WithPadding:
    """One row of an embedding gets no gradient from lookups, as nn.Embedding's `padding_idx`."""

    cube: Cube

    def __init__(self, rows: int, hidden: int, cube: Cube, padding_idx: int) -> None:
        super().__init__(rows, hidden, cube)  # type: ignore[call-arg]
        self.padding_idx = padding_idx

    def forward(self, ids: Tensor, **vouched: Any) -> Tensor:
        """As of the embedding without padding."""
        if ids.dim() == 2:
            return in_batch(partial(self.forward, **vouched), ids, type(self).__name__)
        found: Tensor = super().forward(ids, **vouched)  # type: ignore[misc]
        padding = local_rows(ids, self.cube, "z") == self.padding_idx
        return torch.where(padding.unsqueeze(-1), found.detach(), found)  # on face z

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, padding_idx={self.padding_idx}"  # type: ignore[misc]


class PaddedEmbedding3D(_WithPadding, Embedding3D):
    """An `Embedding3D` with a row for padding."""


class PaddedTableEmbedding3D(_WithPadding, LookupEmbedding3D):  # type: ignore[misc]
    """A `LookupEmbedding3D` with a row for padding."""


class _WithScale:
    """An embedding whose rows are multiplied by a number behind the table, as Gemma's by the root of their width."""

    def __init__(self, rows: int, hidden: int, cube: Cube, scale: float, *padding: int) -> None:
        super().__init__(rows, hidden, cube, *padding)  # type: ignore[call-arg]
        self.scale = scale

    def forward(self, ids: Tensor, **vouched: Any) -> Tensor:
        """As of the embedding without a scale."""
        if ids.dim() == 2:
            return in_batch(partial(self.forward, **vouched), ids, type(self).__name__)
        found: Tensor = super().forward(ids, **vouched)  # type: ignore[misc]
        return found * self.scale

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale:g}"  # type: ignore[misc]


class ScaledEmbedding3D(_WithScale, Embedding3D):
    """An `Embedding3D` with a scale."""


class ScaledPaddedEmbedding3D(_WithScale, PaddedEmbedding3D):
    """One with a scale and a row for padding."""


class ScaledTableEmbedding3D(_WithScale, LookupEmbedding3D):  # type: ignore[misc]
    """A `LookupEmbedding3D` with a scale."""


class ScaledPaddedTableEmbedding3D(_WithScale, PaddedTableEmbedding3D):  # type: ignore[misc]
    """One with a scale and a row for padding."""


# Without and with a row for padding, each unscaled and scaled.
_EMBEDDINGS = (Embedding3D, ScaledEmbedding3D, PaddedEmbedding3D, ScaledPaddedEmbedding3D)
_TABLES = (LookupEmbedding3D, ScaledTableEmbedding3D, PaddedTableEmbedding3D, ScaledPaddedTableEmbedding3D)
