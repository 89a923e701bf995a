"""`parallelize`: an existing model, weights included, on the cube."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from tensor3d.distributed.collectives import all_gather
from tensor3d.distributed.cube import Cube
from tensor3d.layers.dropout import check_dropout
from tensor3d.optim.clip_grad import check_parameters
from tensor3d.parallelize.module_copy import ModuleBuilder, clone_module_shell, take_hooks, untracked_modules
from tensor3d.parallelize.parallel_rule import ParallelRule
from tensor3d.parallelize.state_dict import guard_loads
from tensor3d.parallelize.torch_layer_rules import Dropout, advice, is_on_cube, is_torchs_layer, mixes, runs_code_of

# ----------------------------------------------------------------------------------------------------------------------
# Which module a plan gives which kind, and what is wrong with a plan. No rank finds anything else than another.


def assign(module: nn.Module, plan: Mapping[str, ParallelRule]) -> dict[int, ParallelRule]:
    """The kind of each module that the plan names, by the module's `id`.

    Patterns are names as of `named_modules`, in which `*` stands for any characters but a dot and `**` for any; `""` is
    the module itself.

    Raises:
        ValueError: no table of patterns and kinds; a pattern that matches nothing; a module that two kinds claim, by
            its name, by two of its names, or by a kind of what it is inside of; a module shared by two parents that the
            plan names in one place only; a module whose parameters, or whose mixing of rows or columns, no pattern
            takes care of; one that lies on a cube already; one that keeps others where they are not found; parameters
            without values.
    """
    if not isinstance(plan, Mapping) or not all(
        isinstance(p, str) and isinstance(k, ParallelRule) for p, k in plan.items()
    ):
        raise ValueError(f"a plan maps patterns of module names to kinds (tensor3d.parallelize.rules). Got {plan!r}.")
    _check_values(module)
    by_name = _match(module, plan)
    _check_inside(by_name)
    kinds = _by_module(module, by_name)
    covered = {id(each) for kind, owner in _owners(module, kinds) if kind.covers_children for each in owner.modules()}
    _check_left_over(module, kinds, covered)
    return kinds


def _check_values(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            raise ValueError(
                f"{name!r} has no values yet, and the cube's are cut from them. Run a lazy module once, or load the "
                "weights of one on the meta device, before parallelize."
            )


def _owners(module: nn.Module, kinds: dict[int, ParallelRule]) -> Iterator[tuple[ParallelRule, nn.Module]]:
    return ((kinds[id(each)], each) for each in module.modules() if id(each) in kinds)


def _match(module: nn.Module, plan: Mapping[str, ParallelRule]) -> dict[str, tuple[str, ParallelRule]]:
    """Pattern and kind of each name that one matches."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    found: dict[str, tuple[str, ParallelRule]] = {}
    for pattern, kind in plan.items():
        regular = re.compile(_regular(pattern), re.DOTALL)
        # No wildcard stands for the root, whose name is empty: it would take the whole model for one of its parts.
        matched = [name for name in names if regular.fullmatch(name) and bool(name) == bool(pattern)]
        if not matched:
            near = get_close_matches(pattern, names, n=3, cutoff=0.4)
            raise ValueError(
                f"the pattern {pattern!r} of the plan matches no module. Names are those of module.named_modules(); "
                f"near ones: {', '.join(map(repr, near)) or 'none'}."
            )
        for name in matched:
            before, claimed = found.setdefault(name, (pattern, kind))
            if claimed != kind:
                raise ValueError(
                    f"the module {name!r} is matched by two patterns of different kinds: {before!r} ({claimed}) and "
                    f"{pattern!r} ({kind}). Make one of them narrower."
                )
    return found


def _regular(pattern: str) -> str:
    parts = re.split(r"(\*\*|\*)", pattern)
    return "".join({"**": ".*", "*": "[^.]*"}.get(part, re.escape(part)) for part in parts)


