"""What each layer of a module becomes on a cube, from what was read of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from torch import Tensor, nn

from tensor3d.parallelize import rules
from tensor3d.parallelize.auto.attention_trial import TriedAttention
from tensor3d.parallelize.auto.op_rules import Role, TracedCall, TraceResult, above, is_within, role_of
from tensor3d.parallelize.auto.proposal import DivisibilityRequirement
from tensor3d.parallelize.own_attention import OwnAttention
from tensor3d.parallelize.parallel_rule import ParallelRule
from tensor3d.parallelize.torch_attention import PackedRows
from tensor3d.parallelize.torch_layer_rules import has_forward, mixes
from tensor3d.parallelize.trials import columns_of
from tensor3d.sharding.activation_layout import Face, other
from tensor3d.sharding.param_layout import vector

# --- Which of a model's tensors lie on the same face and which on the other: a union-find with parities ---------------


class ParityUnionFind:
    """Unknown faces, numbered, and what is known of each pair: the same face, or the other one.

    Number 0 stands for face z itself. `join` takes in one fact after another and refuses the first that contradicts
    those before it.
    """

    def __init__(self, count: int) -> None:
        self._parent = list(range(count + 1))
        self._odd = [False] * (count + 1)  # against the parent

    def join(self, a: int, b: int, *, differ: bool = False) -> bool:
        """Takes in that a and b lie on one face, or that they differ. False, and nothing changes, if they cannot."""
        (root_a, odd_a), (root_b, odd_b) = self._find(a), self._find(b)
        if root_a == root_b:
            return (odd_a != odd_b) == differ
        low, high = sorted((root_a, root_b))  # so that the first number of a group is its root
        self._parent[high] = low
        self._odd[high] = (odd_a != odd_b) != differ
        return True

    def joined(self, a: int, b: int) -> bool:
        """Whether it is known how a and b lie to each other."""
        return self._find(a)[0] == self._find(b)[0]

    def face(self, number: int) -> Face:
        """The face of a number. What nothing ties to face z starts on it: the first number of each group does."""
        return "y" if self._find(number)[1] else "z"

    def _find(self, number: int) -> tuple[int, bool]:
        """The root, and whether the number lies on the other face than it."""
        trail, odd = [], False
        while self._parent[number] != number:
            trail.append(number)
            number = self._parent[number]
        for step in reversed(trail):
            odd ^= self._odd[step]
            self._parent[step], self._odd[step] = number, odd
        return number, odd


# --- From what was read to faces: which face each layer reads, and which linears need a `turn` ------------------------

Key = int  # what fixes the face of a layer: its weight, which tied layers share


@dataclass(frozen=True, kw_only=True)
class FaceSolution:
    """The faces of a reading, and of its layers."""

    faces: ParityUnionFind
    reads: Mapping[Key, int]
    turned: Set[Key]
    clashes: tuple[str, ...]

    def is_met(self, number: int, others: Iterable[int]) -> bool:
        """Whether any of `others` has to do with a number."""
        return any(self.faces.joined(number, each) for each in others)

    def face_read(self, key: Key) -> Face:
        return self.faces.face(self.reads[key])


def solve(reading: TraceResult, keys: Mapping[str, Key], projections: Set[str], heads: Set[str]) -> FaceSolution:
    """The solution that turns the fewest elements that a greedy search finds.

    A linear that reads what lies on the other face is turned. The first attempt turns each linear that contradicts
    those before it; then a linear is turned beforehand where that saves more than it costs, as one early turn may spare
    several late ones.
    """
    chosen: tuple[Key, ...] = ()
    best, price = _attempt(reading, keys, projections, heads, frozenset())
    improved = bool(best.turned)
    while improved:
        improved = False
        for key in {keys[call.layer]: None for call in reading.calls if call.role == "linear"}:
            for beforehand in ((*chosen, key), (*chosen[:-1], key)):  # beside the last one, or in its place
                other, paid = _attempt(reading, keys, projections, heads, frozenset(beforehand))
                if paid < price:
                    best, price, chosen, improved = other, paid, beforehand, True
    return best


def _attempt(
    reading: TraceResult, keys: Mapping[str, Key], projections: Set[str], heads: Set[str], turned: Set[Key]
) -> tuple[FaceSolution, tuple[int, int]]:
    """The solution that turns at least `turned`, and its price: what cannot be solved, then elements turned."""
    layers = dict.fromkeys(keys[call.layer] for call in reading.calls if call.layer in keys)
    reads = {key: reading.numbers + 1 + place for place, key in enumerate(layers)}
    faces = ParityUnionFind(reading.numbers + len(reads))
    clashes = _firm(reading, keys, projections, heads, faces, reads)
    calls: dict[Key, list[TracedCall]] = {}
    for call in reading.calls:
        if call.role == "linear" and call.layer not in heads:
            calls.setdefault(keys[call.layer], []).append(call)
    all_turned = set(turned) & calls.keys()
    for key, uses in calls.items():
        if key not in all_turned and not faces.join(uses[0].reads, reads[key]):
            all_turned.add(key)
        for call in uses:
            if not faces.join(call.reads, reads[key], differ=key in all_turned):
                clashes.append(_clash(call.layer, "the two places that use its weight"))
    solution = FaceSolution(
        faces=faces, reads=reads, turned=frozenset(all_turned), clashes=tuple(dict.fromkeys(clashes))
    )
    return solution, (len(clashes), sum(call.numel for key in all_turned for call in calls[key]))


def _firm(
    reading: TraceResult,
    keys: Mapping[str, Key],
    projections: Set[str],
    heads: Set[str],
    faces: ParityUnionFind,
    reads: Mapping[Key, int],
) -> list[str]:
    """Takes in what holds in any case; what contradicts is returned in words."""
    clashes = []
    for call in reading.calls:  # what a product, an embedding and attention are
        if call.layer in projections:
            faces.join(0, reads[keys[call.layer]])
        if call.role == "linear" and call.layer not in heads:
            faces.join(reads[keys[call.layer]], call.returns, differ=True)
        if call.role == "embedding":
            faces.join(0, call.returns)
    for number, face, where in reading.pinned:
        if not faces.join(0, number, differ=face == "y"):
            clashes.append(_clash(where, f"attention, which takes face {face}, and what it is given"))
    for a, b, where in reading.equal:
        if not faces.join(a, b):
            clashes.append(_clash(where, "the operands"))
    for call in reading.calls:
        if call.role == "attention" and not faces.join(0, call.reads):
            clashes.append(_clash(call.layer, "attention, which reads face z, and what it is given"))
        if (call.role == "norm" or call.layer in heads) and not faces.join(reads[keys[call.layer]], call.reads):
            clashes.append(_clash(call.layer, "two places that call it"))
        if call.layer in heads:
            faces.join(call.reads, call.returns)
    return clashes


def _clash(where: str, what: str) -> str:
    return (
        f"{where}: {what} lie on different faces, and no linear between them can be turned. Call "
        "`tensor3d.redistribute` there, in code of your own (rules.replace), or give each face a layer of its own"
    )


# --- What each layer of a module becomes on a cube, from what was read of it ------------------------------------------

# Heads with fewer outputs than this multiply their own columns; so do those whose names say that they give labels.
_FEW = 32
_LABELS = frozenset({"classifier", "head", "score", "qa_outputs", "seq_relationship"})
_MANY = 4096
# An embedding is a table where another one has this many times its rows.
_SMALLER = 4


@dataclass(frozen=True, kw_only=True)
class LayerRuleChoice:
    """A layer's kind, as it is written in a plan; two that are written alike are alike."""

    spelled: str
    kind: ParallelRule = field(compare=False)
    why: str = field(compare=False)
    divisions: tuple[DivisibilityRequirement, ...] = field(default=(), compare=False)


