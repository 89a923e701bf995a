"""What a plan says of a module: its rule, and the rules for modules that keep their own code, or are replaced by one
that the user builds. Users get a rule from `rules`; those for torch's layers stand in `torch_layer_rules` and
`torch_attention`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar

from torch import nn

from tensor3d.distributed.cube_shape import AxisName, check_axes
from tensor3d.parallelize.module_copy import ModuleBuilder, copied, strip_params
from tensor3d.parallelize.wrapped_module import ReplicatedModule3D, on_cube
from tensor3d.sharding.activation_layout import Face, check_face
from tensor3d.sharding.param_layout import Layout


@dataclass(frozen=True, kw_only=True)
class ParallelRule(ABC):
    """How a module comes onto the cube. Rules are made by the functions of `tensor3d.parallelize.rules`."""

    covers_children: ClassVar[bool] = True
    """Whether the rule takes the modules inside along, so that the plan says nothing of them."""

    @abstractmethod
    def build(self, module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        """The module's counterpart on the workshop's cube; `module` stays as it is. `name` is for messages.

        Raises:
            ValueError: the rule does not fit the module, or its sizes do not divide.
        """

    def __str__(self) -> str:
        """Its name and what it was told, for messages."""
        said = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.default is MISSING or getattr(self, field.name) != field.default
        )
        return f"{type(self).__name__.lower()}({', '.join(said)})"


# --- Rules for a model's own code -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrapped(ParallelRule):
    """The module's own code, given this rank's block of each of its own parameters, e.g. `{"gamma": vector("z")}`.

    For elementwise code: a LayerScale, a learned gate. Modules inside have rules of their own.

    Blocks are given while the module's forward runs, and where a backward pass runs any of its code again.

    Code around it that reads such a parameter, or calls another method that does, gets the parameter as it lies on the
    cube, for which torch raises an error that speaks of DTensor: let it call the module, or name the module around it.
    """

    covers_children: ClassVar[bool] = False

    layouts: Mapping[str, Layout]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layouts", dict(self.layouts))

    def build(self, module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        check_forward(module, name, self)
        held = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if held.keys() != self.layouts.keys():
            raise ValueError(
                f"{name!r} ({type(module).__name__}) holds the parameters {sorted(held)}, and its plan names "
                f"{sorted(self.layouts)}. rules.wrapped needs a layout for each of its own parameters; those of "
                "modules inside have rules of their own."
            )
        for each, layout in self.layouts.items():
            self._check_even(f"{name}.{each}", held[each].shape, layout, workshop)
        code = workshop.copy(module, name)
        for each, parameter in held.items():
            code.register_parameter(each, workshop.parameter(parameter, self.layouts[each]))
        return on_cube(strip_params(code), self.layouts, workshop.cube)

    @staticmethod
    def _check_even(name: str, shape: tuple[int, ...], layout: Layout, workshop: ModuleBuilder) -> None:
        for axis, dim in layout.cut:
            size = workshop.cube.axis(axis).size
            if dim >= len(shape) or shape[dim] % size:
                raise ValueError(
                    f"{name!r} has shape {tuple(shape)}; its layout cuts dim {dim} over {axis}={size}, which must "
                    "divide it. Choose another layout or another cube."
                )


@dataclass(frozen=True)
class Replicated(ParallelRule):
    """The module's own code and whole parameters on every rank, with all that lies inside.

    Args:
        sum_over: axes over which the ranks' gradients are parts of one sum. All four where each rank uses a part of
            what it makes, as with `enters`; not those over which every rank has the whole gradient already.
        enters: its result, the (rows, columns) of a plane that each of its ranks has made, goes on as this rank's block
            on this face. A result of more dims has all but the last taken together, as (1, rows, columns).

    Batch norm inside has the statistics of what its rank sees: in training that is the batch only where x and data are
    1. Dropout inside draws other masks on each rank.
    """

    sum_over: tuple[AxisName, ...]
    enters: Face | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sum_over", tuple(self.sum_over))
        check_axes(self.sum_over)
        if self.enters is not None:
            check_face(self.enters)

    def build(self, module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        check_forward(module, name, self)
        whole = Layout(sum_over=self.sum_over)
        code = copied(module, workshop, lambda parameter: workshop.parameter(parameter, whole))
        layouts = {each: whole for each, _ in code.named_parameters(remove_duplicate=False)}
        return on_cube(strip_params(code), layouts, workshop.cube, self.enters)


@dataclass(frozen=True)
class Replace(ParallelRule):
    """What `build(module, name, workshop)` returns, for what none of the other rules does.

    `workshop.cube` is the cube, and `workshop.parameter(source, layout)` makes this rank's block of one of the
    original's parameters. Parts of the module may be built by rules: as in
    `rules.linear("z").build(module.q, name, workshop)`. Parameters under the original's names go back by
    `full_state_dict`, also where `workshop.parameter(source, layout, order)` has put their rows in another order.
    """

    maker: Callable[[nn.Module, str, ModuleBuilder], nn.Module]

    def build(self, module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        built = self.maker(module, name, workshop)
        if not isinstance(built, nn.Module):
            raise ValueError(f"what rules.replace builds for {name!r} must be an nn.Module. Got {built!r}.")
        if {id(each) for each in built.modules()} & {id(each) for each in module.modules()}:
            raise ValueError(
                f"what rules.replace builds for {name!r} holds a module of the original, which must stay as it is. "
                "Build a new one, with parameters by workshop.parameter(source, layout)."
            )
        for each in built.modules():
            orders = {own: workshop.order_of(p) for own, p in each._parameters.items() if p is not None}
            if not hasattr(each, "original_rows") and any(order is not None for order in orders.values()):
                vars(each)["original_rows"] = {own: order for own, order in orders.items() if order is not None}
        return built.train(module.training)


@dataclass(frozen=True)
class Keep(ParallelRule):
    """A module without parameters, copied as it is with all inside. Only needed where parallelize asks for a word."""

    def build(self, module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        held = [each for each, _ in module.named_parameters()]
        if held:
            raise ValueError(
                f"rules.keep() is for modules without parameters. {name!r} ({type(module).__name__}) holds "
                f"{', '.join(held)}. rules.replicated(sum_over) keeps a module whole with its parameters."
            )
        return copied(module, workshop, lambda parameter: None)


def check_forward(module: nn.Module, name: str, kind: ParallelRule) -> None:
    """Raises ValueError for a module without code of its own, whose parameters are used by another's."""
    if isinstance(module, ReplicatedModule3D):
        raise ValueError(
            f"{name!r} ({type(module).__name__}) is on a cube already, and {kind} would put it there again. Begin with "
            "the original."
        )
    if type(module).forward is nn.Module.forward:
        raise ValueError(
            f"{name!r} ({type(module).__name__}) has no forward of its own that {kind} could run. Name the module "
            "whose forward uses it, or put rules.replace(build) there."
        )
