"""`parallelize`: an existing model, weights included, on the cube."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from tensor3d.clip import check_parameters
from tensor3d.cube import Cube
from tensor3d.layers.dropout import check_dropout
from tensor3d.parallel.advice import runs_code_of
from tensor3d.parallel.kind import Kind
from tensor3d.parallel.layer_kinds import Dropout
from tensor3d.parallel.plan import assign
from tensor3d.parallel.sameness import check_same
from tensor3d.parallel.state import guard_loads
from tensor3d.parallel.tree import shell, take_hooks
from tensor3d.parallel.workshop import Workshop


def parallelize(module: nn.Module, cube: Cube, plan: Mapping[str, Kind]) -> nn.Module:
    """A copy of `module` on the cube, with its weights; the original stays as it was.

        plan = {"embed": kinds.embedding(), "layers.*.up": kinds.linear("z"), "layers.*.down": kinds.linear("y"),
                "layers.*.norm": kinds.norm("z"), "head": kinds.projection()}
        model = parallelize(module, cube, plan)

    Modules that the plan names become 3-D ones; dropout becomes `Dropout3D` by itself; all others keep their own code,
    attributes, hooks and mode. Names of parameters are the original's, so state dicts and groups by name stay valid
    (`kinds.attention` keeps its rows in another order: take values out with `full_state_dict`). Types are kept, frozen
    parameters stay frozen, tied ones tied. Beside the original, memory is needed for this rank's blocks alone.

    Code that is kept runs on this rank's block, as (1, rows, columns) or (rows, columns): ids come in for the whole
    plane, `kinds.embedding()` gives face z, each linear changes the face. It may do elementwise work, add up what lies
    on one face, call its modules. It may not reshape by its own sizes (heads, hidden), take softmax, means or norms of
    rows or columns, pick rows (`h[:, 0]`: `tensor3d.select`), multiply activations with each other, or take a loss over
    classes that are cut (`tensor3d.cross_entropy`): what does, such as hand-written attention, needs `kinds.replace`.
    Sizes often fit by chance and the numbers are wrong, so compare one loss with the original's. Random numbers of its
    own come from torch's generator, of which `cube.manual_seed` gives each rank a stream.

    Args:
        module: the single-device model; every rank has the same one. Its device may be another than the cube's.
        cube: where it goes. With dropout on several ranks, call `cube.manual_seed` first.
        plan: kinds by pattern of module names: `*` stands for any characters but a dot, `**` for any, `""` for the
            module itself.

    Raises:
        ValueError: a pattern that matches nothing, a module with two kinds or in two places with one, a module that no
            pattern takes care of, a kind that does not fit its module, sizes that do not divide, or weights that are
            not those of the other ranks (one small all-gather). On every rank alike.
    """
    assigned = assign(module, plan)
    check_same(module, cube)
    rebuild = _Rebuild(cube, assigned)
    model = rebuild.built(module, "")
    rebuild.fill_containers()
    check_parameters(model.parameters(), cube)
    return guard_loads(model)


class _Rebuild:
    """Walks down the original and makes its counterpart. A module that is met twice is made once."""

    def __init__(self, cube: Cube, kinds: dict[int, Kind]) -> None:
        self.kinds = kinds
        self.workshop = Workshop(cube, self.container)
        self.made: dict[int, tuple[nn.Module, nn.Module]] = {}  # with the original, whose `id` is the key
        self.containers: list[tuple[str, nn.Module, nn.Module]] = []

    def built(self, module: nn.Module, name: str) -> nn.Module:
        if id(module) not in self.made:
            kind = self.kinds.get(id(module))
            if kind is None and isinstance(module, nn.Dropout) and runs_code_of(module, (nn.Dropout,)):
                kind = Dropout()
            elif kind is None and isinstance(module, _DropoutNd) and module.p < 1.0:
                check_dropout(module.p, self.workshop.cube)
            with self.workshop.at(name):
                if kind is None:
                    made = self.container(module, name)
                    self.containers.append((name, module, made))
                else:
                    made = take_hooks(module, kind.build(module, name, self.workshop))
            self.made[id(module)] = module, made
        return self.made[id(module)][1]

    def container(self, module: nn.Module, name: str) -> nn.Module:
        made = shell(module, self.workshop)
        for child_name, child in module._modules.items():
            inside = f"{name}.{child_name}" if name else child_name
            made._modules[child_name] = None if child is None else self.built(child, inside)
        return made

    def fill_containers(self) -> None:
        """Gives containers what they hold of parameters themselves: such as are tied to one of a module with a kind."""
        for place, module, made in self.containers:
            for name, parameter in module._parameters.items():
                made._parameters[name] = None if parameter is None else self.workshop.made_from(parameter)
                if parameter is not None and made._parameters[name] is None:
                    raise ValueError(
                        f"{name!r} of {place!r} ({type(module).__name__}) is a parameter of another module too, and "
                        "what that one's kinds.replace built does not use it. Build with "
                        "workshop.parameter(source, layout), or untie the two before parallelize."
                    )