class LayerRuleChoices:
    """The layers of a module and what they become."""

    def __init__(self, module: nn.Module, reading: TraceResult, rows: PackedRows) -> None:
        self.reading, self.rows = reading, rows
        self.modules = dict(module.named_modules())
        self.roles: dict[str, Role] = {call.layer: call.role for call in reading.calls}
        self.keys: dict[str, Key] = {
            name: id(next(self.modules[name].parameters(), self.modules[name]))
            for name, role in self.roles.items()
            if role in ("linear", "norm", "embedding")
        }
        self.linears, self.embeddings = self._named("linear"), self._named("embedding")
        self.largest = max((self._shape(name)[0] for name in self.embeddings), default=0)
        self.projections = {name for name in self.linears if self._to_vocabulary(name)}
        self.heads = {name for name in self.linears if name not in self.projections and self._is_head(name)}
        self.solution: FaceSolution = solve(reading, self.keys, self.projections, self.heads)

    def of_layers(self) -> dict[str, LayerRuleChoice]:
        """By name, in the order of the module."""
        made = {name: self._layer(name, self.roles[name]) for name in self.modules if name in self.roles}
        return {name: choice for name, choice in made.items() if choice is not None}

    def of_containers(self) -> Iterator[tuple[str, LayerRuleChoice]]:
        """Modules with own code: those with vectors of their own, and those that parallelize asks for a word on."""
        faces = self.solution.faces
        replicated = self._replicated()
        for name, face in replicated.items():
            yield name, _replicated(face)
        for name, module in self.modules.items():
            if name in replicated or any(is_within(name, each) for each in replicated):
                continue
            own = [each for each, _ in module.named_parameters(recurse=False)]
            met = {each: {faces.face(n) for n in self.reading.vectors.get((name, each), ())} for each in own}
            alike = bool(own) and has_forward(module) and all(len(each) == 1 for each in met.values())
            known = name in self.reading.roles
            if not known and alike:
                yield name, _wrapped(name, module, {each: min(found) for each, found in met.items()})
            elif not known and mixes(module) and self._works_on_whole(name):
                yield name, LayerRuleChoice(spelled="keep()", kind=rules.keep(), why="what it is given is not cut")

    def gated(self) -> list[str]:
        """Small modules whose own code is not right on a block, and may be on a share of what its linears give."""
        attending = self.reading.attending
        inside = [name for name in self.reading.notes if any(name == a or is_within(name, a) for a in attending)]
        return [
            name
            for name in self.reading.notes
            if name not in inside and name not in self.reading.roles and self.is_small(name) and self.objections(name)
        ]

    def is_small(self, name: str) -> bool:
        """Whether a module is to be replaced as a whole; of a large one, the parts keep their lines in the plan."""
        parts = [part for part in self.modules[name].children() if next(part.parameters(), None) is not None]
        return bool(name) and all(role_of(part) is not None for part in parts)

    def of_attention(self, tried: Mapping[str, TriedAttention]) -> dict[str, LayerRuleChoice]:
        """Modules that keep their own attention: what was tried with success, of which nothing else is known."""
        return {
            name: _own_attention(name, each.rule, self.modules[name])
            for name, each in tried.items()
            if each.rule is not None and not self.against_own_attention(name) and self._goes_round(name, each.rule)
        }

    def against_own_attention(self, host: str) -> list[str]:
        """What speaks against the code of a module that attends, that a trial does not see."""
        notes = self.reading.notes
        inside = (name for name in notes if name == host or is_within(name, host))
        return [note.text for name in inside for note in notes[name] if note.firm]

    def _goes_round(self, host: str, rule: OwnAttention) -> bool:
        """Whether its projections read face z, and its output gives it back, without a turn."""
        return all(
            self.keys[name] not in self.solution.turned
            and self.solution.face_read(self.keys[name]) == ("y" if name == f"{host}.{rule.output}" else "z")
            for name in self.linears
            if is_within(name, host)
        )

    def objections(self, name: str) -> list[str]:
        """What speaks against the own code of a module. The outputs of heads are whole in their columns."""
        notes = self.reading.notes.get(name, {})
        return [note.text for note, since in notes.items() if not (note.of_columns and since <= self.heads)]

    def _works_on_whole(self, name: str) -> bool:
        """Whether all that was seen of a module that mixes rows or columns is work on those that no axis cuts."""
        among_foreign = any(name == place for after in self.reading.after.values() for place, _ in after)
        return name in self.reading.ran and not among_foreign and not self.objections(name)

    def _replicated(self) -> dict[str, Face]:
        """Modules in which nothing is a layer of the cube, and whose result enters a face only outside of them."""
        found: dict[str, Face] = {}
        for foreign, (where, number) in self.reading.enters.items():
            places = [place for place, _ in self.reading.after.get(foreign, {})]
            for around in above(foreign):
                others = [role for name, role in self.roles.items() if is_within(name, around)]
                own = all(place == around or is_within(place, around) for place in places)
                if own and set(others) == {"foreign"} and where != around and not is_within(where, around):
                    found[around] = self.solution.faces.face(number)
                    break
        return {name: face for name, face in found.items() if not any(is_within(name, each) for each in found)}

    # --- what a linear is -----------------------------------------------------------------------------------------

    def _named(self, role: Role) -> list[str]:
        return [name for name, each in self.roles.items() if each == role]

    def _shape(self, name: str) -> tuple[int, ...]:
        weight = getattr(self.modules[name], "weight", None)
        if isinstance(weight, Tensor):
            return tuple(weight.shape)
        return (next(call.columns for call in self.reading.calls if call.layer == name),)  # a norm without one

    def _is_tied(self, name: str, others: list[str]) -> bool:
        return self.keys[name] in {self.keys[each] for each in others}

    def _to_vocabulary(self, name: str) -> bool:
        """Tied with an embedding, or as many outputs as the largest embedding has rows, which no layer reads."""
        outputs = self._shape(name)[0]
        return self._is_tied(name, self.embeddings) or (
            name not in self.reading.read_on and outputs == self.largest and bool(self.embeddings)
        )

    def _is_head(self, name: str) -> bool:
        """Few outputs, or labels by the name, that no layer reads and that are not as wide as a hidden state."""
        outputs = self._shape(name)[0]
        widths = self.reading.widths | {self._shape(each)[-1] for each in (*self.embeddings, *self._named("norm"))}
        labels = name.rpartition(".")[2] in _LABELS and outputs < _MANY
        return name not in self.reading.read_on and outputs not in widths and (outputs < _FEW or labels)

    # --- the kind of each layer -----------------------------------------------------------------------------------

    def _layer(self, name: str, role: Role) -> LayerRuleChoice | None:
        if role == "embedding":
            return self._embedding(name)
        if role == "attention":
            return self._attention(name)
        if role == "norm":
            face = self.solution.face_read(self.keys[name])
            why, (width,) = f"its input lies on face {face}", self._shape(name)
            sizes = (DivisibilityRequirement(layer=name, what="its width", number=width, axis=face),)
            said = columns_of(self.modules[name]) is not None
            return LayerRuleChoice(
                spelled=f'norm("{face}")' if said else f'norm("{face}", columns={width})',
                kind=rules.norm(face) if said else rules.norm(face, columns=width),
                why=why,
                divisions=sizes,
            )
        return self._linear(name) if role == "linear" else None

    def _linear(self, name: str) -> LayerRuleChoice:
        face, (outputs, inputs) = self.solution.face_read(self.keys[name]), self._shape(name)
        reads = DivisibilityRequirement(layer=name, what="in_features", number=inputs, axis=face)
        if name in self.heads:
            why = f"its input lies on face {face}; {outputs} outputs that no layer reads"
            return LayerRuleChoice(spelled=f'head("{face}")', kind=rules.head(face), why=why, divisions=(reads,))
        turn = self.keys[name] in self.solution.turned
        why = f"its input lies on face {other(face)} and is turned first" if turn else f"its input lies on face {face}"
        if name in self.projections:
            tied = "tied " if self._is_tied(name, self.embeddings) else ""
            return LayerRuleChoice(
                spelled="projection(turn=True)" if turn else "projection()",
                kind=rules.projection(turn=turn),
                why=f"{why}; {outputs} outputs, one for each row of the {tied}embedding",
                divisions=(reads,),
            )
        if turn:
            why += ": else what is added up later would lie on two faces"
        return LayerRuleChoice(
            spelled=f'linear("{face}", turn=True)' if turn else f'linear("{face}")',
            kind=rules.linear(face, turn=turn),
            why=why,
            divisions=(
                reads,
                DivisibilityRequirement(layer=name, what="out_features", number=outputs, axis=other(face)),
            ),
        )

    def _embedding(self, name: str) -> LayerRuleChoice:
        rows, width = self._shape(name)
        divisions = (DivisibilityRequirement(layer=name, what="embedding_dim", number=width, axis="z"),)
        given = any(call.from_arguments for call in self.reading.calls if call.layer == name)
        small = rows * _SMALLER <= self.largest
        if not self._is_tied(name, self.linears) and (small or not given):
            why = f"{rows} rows beside {self.largest}" if small else "numbered by the module itself, as positions are"
            return LayerRuleChoice(spelled="table()", kind=rules.table(), why=why, divisions=divisions)
        why = f"{rows} rows, numbered by an argument"
        return LayerRuleChoice(spelled="embedding()", kind=rules.embedding(), why=why, divisions=divisions)

    def _attention(self, name: str) -> LayerRuleChoice:
        module, causal = self.modules[name], name in self.reading.causal
        assert isinstance(module, nn.MultiheadAttention)
        axes: tuple[Face, Face] = ("y", "z")
        widths = (
            DivisibilityRequirement(layer=name, what="embed_dim", number=module.embed_dim, axis=axis) for axis in axes
        )
        return LayerRuleChoice(
            spelled="attention(rows, causal=True)" if causal else "attention(rows)",
            kind=rules.attention(self.rows, causal=causal),
            why="face z to face z; `rows` says where sequences end",
            divisions=(
                DivisibilityRequirement(layer=name, what="num_heads", number=module.num_heads, axis="y"),
                *widths,
            ),
        )


