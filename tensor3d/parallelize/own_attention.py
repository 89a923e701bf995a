"""A module that works between linears in its own forward: it keeps that code, which is given a share of the columns,
or, of attention, whole heads of packed rows.

M tokens of the cube, H hidden size, h heads, d head dimension
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tensor3d.attention import attention
from tensor3d.layers.dropout import check_dropout
from tensor3d.layers.linear import Linear3D, gather_together
from tensor3d.ops.autograd_function import out_of_graphs
from tensor3d.parallelize.auto.op_rules import mask_of_sdpa, name_of, role_of
from tensor3d.parallelize.module_copy import (
    ModuleBuilder,
    clone_module_shell,
    copied,
    strip_params,
    take_hooks,
    untracked_modules,
)
from tensor3d.parallelize.parallel_rule import Keep, ParallelRule, Replicated, check_forward
from tensor3d.parallelize.torch_attention import PackedRows
from tensor3d.parallelize.torch_layer_rules import Dropout, Linear, Norm, with_settings
from tensor3d.parallelize.trials import columns_of
from tensor3d.parallelize.wrapped_module import LocalModule3D, on_cube
from tensor3d.sharding.activation_layout import check_activation, check_divides, in_batch
from tensor3d.sharding.fused_rows import to_fused_rows
from tensor3d.sharding.matmul import matmul_each
from tensor3d.sharding.param_layout import matrix, vector
from tensor3d.torch_private import saved_tensors_hooks_now

# --- The input of the module: known by its shape alone, for all but the projections -----------------------------------

_OF_THE_SHAPE = frozenset(["shape", "size", "dim", "ndim", "dtype", "device", "layout", "is_cuda", "is_meta"])


class StandIn(Tensor):
    """Stands for a module's input as it would lie on face y, where queries, keys and values do.

    The input lies on face z, with other rows. It has a shape, and the projections take what it stands for; to anything
    else it says that there is nothing to compute with.
    """

    stands_for: Tensor
    of: str
    readers: tuple[ProjectionOfInput3D, ...]
    """All that may ask for their results."""
    results: dict[ProjectionOfInput3D, Tensor] | None
    """Of those that have not asked yet. None: nobody has."""
    made_under: Any
    """Hooks on what is saved for backward."""

    @classmethod
    def made(
        cls, stands_for: Tensor, shape: tuple[int, ...], of: str, readers: tuple[ProjectionOfInput3D, ...] = ()
    ) -> StandIn:
        """One of this shape, with memory for one number."""
        stand_in = stands_for.detach().new_empty(()).expand(shape).as_subclass(cls)
        stand_in.stands_for, stand_in.of, stand_in.readers, stand_in.results = stands_for, of, readers, None
        stand_in.made_under = saved_tensors_hooks_now()
        return stand_in

    def result_of(self, projection: ProjectionOfInput3D) -> Tensor:
        """What it makes of the input. The first to ask has all of them computed, in one product each way, so that the
        input is gathered once; who asks again computes alone. So does who asks within a checkpoint in the module's
        code: that runs again by itself, and must then save what it has saved."""
        if saved_tensors_hooks_now() != self.made_under:
            return results_of(self.stands_for, (projection,))[0]
        if self.results is None:
            self.results = dict(zip(self.readers, results_of(self.stands_for, self.readers), strict=True))
        if projection not in self.results:
            return results_of(self.stands_for, (projection,))[0]
        return self.results.pop(projection)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if name_of(func) in _OF_THE_SHAPE:
            return super().__torch_function__(func, types, args, kwargs)
        of = next((each.of for each in (*args, *(kwargs or {}).values()) if isinstance(each, cls)), "a module")
        raise ValueError(
            f"rules.own_attention and own_mlp are for code that gives its input to nn.Linear alone. {of} "
            f"does something else with it ({name_of(func)}). Say with rules.replace(build) what takes its place."
        )


class ProjectionOfInput3D(Linear3D):
    """A `Linear3D` of face z to face y that reads what a stand-in stands for.

    Its weight may hold several projections, as queries, keys and values: rows lie on the cube in the order (group,
    part, d), of which y cuts whole groups, and what it gives is in the original's order, (part, group, d).
    """

    parts: tuple[int, ...] = (1,)
    """Of each projection, the heads in a group."""
    head_dim: int = 1

    def forward(self, x: Tensor) -> Tensor:
        """The (1, M/xy, H/z) on face z that `x` stands for to (1, M/xz, N/y) on face y.

        Raises:
            ValueError: it is given anything else than the input of the module around it.
        """
        if not isinstance(x, StandIn):
            raise ValueError(
                "rules.own_attention and own_mlp are for linears of the input of the module around them. One of "
                f"{self.in_features} to {self.out_features} was given another tensor, of shape {tuple(x.shape)}. Say "
                "with rules.replace(build) what takes the module's place."
            )
        given = x.result_of(self)
        if len(self.parts) == 1:
            return given
        groups = given.unflatten(-1, (-1, sum(self.parts) * self.head_dim))
        return torch.cat([part.flatten(-2) for part in groups.split([n * self.head_dim for n in self.parts], -1)], -1)

    @property
    def original_rows(self) -> dict[str, Tensor]:
        """Of parameters whose rows are in another order than the original's: the original's row of each row."""
        if len(self.parts) == 1:
            return {}
        groups = self.out_features // (sum(self.parts) * self.head_dim)
        order = to_fused_rows(torch.arange(self.out_features), parts=self.parts, groups=groups)
        return {"weight": order} | ({} if self.bias is None else {"bias": order})


def results_of(x: Tensor, projections: Sequence[ProjectionOfInput3D]) -> list[Tensor]:
    """(1, M/xy, H/z) on face z to each one's (1, M/xz, N/y) on face y."""
    cube, face = projections[0].cube, projections[0].face
    rows = in_batch(lambda rows: rows, x, "Linear3D").squeeze(0)
    check_activation(rows, projections[0].in_features, cube, face, "Linear3D")
    results = matmul_each(
        rows,
        [each.weight for each in projections],
        cube,
        face,
        [each.bias for each in projections],
        reshard_after_forward=[each.reshard_after_forward for each in projections],
    )
    return [each.unsqueeze(0) for each in results]