def _check_inside(by_name: dict[str, tuple[str, ParallelRule]]) -> None:
    for name, (pattern, kind) in by_name.items():
        for outer in _above(name):
            if outer not in by_name:
                continue
            outer_pattern, outer_kind = by_name[outer]
            if outer_kind.covers_children and outer_kind != kind:
                raise ValueError(
                    f"the module {name!r} ({pattern!r}: {kind}) lies inside of {outer!r} ({outer_pattern!r}: "
                    f"{outer_kind}), which takes all inside it along. Take one of the two out of the plan."
                )


def _above(name: str) -> Iterator[str]:
    """Names of the modules that the one of this name lies in; the root's is empty."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _by_module(module: nn.Module, by_name: dict[str, tuple[str, ParallelRule]]) -> dict[int, ParallelRule]:
    kinds: dict[int, ParallelRule] = {}
    first: dict[int, tuple[str, ParallelRule | None]] = {}
    for name, each in module.named_modules(remove_duplicate=False):
        kind = _kind_at(name, by_name)
        before, seen = first.setdefault(id(each), (name, kind))
        if seen != kind:
            raise ValueError(
                f"one {type(each).__name__} is used as {before!r} and as {name!r}, and the plan gives it "
                f"{seen or 'no kind'} there and {kind or 'no kind'} here. Give both names the same kind, or make two "
                "modules of it (copy.deepcopy) before parallelize."
            )
        if name in by_name:
            kinds[id(each)] = by_name[name][1]
    return kinds


def _kind_at(name: str, by_name: dict[str, tuple[str, ParallelRule]]) -> ParallelRule | None:
    """The kind that takes care of a name: its own, or that of a module around it."""
    if name in by_name:
        return by_name[name][1]
    around = (by_name[outer][1] for outer in _above(name) if outer in by_name)
    return next((kind for kind in around if kind.covers_children), None)


def _check_left_over(module: nn.Module, kinds: dict[int, ParallelRule], covered: set[int]) -> None:
    owners = _owners(module, kinds)
    cared_for = {id(p) for kind, owner in owners for p in owner.parameters(recurse=kind.covers_children)}
    tree = {id(each) for each in module.modules()}
    open_points = []
    for name, each in module.named_modules():
        if id(each) in covered:
            continue
        if id(each) not in kinds:
            # The parameter of a forgotten head is cared for, where it is tied; its code is not.
            shares = set() if is_torchs_layer(each) or is_on_cube(each) else cared_for
            loose = [p for p, value in each._parameters.items() if value is not None and id(value) not in shares]
            if loose:
                open_points.append(f"{name!r} ({type(each).__name__}: {', '.join(loose)}). {advice(each)}.")
            elif mixes(each):
                open_points.append(
                    f"{name!r} ({type(each).__name__}, which mixes rows or columns). {advice(each)}; or rules.keep() "
                    "where it works on what no axis cuts."
                )
        open_points += untracked_modules(name, each, tree)
    if open_points:
        shown = "\n  ".join(open_points[:8])
        more = f"\n  and {len(open_points) - 8} more" if len(open_points) > 8 else ""
        raise ValueError(f"the plan does not say what becomes of these modules:\n  {shown}{more}")


# --- Whether all ranks were given the same model: what differs would be put together from pieces of several -----------

_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same(module: nn.Module, cube: Cube) -> None:
    """Raises ValueError, on every rank, where parameters or buffers differ from rank 0's in a bit.

    One all-gather of two numbers; the names are sent only where something differs.
    """
    everyone = cube.over("data", "x", "y", "z")
    if everyone.size == 1:
        return
    # What lies on a cube already is meant to differ.
    tensors = {
        name: tensor
        for name, tensor in chain(module.named_parameters(), module.named_buffers())
        if not isinstance(tensor, DTensor)
    }
    prints = torch.tensor([_fingerprint(tensor) for tensor in tensors.values()], dtype=torch.int64)
    # Multiplied by its place, so that two tensors that changed places are found.
    total = (prints * torch.arange(1, len(prints) + 1)).sum()
    found = _on_all_ranks([len(prints), int(total)], cube)
    strange = [rank for rank, numbers in enumerate(found) if not torch.equal(numbers, found[0])]
    if not strange:
        return
    which = ""
    if all(int(numbers[0]) == int(found[0][0]) for numbers in found):
        table = _on_all_ranks(prints.tolist(), cube)
        names = [name for place, name in enumerate(tensors) if any(row[place] != table[0][place] for row in table)]
        which = f", first in {names[0]}" if names else ""
    raise ValueError(
        f"all ranks must pass the same model to parallelize. Got other weights than rank 0's on ranks {strange}{which}."
        " Load them from one file, or make the model after torch.manual_seed with one seed (cube.manual_seed gives "
        "each rank a random stream of its own)."
    )


def _on_all_ranks(numbers: Iterable[int], cube: Cube) -> Tensor:
    """(ranks, n)"""
    own = torch.tensor([list(numbers)], dtype=torch.int64, device=cube.device)
    return all_gather(own, cube.over("data", "x", "y", "z")).wait().cpu()


def _fingerprint(tensor: Tensor) -> int:
    """The sum of its bits, read as whole numbers: the same in any order of summation."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    flat = flat.contiguous().view(_WIDTH[flat.element_size()])
    return int(flat.sum(dtype=torch.int64))