def _own_attention(name: str, rule: OwnAttention, module: nn.Module) -> LayerRuleChoice:
    requires = []
    for own, heads in rule.check_parts(module, name).items():
        layer, part = f"{name}.{own}", module.get_submodule(own)
        assert isinstance(part, nn.Linear)
        outer = part.out_features if own == rule.output else part.in_features
        requires += [
            DivisibilityRequirement(layer=layer, what="heads", number=heads, axis="y"),
            DivisibilityRequirement(layer=layer, what="its width", number=outer, axis="z"),
        ]
    where = "; `rows` says where sequences end" if rule.rows else ""
    return LayerRuleChoice(
        spelled=str(rule),
        kind=rule,
        why=f"its own code, tried on parts of its {'heads' if rule.rows else 'columns'}{where}",
        divisions=tuple(requires),
    )


def _replicated(face: Face) -> LayerRuleChoice:
    return LayerRuleChoice(
        spelled=f'replicated(("data", "x", "y", "z"), enters="{face}")',
        kind=rules.replicated(("data", "x", "y", "z"), enters=face),
        why=f"what cannot be cut, given the whole of what a plane works on; its result enters face {face}",
    )


def _wrapped(name: str, module: nn.Module, faces: dict[str, Face]) -> LayerRuleChoice:
    spelled = ", ".join(f'"{each}": vector("{face}")' for each, face in faces.items())
    return LayerRuleChoice(
        spelled=f"wrapped({{{spelled}}})",
        kind=rules.wrapped({each: vector(face) for each, face in faces.items()}),
        why="its own code, elementwise, with vectors along the columns",
        divisions=tuple(
            DivisibilityRequirement(layer=name, what=each, number=module.get_parameter(each).numel(), axis=face)
            for each, face in faces.items()
        ),
    )
