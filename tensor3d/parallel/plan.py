"""Which module a plan gives which kind, and what is wrong with a plan. No rank finds anything else than another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from torch import nn
from torch.nn.parameter import is_lazy

from tensor3d.parallel.advice import advice, is_on_cube, is_torchs_layer, mixes
from tensor3d.parallel.kind import Kind
from tensor3d.parallel.tree import hidden_parts


def assign(module: nn.Module, plan: Mapping[str, Kind]) -> dict[int, Kind]:
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
    if not isinstance(plan, Mapping) or not all(isinstance(p, str) and isinstance(k, Kind) for p, k in plan.items()):
        raise ValueError(f"a plan maps patterns of module names to kinds (tensor3d.parallel.kinds). Got {plan!r}.")
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


def _owners(module: nn.Module, kinds: dict[int, Kind]) -> Iterator[tuple[Kind, nn.Module]]:
    return ((kinds[id(each)], each) for each in module.modules() if id(each) in kinds)


def _match(module: nn.Module, plan: Mapping[str, Kind]) -> dict[str, tuple[str, Kind]]:
    """Pattern and kind of each name that one matches."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    found: dict[str, tuple[str, Kind]] = {}
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


def _check_inside(by_name: dict[str, tuple[str, Kind]]) -> None:
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


def _by_module(module: nn.Module, by_name: dict[str, tuple[str, Kind]]) -> dict[int, Kind]:
    kinds: dict[int, Kind] = {}
    first: dict[int, tuple[str, Kind | None]] = {}
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


def _kind_at(name: str, by_name: dict[str, tuple[str, Kind]]) -> Kind | None:
    """The kind that takes care of a name: its own, or that of a module around it."""
    if name in by_name:
        return by_name[name][1]
    around = (by_name[outer][1] for outer in _above(name) if outer in by_name)
    return next((kind for kind in around if kind.covers_children), None)


def _check_left_over(module: nn.Module, kinds: dict[int, Kind], covered: set[int]) -> None:
    cared_for = {id(p) for _, owner in _owners(module, kinds) for p in _parameters_of(owner, kinds[id(owner)])}
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
                    f"{name!r} ({type(each).__name__}, which mixes rows or columns). {advice(each)}; or kinds.keep() "
                    "where it works on what no axis cuts."
                )
        open_points += hidden_parts(name, each, tree)
    if open_points:
        shown = "\n  ".join(open_points[:8])
        more = f"\n  and {len(open_points) - 8} more" if len(open_points) > 8 else ""
        raise ValueError(f"the plan does not say what becomes of these modules:\n  {shown}{more}")


def _parameters_of(module: nn.Module, kind: Kind) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=kind.covers_children)
