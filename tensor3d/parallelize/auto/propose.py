"""Proposes a plan for `parallelize` from one run of a module on an example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from tensor3d.parallelize.auto.attention_trial import TriedAttention, try_attention
from tensor3d.parallelize.auto.op_rules import TraceResult, is_within
from tensor3d.parallelize.auto.proposal import PlanLine, Proposal, fold
from tensor3d.parallelize.auto.solver import LayerRuleChoice, LayerRuleChoices
from tensor3d.parallelize.auto.tracer import read
from tensor3d.parallelize.module_copy import hooks_on_activations
from tensor3d.parallelize.torch_attention import PackedRows
from tensor3d.parallelize.torch_layer_rules import advice, mixes

# --- What a plan cannot carry over, in words: each point with its module and the remedy -------------------------------


class UnresolvedItems:
    """What is open in a module.

    Attributes:
        left_out: layers that the plan leaves out, because the module around them has to be replaced as a whole: so that
            `parallelize` asks for it instead of running code that is wrong on a rank's block.
        words: by module name; "" is the module itself.
    """

    def __init__(
        self,
        module: nn.Module,
        reading: TraceResult,
        choices: LayerRuleChoices,
        layers: Mapping[str, LayerRuleChoice],
        tried: Mapping[str, TriedAttention],
    ) -> None:
        self.modules, self.reading, self.choices, self.layers = dict(module.named_modules()), reading, choices, layers
        self.tried = tried
        # What is planned as a whole, by its own code.
        self.own = {name for name, each in tried.items() if name in layers and layers[name].kind is each.rule}
        self.left_out: set[str] = set()
        self.replaced: set[str] = set()
        self.words: dict[str, list[str]] = {}
        self._attention()
        self._notes()
        self._foreign()
        self._parameters()
        self._idle()
        self._hooks()

    def lines(self, names: list[str]) -> Iterator[str]:
        """Modules that are open for the same reasons under one pattern, then what is open between modules."""
        told = {name: tuple(self.words[name]) for name in self.modules if name in self.words}
        kinds = {name: type(part).__name__ for name, part in self.modules.items()}
        folded = fold({name: (kinds[name], words) for name, words in told.items()}, names)
        for pattern, (kind, words) in folded.items():
            yield from (f"{pattern or 'the module itself'} ({kind}) {each}." for each in words)
        yield from (f"{clash}." for clash in self.choices.solution.clashes)

    def _say(self, name: str, words: str) -> None:
        self.words.setdefault(name, []).append(words)

    def _hooks(self) -> None:
        """Their code is called where nothing is followed, and on the cube it sees blocks."""
        for name, module in self.modules.items():
            if hooks := hooks_on_activations(module):
                self._say(
                    name,
                    f"has hooks ({', '.join(hooks)}), whose code is not read here, and which on the cube get this "
                    "rank's block of rows and columns. Take them off (handle.remove()), and register what you have "
                    "written for blocks with the module that parallelize gives",
                )

    def _replace(self, name: str, inside: list[str]) -> None:
        self.replaced.add(name)
        self.left_out.update(inside, [name] * bool(name))

    def _attention(self) -> None:
        for host, functions in self.reading.attending.items():
            inside = [name for name in self.layers if name and is_within(name, host) and (host or "." not in name)]
            if host in self.own:
                self.left_out.update(inside)
                continue
            self._replace(host, inside)
            self._say(
                host,
                f"does attention in its own forward ({', '.join(dict.fromkeys(functions))}), and a rank has to do it "
                f"for its own sequences and heads, on face y{self._not_by_own_code(host)}: rules.replace(build) with "
                "an Attention3D, or with a module of your own that calls "
                f"tensor3d.attention{self._its(inside, host)}",
            )

    def _not_by_own_code(self, host: str) -> str:
        """Why rules.own_attention does not serve, where it was tried."""
        tried = self.tried.get(host)
        reasons = (
            [] if tried is None else [tried.why_not] if tried.why_not else self.choices.against_own_attention(host)
        )
        return f", which its own code does not ({'; '.join(reasons)})" if reasons else ""

    def _notes(self) -> None:
        self.left_out.update(self.reading.unfit)
        for name in self.reading.notes:
            if any(name == host or (host and is_within(name, host)) for host in self.reading.attending):
                continue
            texts = self.choices.objections(name)
            if not texts:
                continue
            if name in self.own:
                self.left_out.update(each for each in self.layers if is_within(each, name))
                continue
            if name in self.layers or not self.choices.is_small(name):
                self.words.setdefault(name, []).extend(texts)
                continue
            own = [each for each in self.layers if each.rpartition(".")[0] == name]
            self._replace(name, own)
            self._say(name, f"{'; '.join(texts)}. rules.replace(build) is for it{self._its(own, name)}")

    def _foreign(self) -> None:
        for name in dict.fromkeys(call.layer for call in self.reading.calls if call.role == "foreign"):
            if any(is_within(name, each) for each in self._replicated()):
                module = self.modules[name]
                if isinstance(module, nn.modules.batchnorm._NormBase) and module.training:
                    self._say(name, f"is in training. {advice(module)}")
                continue
            words = f"cannot be cut. {advice(self.modules[name])}"
            if name in self.reading.enters:
                where, number = self.reading.enters[name]
                face, after = self.choices.solution.faces.face(number), self.reading.after.get(name, {})
                functions = ", ".join(dict.fromkeys(function for _, function in after))
                between = f" and what follows it ({functions})" if after else ""
                words += (
                    f". Its result enters face {face} at {where}: put it{between} in one module, planned as "
                    f'rules.replicated(("data", "x", "y", "z"), enters="{face}")'
                )
            self._say(name, words)

    def _parameters(self) -> None:
        """Layers that never ran, and parameters of modules with own code that are no vectors along the columns."""
        taken = [name for name in self.modules if name in self.reading.roles]
        taken += self._replicated()
        taken += [name for name in (*self.reading.attending, *self.replaced) if name]
        planned = {
            id(parameter)
            for name in self.layers
            for parameter in self.modules[name].parameters(recurse=name in self.reading.roles)
        }
        for name, module in self.modules.items():
            loose = [each for each, p in module.named_parameters(recurse=False) if id(p) not in planned]
            around = name in self.replaced or name in self.layers or any(is_within(name, each) for each in taken)
            if not loose or around or name in self.choices.roles:
                continue
            if name in self.reading.roles:
                self._say(name, f"was not called on the example. {advice(module)}")
            else:
                self._say(name, f"has parameters of its own ({', '.join(loose)}). {advice(module)}")

    def _idle(self) -> None:
        """What mixes rows or columns and never ran: nothing is known of what it would be given."""
        around = [*self._replicated(), *self.reading.attending, *self.replaced]
        for name, module in self.modules.items():
            outside = not any(each and is_within(name, each) for each in around)
            if outside and name not in self.reading.roles and mixes(module) and name not in self.reading.ran:
                self._say(
                    name, "was not called on the example, and mixes rows or columns: rules.keep() if it never sees any"
                )

    def _replicated(self) -> list[str]:
        return [name for name, choice in self.layers.items() if choice.spelled.startswith("replicated")]

    def _its(self, layers: list[str], name: str) -> str:
        """The layers inside a module that is to be replaced, as they would be planned by themselves."""
        if not layers:
            return ""
        spelled = (f"{each[len(name) :].lstrip('.')}: {self.layers[each].spelled}" for each in layers)
        return f" (its layers: {', '.join(spelled)})"


# --- Proposes a plan for `parallelize` from one run of a module on an example -----------------------------------------


def propose_plan(module: nn.Module, *args: Any, **kwargs: Any) -> Proposal:
    """Reads a single-device module and proposes a plan for `parallelize`, in words too.

        proposal = propose_plan(module, example)
        print(proposal)
        model = parallelize(module, cube, proposal.settled())

    The module runs once, in evaluation mode and without gradients, on the example and on its own device; it and torch's
    random generators are left as they were. The data is followed from layer to layer: a product changes the face,
    elementwise work keeps it, what is added up lies on one face, attention is done on face y, embeddings return face z;
    what is free starts on face z. Where this contradicts itself, a linear gets `turn=True`.

    The proposal depends on the module and the example alone; `proposal.check(cube)` says what does not divide, and
    `settled()` refuses while anything is open (`proposal.unresolved` lists it). Only what the example runs through is
    seen, and not what is made of a size by numpy, by `range`, by `str`, by `x.shape.numel()`, or with a float on its
    left (1.0 / x.shape[-1]). So compare one loss with the original's.

    Args:
        module: as it is called on one device.
        args, kwargs: of one call. A small batch will do.

    Raises:
        ValueError: the module raises on its example; the place is named.
    """
    reading, rows = read(module, args, kwargs), PackedRows()
    choices = LayerRuleChoices(module, reading, rows)
    tried = try_attention(module, [*reading.attending, *choices.gated()], args, kwargs, rows)
    layers = choices.of_layers() | dict(choices.of_containers()) | choices.of_attention(tried)
    points = UnresolvedItems(module, reading, choices, layers, tried)
    chosen = {name: choice for name, choice in layers.items() if name not in points.left_out}
    folded = fold(*_by_every_name(module, chosen))
    return Proposal(
        plan={pattern: choice.kind for pattern, choice in folded.items()},
        lines=tuple(PlanLine(pattern=pattern, kind=each.spelled, why=each.why) for pattern, each in folded.items()),
        remarks=tuple(_remarks(module, reading, choices, chosen)),
        unresolved=tuple(points.lines(list(_by_every_name(module, chosen)[1]))),
        rows=rows,
        module=type(module).__name__,
        divisions=tuple(division for choice in chosen.values() for division in choice.divisions),
    )


def _by_every_name(
    module: nn.Module, chosen: Mapping[str, LayerRuleChoice]
) -> tuple[dict[str, LayerRuleChoice], list[str]]:
    """Choices under all names of each module, as a plan needs them of a shared one; and all names there are."""
    names = {name: id(part) for name, part in module.named_modules(remove_duplicate=False)}
    by_identity = {names[name]: choice for name, choice in chosen.items()}
    return {name: by_identity[part] for name, part in names.items() if part in by_identity}, list(names)


def _remarks(
    module: nn.Module, reading: TraceResult, choices: LayerRuleChoices, chosen: Mapping[str, LayerRuleChoice]
) -> Iterator[str]:
    faces = choices.solution.faces
    touched = {number for call in reading.calls for number in (call.reads, call.returns) if number}
    for label, number in reading.inputs:
        if choices.solution.is_met(number, touched):
            yield f"the argument {label}: this rank's block on face {faces.face(number)}, as local_block cuts it"
    for label, number, since in reading.outputs:
        columns = ", with all columns on each rank" if since and since <= choices.heads else ""
        yield f"the result{f' {label}' * bool(label)}: on face {faces.face(number)}{columns}"
    shared: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    for names in shared.values():
        if len(names) > 1:
            yield f"{' and '.join(names)} are one parameter, and stay one on the cube"
    if any(type(part) is nn.Dropout for part in module.modules()):
        yield "every nn.Dropout becomes a Dropout3D by itself"
    if any(choice.spelled.startswith(("attention(", "own_attention(")) for choice in chosen.values()):
        yield "attention: call the model inside `with proposal.rows.holding(sequences):`"
    if reading.causal:
        yield "attention that hides what comes later needs no mask; one that does just that may be passed all the same"
