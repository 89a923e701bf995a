"""What a torch function does to the rows and columns of an activation, as far as the cube minds.

Elementwise work may be left as it is: a rank does it on its own block. What takes rows or columns by their place, sums
over them or names their number sees only this rank's block, and is told here in words, with the remedy. So is what is
not known here to be elementwise.

The last dim of an activation is its columns, all others are rows.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tensor3d.parallelize.trials import embedding_scale, norm_formula
from tensor3d.sharding.activation_layout import Face

# --- The run of a module on an example: its tensors, and that nothing is left of it -----------------------------------

_CONTAINERS = (dict, list, set, OrderedDict, defaultdict)


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Attributes, plain lists and tables in them, what is registered, buffers and random generators come back."""
    parts = list(module.modules())
    attributes = [(part, dict(vars(part))) for part in parts]
    held = [value for part in parts for value in vars(part).values() if type(value) in _CONTAINERS]
    contents = [(each, copy.copy(each)) for each in held]
    values = [(buffer, buffer._version, buffer.detach().clone()) for buffer in module.buffers()]
    devices = sorted({parameter.device.index or 0 for parameter in module.parameters() if parameter.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for part, before in attributes:
            vars(part).clear()
            vars(part).update(before)
        for each, content in contents:
            _refill(each, content)
        with torch.no_grad():
            for buffer, version, value in values:
                if buffer._version != version:
                    buffer.copy_(value)


def _refill(container: Any, content: Any) -> None:
    """In place, as others may hold the container too."""
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def tensors_in(values: Any, label: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in arguments or results, each with where it stands."""
    if isinstance(values, Tensor):
        yield label, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from tensors_in(value, f"{label}.{key}" if label else str(key))
    elif isinstance(values, (tuple, list)):
        for place, value in enumerate(values):
            yield from tensors_in(value, f"{label}[{place}]" if label else f"[{place}]")


def hides_what_comes_later(mask: Tensor) -> bool:
    """Whether a mask (..., S, S), True or -inf where it hides, hides what comes later and does nothing else.

    One without memory tells nothing.
    """
    if mask.is_meta or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    hidden = mask if mask.dtype == torch.bool else mask == float("-inf")
    later = torch.ones_like(hidden, dtype=torch.bool).triu(1)
    adds = mask.dtype != torch.bool and bool(((mask != 0) & ~hidden).any())
    return bool((hidden == later).all()) and not adds


def mask_of_sdpa(mask: Tensor | None) -> Literal["nothing", "later", "other"]:
    """What a mask of `F.scaled_dot_product_attention` hides, which is True where it shows, or added to the scores."""
    if mask is None:
        return "nothing"
    if mask.is_meta:
        return "other"
    if mask.dtype == torch.bool:
        return "nothing" if bool(mask.all()) else "later" if hides_what_comes_later(~mask) else "other"
    return "nothing" if not bool(mask.any()) else "later" if hides_what_comes_later(mask) else "other"


# --- What a torch function does to the rows and columns of an activation ----------------------------------------------


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


PRODUCTS = _words("matmul bmm mm mv einsum baddbmm addmm addbmm tensordot inner linear bilinear")
ATTENTION = _words("scaled_dot_product_attention multi_head_attention_forward")
ELEMENTWISE = _words(
    # arithmetic, also by operators
    "add radd iadd sub subtract rsub isub mul multiply rmul imul div divide true_divide truediv rdiv rtruediv itruediv "
    "floor_divide floordiv rfloordiv ifloordiv remainder fmod mod rmod imod pow rpow ipow float_power square sqrt "
    "rsqrt reciprocal neg negative pos positive abs sign sgn signbit copysign lerp addcmul addcdiv hypot ldexp "
    "nextafter exp exp2 expm1 log log2 log10 log1p logaddexp logaddexp2 xlogy xlog1py logit expit sigmoid erf erfc "
    "erfinv sinc sin cos tan asin acos atan atan2 arcsin arccos arctan arctan2 sinh cosh tanh asinh acosh atanh "
    "arcsinh arccosh arctanh rad2deg deg2rad lgamma digamma ndtr ndtri log_ndtr i0 i1 floor ceil round trunc fix frac "
    "clamp clamp_min clamp_max clip maximum minimum fmax fmin max min nan_to_num heaviside "
    # activation functions
    "relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign tanhshrink hardshrink softshrink hardtanh "
    "hardsigmoid hardswish logsigmoid log_sigmoid threshold "
    # comparisons, logic
    "eq ne lt le gt ge not_equal less less_equal greater greater_equal isnan isinf isfinite isposinf isneginf isclose "
    "where masked_fill and or xor not invert iand ior ixor rand ror rxor logical_and logical_or logical_xor "
    "logical_not bitwise_and bitwise_or bitwise_xor bitwise_not lshift rshift "
    # copies and types
    "to type type_as float double half bfloat16 long int short char byte bool cpu cuda clone contiguous detach data "
    "requires_grad alias real imag conj angle zero fill copy zeros_like ones_like full_like empty_like"
)
_REDUCTIONS = _words(
    "mean sum var std var_mean std_mean prod median amax amin max min argmax argmin aminmax norm vector_norm logsumexp "
    "softmax log_softmax softmin normalize cumsum cumprod sort argsort topk any all quantile layer_norm rms_norm "
    "group_norm batch_norm instance_norm cosine_similarity count_nonzero cummax cummin logcumsumexp"
)
_PICKS = _words(
    "getitem select index_select gather narrow masked_select take take_along_dim flip fliplr flipud roll diagonal"
)
_CUTS = _words("chunk split split_with_sizes tensor_split unbind glu")
_JOINS = _words("cat concat concatenate stack hstack vstack repeat repeat_interleave tile pad")
RESHAPES = _words(
    "view reshape flatten ravel unflatten expand expand_as view_as reshape_as broadcast_to unfold squeeze unsqueeze"
)
_UNSIZED = _words("flatten ravel expand_as view_as reshape_as squeeze unsqueeze")  # reshapes that name no sizes
_MOVES = _words("transpose permute movedim moveaxis swapaxes swapdims t T mT H mH adjoint")
_WRITES = _words("setitem index_copy index_add index_fill scatter scatter_add index_put masked_scatter select_scatter")
VALUES = _words("item tolist numpy bool int float index complex equal allclose is_nonzero contains")
_RANDOM = _words(
    "dropout alpha_dropout dropout1d dropout2d dropout3d feature_dropout feature_alpha_dropout bernoulli normal "
    "uniform exponential multinomial rand_like randn_like randint_like rrelu gumbel_softmax"
)


@dataclass(frozen=True, kw_only=True)
class UnsupportedOp:
    """Why code may not stay as it is on a cube, with the remedy.

    `of_columns`: only because columns are cut; logits of a narrow head, whole in their columns, may pass.
    `firm`: also where the module's code is tried on parts of its heads, as of attention: no trial sees it.
    """

    text: str
    of_columns: bool = False
    firm: bool = False


def name_of(function: Callable[..., Any]) -> str:
    """`getitem` for Tensor.__getitem__, `add` for add_, `T` for the property."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", "")
    name = name.strip("_").removeprefix("special_").removeprefix("linalg_")
    return {"rmatmul": "matmul", "absolute": "abs"}.get(name, name)


def objection(
    name: str, x: Tensor, arguments: tuple[Any, ...], options: dict[str, Any], result: Any
) -> UnsupportedOp | None:
    """What speaks against leaving a call of the function `name` as it is; None where nothing does.

    Args:
        x: the activation, the first one among the arguments.
        arguments, options: of the call.
        result: what came out.
    """
    if name.endswith("_loss") or name in ("cross_entropy", "kl_div"):
        return UnsupportedOp(
            text=f"computes a loss ({name}) over rows of which a rank holds its own: leave it out of the module, "
            "make it by tensor3d.cross_entropy and all_reduce_replicated, and divide by the number of targets of the "
            "whole step",
            firm=True,
        )
    if name in _REDUCTIONS and not _between_two(name, arguments):
        return _reduction(name, x, arguments, options)
    if name in _PICKS:
        return _pick(name, x, arguments, options)
    if name in _CUTS or name in _JOINS:
        return _cut_or_joined(name, _dim(name, x, arguments, options) == x.dim() - 1)
    if name in RESHAPES:
        return _reshape(name, x, arguments[1:], result)
    if name in _WRITES:
        return UnsupportedOp(text=f"writes at places ({name}), of which a rank holds only its share")
    if name in _RANDOM and not _drops_nothing(name, arguments, options):
        return UnsupportedOp(
            text=f"draws random numbers ({name}) without minding which rows and columns a rank holds: an nn.Dropout "
            "does, as it becomes a Dropout3D",
            firm=True,
        )
    if (not isinstance(result, Tensor) and name in VALUES) or (name == "where" and len(arguments) == 1):
        return UnsupportedOp(text=f"decides by values ({name}), which differ from rank to rank", firm=True)
    return _moved_or_unknown(name, x, result)


def _drops_nothing(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether it is dropout with a probability of 0."""
    return "dropout" in name and options.get("p", arguments[1] if len(arguments) > 1 else None) == 0


def _moved_or_unknown(name: str, x: Tensor, result: Any) -> UnsupportedOp | None:
    if name in _MOVES and isinstance(result, Tensor):
        if (result.shape[-1:], result.stride()[-1:]) == (x.shape[-1:], x.stride()[-1:]):
            return None
        return UnsupportedOp(text=f"turns columns into rows ({name}), which are cut over other axes")
    makes_tensors = any(True for _ in tensors_in(result))
    if not makes_tensors or name in ELEMENTWISE | PRODUCTS | ATTENTION | _RANDOM:
        return None
    return UnsupportedOp(text=f"does what propose_plan cannot follow ({name}): compare with the original", firm=True)


def _between_two(name: str, arguments: tuple[Any, ...]) -> bool:
    return name in ("max", "min") and len(arguments) > 1 and isinstance(arguments[1], Tensor)


def _dim(name: str, x: Tensor, arguments: tuple[Any, ...], options: dict[str, Any]) -> int | None:
    """The dim a function works along; None: all of them, or one that cannot be told."""
    place = {"chunk": 2, "split": 2, "tensor_split": 2, "norm": 2, "vector_norm": 2, "normalize": 2, "topk": 2}.get(
        name, 1
    )
    default = {"normalize": 1, "glu": -1, "sort": -1, "topk": -1, "argsort": -1}.get(
        name, 0 if name in _CUTS | _JOINS else None
    )
    value = options.get("dim", options.get("axis", arguments[place] if len(arguments) > place else default))
    if isinstance(value, (tuple, list)) and len(value) == 1:
        (value,) = value
    return value % x.dim() if isinstance(value, int) and not isinstance(value, bool) and x.dim() else None


def _reduction(name: str, x: Tensor, arguments: tuple[Any, ...], options: dict[str, Any]) -> UnsupportedOp:
    norm = name in ("layer_norm", "rms_norm")
    if norm or x.dim() == 1 or _dim(name, x, arguments, options) == x.dim() - 1:
        remedy = (
            "LayerNorm3D and RMSNorm3D are for norms"
            if norm
            else "sum over the axis that cuts them by all_reduce_replicated"
        )
        return UnsupportedOp(
            text=f"reduces over columns ({name}), of which a rank holds a share: {remedy}", of_columns=True
        )
    return UnsupportedOp(
        text=f"reduces over rows ({name}), of which a rank holds a share: collect few rows by `select`, or sum with "
        "all_reduce_replicated and divide by the number of the whole step"
    )


def _cut_or_joined(name: str, columns: bool) -> UnsupportedOp:
    if not columns and name != "glu":
        verb = "joins" if name in _JOINS else "cuts"
        return UnsupportedOp(
            text=f"{verb} rows ({name}), of which a rank holds only its share: see `select` and `local_block`"
        )
    if name in _JOINS:
        text = f"joins columns ({name}), of which a rank holds a share of each: add up two products instead"
    else:
        text = (
            f"cuts columns apart ({name}), of which a rank holds a share: order the rows of the linear before it so "
            "that a cut takes all parts alike, as GatedMLP3D and Attention3D do, or use two linears"
        )
    return UnsupportedOp(text=text, of_columns=True)


def _pick(name: str, x: Tensor, arguments: tuple[Any, ...], options: dict[str, Any]) -> UnsupportedOp | None:
    if name == "getitem":
        index = arguments[1] if isinstance(arguments[1], tuple) else (arguments[1],)
        dims = _indexed_dims(index, x.dim())
        shown = f"[{', '.join(map(_spelled, index))}]"
    else:
        dim = _dim(name, x, arguments, options)
        dims, shown = [0 if dim is None else dim], name
    if any(dim < x.dim() - 1 for dim in dims):
        text = f"takes rows by their place ({shown}), of which a rank holds its share: `tensor3d.select` takes them"
        return UnsupportedOp(text=text)
    if dims:
        return UnsupportedOp(
            text=f"takes columns by their place ({shown}), of which a rank holds a share", of_columns=True
        )
    return None


def _indexed_dims(index: tuple[Any, ...], dims: int) -> list[int]:
    """The dims of which an index leaves something out."""
    taken = sum(
        1 if not isinstance(part, Tensor) or part.dtype != torch.bool else part.dim() for part in index if _takes(part)
    )
    found, dim = [], 0
    for part in index:
        if part is Ellipsis:
            dim += dims - taken
        elif _takes(part):
            if not (isinstance(part, slice) and _is_whole(part)):
                found.append(dim)
            dim += part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1
    return found


def _is_whole(part: slice) -> bool:
    return part.start in (None, 0) and part.stop is None and part.step in (None, 1)


def _takes(part: Any) -> bool:
    return part is not None and part is not Ellipsis


def _spelled(part: Any) -> str:
    if isinstance(part, slice):
        text = ":".join("" if bound is None else str(bound) for bound in (part.start, part.stop))
        return text if part.step is None else f"{text}:{part.step}"
    return "..." if part is Ellipsis else "rows" if isinstance(part, Tensor) else str(part)


def _reshape(name: str, x: Tensor, sizes: Any, result: Any) -> UnsupportedOp | None:
    if not isinstance(result, Tensor) or (result.shape == x.shape and not _has_numbers(sizes)):
        return None
    if result.shape[-1:] != x.shape[-1:]:
        shape = tuple(result.shape)
        return UnsupportedOp(text=f"gives columns another shape ({name} to {shape}), of which a rank holds a share")
    if name in _UNSIZED:
        return None
    return UnsupportedOp(
        text=f"names sizes ({name} to {tuple(result.shape)}): right on a cube only where they are read off the "
        "tensor's own shape, as a rank holds fewer rows and columns",
    )


def _has_numbers(sizes: Any) -> bool:
    """Whether there is a size that was not read off a tensor, and is none on every rank, as 1 and -1 are."""
    if isinstance(sizes, (tuple, list)):
        return any(map(_has_numbers, sizes))
    return type(sizes) is int and sizes > 1


# --- What one run of a module shows: facts, from which `propose_plan` draws its conclusions ---------------------------

Role = Literal["linear", "embedding", "norm", "attention", "dropout", "foreign"]

FOREIGN = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.Bilinear,
    nn.EmbeddingBag,
    nn.PReLU,
)


def role_of(module: nn.Module) -> Role | None:
    """What a module is taken for as a whole; None for one whose own forward is followed.

    A class of one's own that only inherits from torch's is followed, and so is a forward set on the module: they may
    do anything. But what proves a norm or a scaled embedding when it is tried on numbers is taken for one.
    """
    if isinstance(module, FOREIGN):
        return "foreign"
    if "forward" in vars(module):
        return None
    shapes = {name: parameter.dim() for name, parameter in module.named_parameters(remove_duplicate=False)}
    plain = "weight" in shapes and shapes.keys() <= {"weight", "bias"}
    roles: tuple[tuple[Role, type[nn.Module], bool], ...] = (
        ("linear", nn.Linear, plain),
        ("embedding", nn.Embedding, plain),
        ("norm", nn.LayerNorm, plain and shapes["weight"] == 1),
        ("norm", nn.RMSNorm, plain and shapes["weight"] == 1),
        ("attention", nn.MultiheadAttention, True),
        ("dropout", nn.Dropout, True),
    )
    for role, base, fits in roles:
        if isinstance(module, base) and type(module).forward is base.forward and fits:
            return role
    if isinstance(module, nn.Embedding) and plain:
        return None if embedding_scale(module) is None else "embedding"
    return None if norm_formula(module) is None else "norm"


def is_within(name: str, module: str) -> bool:
    """Whether a module of this name lies inside the other one; all lie in the root, ""."""
    return name != module and (not module or name.startswith(f"{module}."))


def above(name: str) -> Iterator[str]:
    """The names of the modules that this one lies in, the nearest first, without the root."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


@dataclass(frozen=True, kw_only=True)
class TensorTrace:
    """An activation: the number of its unknown face, and the linears it comes from by elementwise work alone."""

    face: int
    since: frozenset[str] = frozenset()
    given: bool = False  # an argument, and what elementwise work made of it
    whole: frozenset[str] = frozenset()  # foreign modules that made it: not cut yet, on any face


@dataclass(frozen=True, kw_only=True)
class TracedCall:
    """One call of a layer: the numbers of the faces that it reads (0 where it reads ids) and returns."""

    layer: str
    role: Role
    reads: int
    returns: int
    numel: int
    columns: int = 0  # of what it reads
    from_arguments: bool = False


@dataclass(kw_only=True)
class TraceResult:
    """What one run of a module showed. Layers and modules by name (of a shared one, the first)."""

    roles: dict[str, Role] = field(default_factory=dict)  # of known layers, also of those that never ran
    calls: list[TracedCall] = field(default_factory=list)
    equal: list[tuple[int, int, str]] = field(default_factory=list)  # two faces, and where they meet
    pinned: list[tuple[int, Face, str]] = field(default_factory=list)
    notes: dict[str, dict[UnsupportedOp, frozenset[str]]] = field(
        default_factory=dict
    )  # by module, with linears before
    attending: dict[str, list[str]] = field(default_factory=dict)  # module that does attention: what by
    unfit: set[str] = field(default_factory=set)  # nn.MultiheadAttention that attends to something else than its input
    causal: set[str] = field(default_factory=set)  # nn.MultiheadAttention that is called with a causal mask
    vectors: dict[tuple[str, str], set[int]] = field(default_factory=dict)  # parameter: the faces it is met on
    ran: set[str] = field(default_factory=set)  # modules that were called
    read_on: set[str] = field(default_factory=set)  # linears whose output another layer reads
    after: dict[str, dict[tuple[str, str], None]] = field(default_factory=dict)  # foreign: place, function that follow
    enters: dict[str, tuple[str, int]] = field(default_factory=dict)  # and where its result is first needed on a face
    inputs: list[tuple[str, int]] = field(default_factory=list)
    outputs: list[tuple[str, int, frozenset[str]]] = field(default_factory=list)
    widths: set[int] = field(default_factory=set)  # of inputs: columns
    numbers: int = 0  # of unknown faces; 0 itself stands for face z
