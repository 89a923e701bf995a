"""What a plan cannot carry over, in words: each point with its module and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from tensor3d.parallel.advice import advice, mixes
from tensor3d.parallel.choosing import Choice, Choices
from tensor3d.parallel.facts import Reading, is_within, role_of
from tensor3d.parallel.folding import fold


class OpenPoints:
    """What is open in a module.

    Attributes:
        left_out: layers that the plan leaves out, because the module around them has to be replaced as a whole: so that
            `parallelize` asks for it instead of running code that is wrong on a rank's block.
        words: by module name; "" is the module itself.
    """

    def __init__(self, module: nn.Module, reading: Reading, choices: Choices, layers: Mapping[str, Choice]) -> None:
        self.modules, self.reading, self.choices, self.layers = dict(module.named_modules()), reading, choices, layers
        self.left_out: set[str] = set()
        self.replaced: set[str] = set()
        self.words: dict[str, list[str]] = {}
        self._attention()
        self._notes()
        self._foreign()
        self._parameters()
        self._idle()

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

    def _replace(self, name: str, inside: list[str]) -> None:
        self.replaced.add(name)
        self.left_out.update(inside, [name] * bool(name))

    def _attention(self) -> None:
        for host, functions in self.reading.attending.items():
            inside = [name for name in self.layers if name and is_within(name, host) and (host or "." not in name)]
            self._replace(host, inside)
            self._say(
                host,
                f"does attention in its own forward ({', '.join(dict.fromkeys(functions))}), and a rank has to do it "
                "for its own sequences and heads, on face y: kinds.replace(build) with an Attention3D, or with a "
                f"module of your own that calls tensor3d.attention{self._its(inside, host)}",
            )

    def _notes(self) -> None:
        self.left_out.update(self.reading.unfit)
        for name in self.reading.notes:
            if any(name == host or (host and is_within(name, host)) for host in self.reading.attending):
                continue
            texts = self.choices.objections(name)
            if not texts:
                continue
            if name in self.layers or not self._is_small(name):
                self.words.setdefault(name, []).extend(texts)
                continue
            own = [each for each in self.layers if each.rpartition(".")[0] == name]
            self._replace(name, own)
            self._say(name, f"{'; '.join(texts)}. kinds.replace(build) is for it{self._its(own, name)}")

    def _is_small(self, name: str) -> bool:
        """Whether a module is to be replaced as a whole; of a large one, the parts keep their lines in the plan."""
        parts = [part for part in self.modules[name].children() if next(part.parameters(), None) is not None]
        return bool(name) and all(role_of(part) is not None for part in parts)

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
                    f'kinds.replicated(("data", "x", "y", "z"), enters="{face}")'
                )
            self._say(name, words)

    def _parameters(self) -> None:
        """Layers that never ran, and parameters of modules with own code that are no vectors along the columns."""
        taken = [name for name, module in self.modules.items() if role_of(module) is not None]
        taken += self._replicated()
        taken += [name for name in (*self.reading.attending, *self.replaced) if name]
        planned = {
            id(parameter)
            for name in self.layers
            for parameter in self.modules[name].parameters(recurse=role_of(self.modules[name]) is not None)
        }
        for name, module in self.modules.items():
            loose = [each for each, p in module.named_parameters(recurse=False) if id(p) not in planned]
            around = name in self.replaced or name in self.layers or any(is_within(name, each) for each in taken)
            if not loose or around or name in self.choices.roles:
                continue
            if role_of(module) is not None:
                self._say(name, f"was not called on the example. {advice(module)}")
            else:
                self._say(name, f"has parameters of its own ({', '.join(loose)}). {advice(module)}")

    def _idle(self) -> None:
        """What mixes rows or columns and never ran: nothing is known of what it would be given."""
        around = [*self._replicated(), *self.reading.attending, *self.replaced]
        for name, module in self.modules.items():
            outside = not any(each and is_within(name, each) for each in around)
            if outside and role_of(module) is None and mixes(module) and name not in self.reading.ran:
                self._say(
                    name, "was not called on the example, and mixes rows or columns: kinds.keep() if it never sees any"
                )

    def _replicated(self) -> list[str]:
        return [name for name, choice in self.layers.items() if choice.spelled.startswith("replicated")]

    def _its(self, layers: list[str], name: str) -> str:
        """The layers inside a module that is to be replaced, as they would be planned by themselves."""
        if not layers:
            return ""
        spelled = (f"{each[len(name) :].lstrip('.')}: {self.layers[each].spelled}" for each in layers)
        return f" (its layers: {', '.join(spelled)})"