def cut_heads(projected: Tensor, fused: tuple[int, ...], head_dim: int, part: int, parts: int) -> Tensor:
    """(..., columns) of all heads to those that a rank of `parts` along y gets of projections that are `fused`."""
    groups = projected.shape[-1] // (sum(fused) * head_dim)
    each = projected.split([groups * heads * head_dim for heads in fused], -1)
    return torch.cat([columns.unflatten(-1, (groups, -1)).chunk(parts, -2)[part].flatten(-2) for columns in each], -1)


# --- The rule ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnAttention(ParallelRule):
    """The module's own code as self-attention within the sequences that `rows` holds while the model runs.

    Its projections of the input go from face z to face y, where a rank has whole heads of whole sequences; what the
    code does there to each head, such as norms and rotary positions, stays as it is; `output` goes back to face z. In
    place of `F.scaled_dot_product_attention` the code calls `tensor3d.attention`, causal where the call was.

    The code must do the same to each head, and read their number off its tensors (a -1 in a view) or off attributes
    that `shares` names. What it is given beside the input, row by row, must have the rows of face y:
    `local_rows(positions, cube, "y")`.

    Args:
        rows: as of `rules.attention`. None: no attention is done (`own_mlp`).
        head_dim: d, the columns of a query.
        output: name of the nn.Linear in the module that reads what the heads give. All others read the module's first
            argument. None: it lies elsewhere, and what the heads give is the module's first result, on face y.
        fused: of projections that hold several, one after another, each with all of its heads: how many (3 of queries,
            keys and values), or how many heads of each belong together (2, 1, 1: two of queries for one of keys).
        shares: the module's whole numbers that count heads or their columns (`num_heads`): a rank's code finds its
            share of them.
    """

    rows: PackedRows | None
    head_dim: int
    output: str | None = None
    fused: Mapping[str, int | tuple[int, ...]] | None = None
    shares: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "fused", dict(self.fused or {}))
        object.__setattr__(self, "shares", tuple(self.shares))

    def build(self, module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        check_forward(module, name, self)
        heads = self.check_parts(module, name)
        for each, count in heads.items():
            check_divides(f"heads of {name}.{each}", count, workshop.cube, "y")
        widths = self.widths(heads)
        code = strip_params(clone_module_shell(module, workshop))
        for each, part in module._modules.items():
            with workshop.at(f"{name}.{each}"):
                code._modules[each] = None
                if part is not None:
                    made_part = self._part(part, each, f"{name}.{each}", widths, workshop)
                    code._modules[each] = take_hooks(part, made_part)
        for part in code.children():
            if isinstance(part, Linear3D):
                part.is_with_others = True
        for each in self.shares:
            check_divides(f"{name}.{each}", getattr(module, each), workshop.cube, "y")
            setattr(code, each, getattr(module, each) // workshop.cube.axis("y").size)
        made = on_cube(code, {}, workshop.cube, over=AttentionCode3D)
        assert isinstance(made, AttentionCode3D)
        facts = _Facts(rows=self.rows, head_dim=self.head_dim, name=name, input_of=_first_argument(module))
        made._attention_on_cube = facts
        return made

    def check_parts(self, module: nn.Module, name: str) -> dict[str, int]:
        """The heads of each of the module's linears.

        Raises:
            ValueError: parts that the rule does not know, or an output that is none of them.
        """
        for problem in untracked_modules(name, module, {id(each) for each in module.modules()}):
            raise ValueError(problem)
        own = [each for each, _ in module.named_parameters(recurse=False)]
        others = [
            each
            for each, part in module.named_children()
            if role_of(part) not in ("linear", "norm", "dropout") and next(part.parameters(), None) is not None
        ]
        if own or others:
            raise ValueError(
                f"{self.called} is for code whose parameters are those of nn.Linear and of norms, each directly "
                f"in the module. {name!r} ({type(module).__name__}) holds {', '.join((*own, *others))} too. Say with "
                "rules.replace(build) what takes its place."
            )
        linears = {each: part for each, part in module.named_children() if isinstance(part, nn.Linear)}
        if not linears.keys() - {self.output} or (self.output is not None and self.output not in linears):
            raise ValueError(
                f"{self.called} needs projections, nn.Linear directly in {name!r}, and beside them the output "
                f"that it names. Got output={self.output!r} of {', '.join(linears) or 'none'}."
            )
        said = dict(self.fused or {})
        numbers = [n for each in said.values() for n in (each if isinstance(each, tuple) and each else (each,))]
        if said.keys() - (linears.keys() - {self.output}) or any(type(n) is not int or n < 1 for n in numbers):
            raise ValueError(
                f"fused of {self.called} must name projections of {name!r} ({', '.join(linears)} without the "
                f"output), each with how many it holds. Got {said}."
            )
        heads = {}
        for each, part in linears.items():
            columns, fused = part.out_features, sum(self.told(each))
            if each == self.output:
                columns, fused = part.in_features, 1
            if columns % (fused * self.head_dim):
                raise ValueError(
                    f"head_dim={self.head_dim} must divide the columns of {name}.{each}, of {fused} projections. Got "
                    f"{columns}."
                )
            heads[each] = columns // (fused * self.head_dim)
        wrong = [each for each in self.shares if type(vars(module).get(each)) is not int]
        if wrong:
            raise ValueError(
                f"shares of {self.called} must be attributes of {name!r} that are whole numbers. Got "
                f"{', '.join(wrong)}."
            )
        return heads

    @property
    def called(self) -> str:
        """The rule's name, for messages."""
        return "rules.own_mlp" if self.rows is None else "rules.own_attention"

    def __str__(self) -> str:
        said = {each: getattr(self, each) for each in ("output", "fused", "shares") if getattr(self, each)}
        own = [] if self.rows is None else ["rows", f"head_dim={self.head_dim}"]
        told = [f"{each}={value!r}".replace("'", '"') for each, value in said.items()]
        return f"{self.called.removeprefix('rules.')}({', '.join(own + told)})"

    def widths(self, heads: Mapping[str, int]) -> set[int]:
        """Columns of several heads, by which a norm over all of them is told from one of each."""
        return {count * self.head_dim for count in heads.values() if count > 1}

    def told(self, projection: str) -> tuple[int, ...]:
        """Of each projection that one of this name holds, the heads in a group."""
        found = (self.fused or {}).get(projection, 1)
        return found if isinstance(found, tuple) else (1,) * found

    def _part(self, part: nn.Module, own_name: str, name: str, widths: set[int], workshop: ModuleBuilder) -> nn.Module:
        role = role_of(part)
        if isinstance(part, nn.Linear):
            if own_name == self.output:
                return Linear(face="y").build(part, name, workshop)
            with workshop.cube.skip_init():
                layer = ProjectionOfInput3D(
                    part.in_features, part.out_features, workshop.cube, "z", part.bias is not None
                )
            layer.parts, layer.head_dim = self.told(own_name), self.head_dim
            order = layer.original_rows.get("weight")
            layer.weight = workshop.parameter(part.weight, matrix("z"), order)
            if part.bias is not None:
                layer.bias = workshop.parameter(part.bias, vector("y"), order)
            return with_settings(layer, part).train(part.training)
        if role == "norm":
            return norm_of_heads(part, widths).build(part, name, workshop)
        if role == "dropout":
            return Dropout().build(part, name, workshop)
        return copied(part, workshop, lambda parameter: None)


def own_mlp(output: str, fused: Mapping[str, int] | None = None, shares: tuple[str, ...] = ()) -> OwnAttention:
    """The rule for a module's own code that does the same to each column between its linears, such as a gated MLP.

    Its linears of the input go from face z to face y, and `output` goes back.

    Args:
        output: name of the nn.Linear that reads what the code made. All others read the module's first argument.
        fused: of linears that hold several, one after another (gate and up: 2), how many: the code may cut their
            columns apart.
        shares: the module's whole numbers that count those columns.
    """
    return OwnAttention(None, 1, output, fused, shares)


def norm_of_heads(norm: nn.Module, widths: set[int]) -> ParallelRule:
    """The rule for a norm between projections of `widths` columns and attention: over all columns, or of each head."""
    if columns_of(norm) in widths:
        return Norm(face="y")
    return Replicated(sum_over=("data", "x", "y", "z")) if any(True for _ in norm.parameters()) else Keep()


def _first_argument(module: nn.Module) -> str:
    forward = vars(module).get("forward", module.forward)
    return next(iter(inspect.signature(forward).parameters), "")


# --- The code on the cube ---------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Facts:
    rows: PackedRows | None
    head_dim: int
    name: str
    input_of: str
    runs: bool = False  # while attention runs, torch's is torch's: backends call it


class AttentionCode3D(LocalModule3D):
    """Runs a module's own attention on this rank's heads and sequences: face z to face z."""

    _attention_on_cube: _Facts  # and nothing else, as the code may have any names

    @out_of_graphs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward, with (1, M/xy, H/z) on face z as its first argument, to the same; without an
        output of its own, to (1, M/xz, columns/y) on face y. An argument without its first dim gives such results."""
        facts, shape = self._attention_on_cube, self._on_cube.cube.shape
        x = args[0] if args else kwargs.get(facts.input_of)
        if not isinstance(x, Tensor) or x.dim() < 2:
            found = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{facts.name!r} needs hidden states as its first argument ({facts.input_of}), of (1, rows, columns). "
                f"Got {found}."
            )
        on_face_y = x.shape[-2] * shape.y // shape.z, x.shape[-1] * shape.z // shape.y
        hidden = x if x.dim() == 3 else x.unsqueeze(0)
        readers = tuple(part for part in self.children() if isinstance(part, ProjectionOfInput3D))
        stand_in = StandIn.made(hidden, (1, *on_face_y), f"{facts.name!r} ({self._get_name()})", readers)
        args = tuple(stand_in if each is x else each for each in args)
        kwargs = {name: stand_in if each is x else each for name, each in kwargs.items()}
        with (
            gather_together(self.children(), self._on_cube.cube),
            nullcontext() if facts.rows is None else _ToPackedRows(self),
        ):
            result = super().forward(*args, **kwargs)
        return result if x.dim() == 3 else _without_batch(result)


def attend_packed(
    module: AttentionCode3D,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """What code under `rules.own_attention` gets in place of `F.scaled_dot_product_attention`, as that returns it.

    Args:
        module: whose code it is; it knows the sequences.
        q, k, v: (1, h/y, M/xz, d); k and v may have fewer heads.
        causal, window, dropout: as of `tensor3d.attention`.
        scale: of the products of queries and keys. Default: 1/sqrt(d).

    Raises:
        ValueError: rows or head dimensions other than those of this rank's sequences and the plan's.
    """
    facts = module._attention_on_cube
    if facts.rows is None:
        raise ValueError(f"{facts.name!r} does attention, and was planned by rules.own_mlp. Use rules.own_attention.")
    rows = facts.rows.sequences
    if q.dim() != 4 or q.shape[0] != 1 or q.shape[-2:] != (rows.rows, facts.head_dim):
        raise ValueError(
            f"the queries of {facts.name!r} must be (1, heads, rows, head_dim), of this rank's {rows.rows} rows "
            f"and head_dim={facts.head_dim}. Got {tuple(q.shape)}. Its code must read the number of rows off its "
            "tensors, and that of heads too (a -1 in a view) or off attributes that the rule's shares name."
        )
    check_dropout(dropout, module._on_cube.cube)
    q, k, v = (each.squeeze(0).transpose(0, 1) for each in (q, k, v))
    if scale is not None and scale != (usual := facts.head_dim**-0.5):
        q = q * (scale / usual)
    before, facts.runs = facts.runs, True
    try:
        mixed = attention(q, k, v, rows, causal=causal, window=window, dropout=dropout)
    finally:
        facts.runs = before
    return mixed.transpose(0, 1).unsqueeze(0)


def _without_batch(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return type(result)(map(_without_batch, result))
    return result.squeeze(0) if isinstance(result, Tensor) and result.dim() == 3 else result


class _ToPackedRows(TorchFunctionMode):
    """Inside, `F.scaled_dot_product_attention` is attention within packed sequences."""

    def __init__(self, module: AttentionCode3D) -> None:
        super().__init__()
        self.module, self.facts, self.with_gradients = module, module._attention_on_cube, torch.is_grad_enabled()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Of attention itself first: it calls several functions for each sequence.
        if self.facts.runs or name_of(func) != "scaled_dot_product_attention":
            return func(*args, **(kwargs or {}))
        return self._attended(*args, **(kwargs or {}))

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        name, hides = self.module._attention_on_cube.name, mask_of_sdpa(attn_mask)
        if hides == "other":
            raise ValueError(
                "attention on a cube takes no masks: rows are packed (tensor3d.pack_padded), and Sequences say where "
                f"sequences end. {name!r} was given one of shape {tuple(attn_mask.shape)}. Call it without, or with "  # type: ignore[union-attr]
                "one that hides what comes later and does nothing else."
            )
        if self.with_gradients and not torch.is_grad_enabled():
            raise ValueError(
                f"{name!r} calls F.scaled_dot_product_attention where gradients are off, as a checkpoint with "
                "use_reentrant=True inside it has them: backward would run that again, without the module around it "
                "and its sequences. Checkpoint the whole module, or take the checkpoint out."
            )
        causal = is_causal or hides == "later"
        return attend_packed(self.module, query, key, value, causal=causal, scale=scale, dropout=dropout_p)
