"""What each layer of a module becomes on a cube, from what was read of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from tensor3d.faces import Face, other
from tensor3d.layout import vector
from tensor3d.parallel import kinds
from tensor3d.parallel.advice import mixes
from tensor3d.parallel.facts import Reading, Role, above, is_within, role_of
from tensor3d.parallel.kind import Kind
from tensor3d.parallel.packed_rows import PackedRows
from tensor3d.parallel.proposal import Division
from tensor3d.parallel.solving import Key, Solution, solve

# Heads with fewer outputs than this multiply their own columns; so do those whose names say that they give labels.
_FEW = 32
_LABELS = frozenset({"classifier", "head", "score", "qa_outputs", "seq_relationship"})
_MANY = 4096
# An embedding is a table where another one has this many times its rows.
_SMALLER = 4


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layer's kind, as it is written in a plan; two that are written alike are alike."""

    spelled: str
    kind: Kind = field(compare=False)
    why: str = field(compare=False)
    divisions: tuple[Division, ...] = field(default=(), compare=False)


class Choices:
    """The layers of a module and what they become."""

    def __init__(self, module: nn.Module, reading: Reading, rows: PackedRows) -> None:
        self.reading, self.rows = reading, rows
        self.modules = dict(module.named_modules())
        self.roles: dict[str, Role] = {call.layer: call.role for call in reading.calls}
        self.keys: dict[str, Key] = {
            name: id(self.modules[name].get_parameter("weight"))
            for name, role in self.roles.items()
            if role in ("linear", "norm", "embedding")
        }
        self.linears, self.embeddings = self._named("linear"), self._named("embedding")
        self.largest = max((self._shape(name)[0] for name in self.embeddings), default=0)
        self.projections = {name for name in self.linears if self._to_vocabulary(name)}
        self.heads = {name for name in self.linears if name not in self.projections and self._is_head(name)}
        self.solution: Solution = solve(reading, self.keys, self.projections, self.heads)

    def of_layers(self) -> dict[str, Choice]:
        """By name, in the order of the module."""
        made = {name: self._layer(name, self.roles[name]) for name in self.modules if name in self.roles}
        return {name: choice for name, choice in made.items() if choice is not None}

    def of_containers(self) -> Iterator[tuple[str, Choice]]:
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
            if role_of(module) is None and own and all(len(each) == 1 for each in met.values()):
                yield name, _wrapped(name, module, {each: min(found) for each, found in met.items()})
            elif role_of(module) is None and mixes(module) and self._works_on_whole(name):
                yield name, Choice(spelled="keep()", kind=kinds.keep(), why="what it is given is not cut")

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
        return tuple(self.modules[name].get_parameter("weight").shape)

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

    def _layer(self, name: str, role: Role) -> Choice | None:
        if role == "embedding":
            return self._embedding(name)
        if role == "attention":
            return self._attention(name)
        if role == "norm":
            face = self.solution.face_read(self.keys[name])
            why = f"its input lies on face {face}"
            sizes = (Division(layer=name, what="its width", number=self._shape(name)[0], axis=face),)
            return Choice(spelled=f'norm("{face}")', kind=kinds.norm(face), why=why, divisions=sizes)
        return self._linear(name) if role == "linear" else None

    def _linear(self, name: str) -> Choice:
        face, (outputs, inputs) = self.solution.face_read(self.keys[name]), self._shape(name)
        reads = Division(layer=name, what="in_features", number=inputs, axis=face)
        if name in self.heads:
            why = f"its input lies on face {face}; {outputs} outputs that no layer reads"
            return Choice(spelled=f'head("{face}")', kind=kinds.head(face), why=why, divisions=(reads,))
        turn = self.keys[name] in self.solution.turned
        why = f"its input lies on face {other(face)} and is turned first" if turn else f"its input lies on face {face}"
        if name in self.projections:
            tied = "tied " if self._is_tied(name, self.embeddings) else ""
            return Choice(
                spelled="projection(turn=True)" if turn else "projection()",
                kind=kinds.projection(turn=turn),
                why=f"{why}; {outputs} outputs, one for each row of the {tied}embedding",
                divisions=(reads,),
            )
        if turn:
            why += ": else what is added up later would lie on two faces"
        return Choice(
            spelled=f'linear("{face}", turn=True)' if turn else f'linear("{face}")',
            kind=kinds.linear(face, turn=turn),
            why=why,
            divisions=(reads, Division(layer=name, what="out_features", number=outputs, axis=other(face))),
        )

    def _embedding(self, name: str) -> Choice:
        rows, width = self._shape(name)
        divisions = (Division(layer=name, what="embedding_dim", number=width, axis="z"),)
        given = any(call.from_arguments for call in self.reading.calls if call.layer == name)
        small = rows * _SMALLER <= self.largest
        if not self._is_tied(name, self.linears) and (small or not given):
            why = f"{rows} rows beside {self.largest}" if small else "numbered by the module itself, as positions are"
            return Choice(spelled="table()", kind=kinds.table(), why=why, divisions=divisions)
        why = f"{rows} rows, numbered by an argument"
        return Choice(spelled="embedding()", kind=kinds.embedding(), why=why, divisions=divisions)

    def _attention(self, name: str) -> Choice:
        module, causal = self.modules[name], name in self.reading.causal
        assert isinstance(module, nn.MultiheadAttention)
        axes: tuple[Face, Face] = ("y", "z")
        widths = (Division(layer=name, what="embed_dim", number=module.embed_dim, axis=axis) for axis in axes)
        return Choice(
            spelled="attention(rows, causal=True)" if causal else "attention(rows)",
            kind=kinds.attention(self.rows, causal=causal),
            why="face z to face z; `rows` says where sequences end",
            divisions=(Division(layer=name, what="num_heads", number=module.num_heads, axis="y"), *widths),
        )


def _replicated(face: Face) -> Choice:
    return Choice(
        spelled=f'replicated(("data", "x", "y", "z"), enters="{face}")',
        kind=kinds.replicated(("data", "x", "y", "z"), enters=face),
        why=f"what cannot be cut, given the whole of what a plane works on; its result enters face {face}",
    )


def _wrapped(name: str, module: nn.Module, faces: dict[str, Face]) -> Choice:
    spelled = ", ".join(f'"{each}": vector("{face}")' for each, face in faces.items())
    return Choice(
        spelled=f"wrapped({{{spelled}}})",
        kind=kinds.wrapped({each: vector(face) for each, face in faces.items()}),
        why="its own code, elementwise, with vectors along the columns",
        divisions=tuple(
            Division(layer=name, what=each, number=module.get_parameter(each).numel(), axis=face)
            for each, face in faces.items()
        ),
    )