# --- `parallelize` ----------------------------------------------------------------------------------------------------


def parallelize(module: nn.Module, cube: Cube, plan: Mapping[str, ParallelRule]) -> nn.Module:
    """A copy of `module` on the cube, with its weights; the original stays as it was.

        plan = {"embed": rules.embedding(), "layers.*.up": rules.linear("z"), "layers.*.down": rules.linear("y"),
                "layers.*.norm": rules.norm("z"), "head": rules.projection()}
        model = parallelize(module, cube, plan)

    Modules that the plan names become 3-D ones; dropout becomes `Dropout3D` by itself; all others keep their own code,
    attributes, hooks and mode. Names of parameters are the original's, so state dicts and groups by name stay valid
    (`rules.attention` keeps its rows in another order: take values out with `full_state_dict`). Types are kept, frozen
    parameters stay frozen, tied ones tied; hooks of parameters get the gradients that are summed over the cube. Beside
    the original, memory is needed for this rank's blocks alone.

    Code that is kept runs on this rank's block, as (1, rows, columns) or (rows, columns): ids come in for the whole
    plane, `rules.embedding()` gives face z, each linear changes the face. It may do elementwise work, add up what lies
    on one face, call its modules. It may not reshape by its own sizes (heads, hidden), take softmax, means or norms of
    rows or columns, pick rows (`h[:, 0]`: `tensor3d.select`), multiply activations with each other, or take a loss over
    classes that are cut (`tensor3d.cross_entropy`): what does needs `rules.replace`. Attention in a forward of its own
    is for `rules.own_attention`, if it does the same to each head.
    Sizes often fit by chance and the numbers are wrong, so compare one loss with the original's. Random numbers of its
    own come from torch's generator, of which `cube.manual_seed` gives each rank a stream.

    Args:
        module: the single-device model; every rank has the same one. Its device may be another than the cube's.
        cube: where it goes. With dropout on several ranks, call `cube.manual_seed` first.
        plan: kinds by pattern of module names: `*` stands for any characters but a dot, `**` for any, `""` for the
            module itself.

    Raises:
        ValueError: a pattern that matches nothing, a module with two kinds or in two places with one, a module that no
            pattern takes care of, a kind that does not fit its module, sizes that do not divide, a hook of a parameter
            that has no counterpart, or weights that are not those of the other ranks (one small all-gather). On every
            rank alike.
    """
    assigned = assign(module, plan)
    check_same(module, cube)
    rebuild = _Rebuild(cube, assigned)
    model = rebuild.built(module, "")
    rebuild.fill_containers()
    for name, parameter in module.named_parameters():
        rebuild.workshop.take_hooks_of(name, parameter)
    check_parameters(model.parameters(), cube)
    return guard_loads(model)


class _Rebuild:
    """Walks down the original and makes its counterpart. A module that is met twice is made once."""

    def __init__(self, cube: Cube, kinds: dict[int, ParallelRule]) -> None:
        self.kinds = kinds
        self.workshop = ModuleBuilder(cube, self.container)
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
        made = clone_module_shell(module, self.workshop)
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
                        "what that one's rules.replace built does not use it. Build with "
                        "workshop.parameter(source, layout), or untie the two before parallelize."
                    )
