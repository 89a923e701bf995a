"""What one run of a module shows: facts, from which `propose_plan` draws its conclusions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from tensor3d.faces import Face
from tensor3d.parallel.functions import Objection

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
    do anything.
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
    return "norm" if type(module).__name__.endswith("RMSNorm") and shapes == {"weight": 1} else None


def is_within(name: str, module: str) -> bool:
    """Whether a module of this name lies inside the other one; all lie in the root, ""."""
    return name != module and (not module or name.startswith(f"{module}."))


def above(name: str) -> Iterator[str]:
    """The names of the modules that this one lies in, the nearest first, without the root."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


@dataclass(frozen=True, kw_only=True)
class Flow:
    """An activation: the number of its unknown face, and the linears it comes from by elementwise work alone."""

    face: int
    since: frozenset[str] = frozenset()
    given: bool = False  # an argument, and what elementwise work made of it
    whole: frozenset[str] = frozenset()  # foreign modules that made it: not cut yet, on any face


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a layer: the numbers of the faces that it reads (0 where it reads ids) and returns."""

    layer: str
    role: Role
    reads: int
    returns: int
    numel: int
    from_arguments: bool = False


@dataclass(kw_only=True)
class Reading:
    """What one run of a module showed. Layers and modules by name (of a shared one, the first)."""

    calls: list[Call] = field(default_factory=list)
    equal: list[tuple[int, int, str]] = field(default_factory=list)  # two faces, and where they meet
    pinned: list[tuple[int, Face, str]] = field(default_factory=list)
    notes: dict[str, dict[Objection, frozenset[str]]] = field(default_factory=dict)  # by module, with linears before
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
