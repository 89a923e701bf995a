"""What every benchmark is built on: options that say their bounds, and one way from the command line to what it found.

A benchmark is a frozen dataclass: its fields are its options, its docstring is its help. `Benchmark.run` checks what
the fields declare (`Count`, `AtLeast`, `NewFile`, `Picture`), asks the subclass what is to be done (`plan`) and to do
it (`measure`), and shows and writes the `Report` that comes back.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar, get_args, get_type_hints

from tensor3d import CubeShape
from tensor3d.distributed import process_group
from tools.common.bounds import AtLeast, Bound
from tools.common.files import check_output
from tools.common.machine import Machine, heading, write_json
from tools.common.plotting import check_picture, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


import dataclasses
from abc import ABC

import tyro

_log = logging.getLogger(__name__)

# --- What every subcommand is -----------------------------------------------------------------------------------------


class Subcommand(ABC):
    """One of them. Its fields are its options; its docstring is its help."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        """An instance with the values of what is not given, which may depend on the arguments (a recipe's path).

        Raises:
            ValueError: a file among the arguments that cannot be read.
        """
        options: Any = cls
        return options(**{field.name: tyro.MISSING for field in dataclasses.fields(options) if is_required(field)})

    @abstractmethod
    def run(self, arguments: Sequence[str]) -> int:
        """Measures, prints and writes; returns the exit status.

        Args:
            arguments: the command line, to be written beside the figures.

        Raises:
            ValueError: an option that cannot be; before any process is started.
            RankFailedError: a process failed.
        """


def is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


P = TypeVar("P")

# --- What an option may be, declared with its type --------------------------------------------------------------------


@dataclass(frozen=True)
class NewFile:
    """A file that is written at the end."""

    def check(self, option: str, value: Path, others: Sequence[Path]) -> None:
        check_output(value, option, others=others)


@dataclass(frozen=True)
class Picture:
    """The same, a picture."""

    def check(self, option: str, value: Path, others: Sequence[Path]) -> None:
        check_picture(value, option, others=others)


Count = Annotated[int, AtLeast(1)]
Natural = Annotated[int, AtLeast(0)]
PictureFile = Annotated[Path | None, Picture()]


def check_options(options: object) -> None:
    """Raises ValueError for the first option that breaks a rule of its own."""
    paths = {name: value for name, value in vars(options).items() if isinstance(value, Path)}
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        value = getattr(options, name)
        for rule in _rules(hint) if value is not None else ():
            option = f"--{name.replace('_', '-')}"
            if not isinstance(rule, Bound):
                rule.check(option, value, [path for other, path in paths.items() if other != name])
            elif (needed := rule.needed(value)) is not None:
                raise ValueError(f"{option} must be {needed}. Got {value}.")


def _rules(hint: Any) -> Iterator[Bound | NewFile | Picture]:
    yield from (each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Bound | NewFile | Picture))
    for inner in get_args(hint):
        yield from _rules(inner)


def listed(option: str, text: str, known: Iterable[str], *, needs: str | None = None, least: int = 1) -> list[str]:
    """The names of an option, each once, in their order.

    Args:
        text: names with commas.
        needs: one that must be among them.
        least: how many there must be.

    Raises:
        ValueError: a name that is not known, or what is needed is not there.
    """
    known = list(known)
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if not set(names) <= set(known) or len(names) < least or (needs is not None and needs not in names):
        some = "some" if least == 1 else "at least two"
        also = "" if needs is None else f", {needs} among them"
        near = [each for name in names if name not in known for each in get_close_matches(name.lower(), known, n=1)]
        meant = f" Did you mean {','.join(near)}?" if near else ""
        raise ValueError(f"{option} must be {some} of {','.join(known)}{also}. Got {text!r}.{meant}")
    return names


def seeds_of(text: str) -> list[int]:
    """The numbers of `--seeds`. Raises ValueError for fewer than two, or what is none."""
    texts = [part.strip() for part in text.split(",")]
    if not all(each.isdecimal() for each in texts) or len(set(texts)) < max(2, len(texts)):
        raise ValueError(
            f"--seeds must be at least two different whole numbers with commas: a deviation needs two. Got {text!r}."
        )
    return [int(each) for each in texts]


def cubes_of(text: str, data_parallel: int = 1) -> list[CubeShape]:
    """The cubes of XxYxZ,XxYxZ,... Raises ValueError for what is none."""
    return [CubeShape.parse(part, data_parallel) for part in text.split(",")]


# --- What a benchmark is ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a benchmark has found."""

    lines: Sequence[str] = ()
    """For the screen, below the machine."""
    content: Mapping[str, Any] | None
    """For the file, below its heading. None: there are no figures, and nothing is shown or written but faults."""
    faults: Sequence[str] = ()
    """What makes the figures wrong, in words: for standard error, with exit status 1."""
    well: bool = True
    """False: exit status 1, for a reason that stands among the lines."""
    shown: bool = True
    """Whether this process is the one that tells: under torchrun, rank 0."""
    picture: Callable[[], Figure] | None = None
    """Draws what `--plot` asks for."""


ONE_PROCESS = "this benchmark is one process. Call it without torchrun, srun or mpirun."
OWN_PROCESSES = "this benchmark starts its processes itself, on one machine. Call it without torchrun, srun or mpirun."


@dataclass(frozen=True, kw_only=True)
class Benchmark(Subcommand, Generic[P]):
    """One measurement. P is what `plan` makes of the options, and `measure` takes."""

    output: Annotated[Path | None, NewFile()] = None
    """JSON file for all figures."""

    launcher: ClassVar[str | None] = None
    """Why it refuses to be started by torchrun. None: it does not."""
    at_once: ClassVar[bool] = False
    """Whether the machine is told before anything is measured, because there is more to tell on the way."""

    def run(self, arguments: Sequence[str]) -> int:
        plan = self.check(arguments)
        machine = Machine.here()
        if self.at_once:
            print(machine, flush=True)
        report = self.measure(plan)
        if report.shown:
            self._tell(report, machine, arguments)
        return 0 if report.well and not report.faults else 1

    def check(self, arguments: Sequence[str] = ()) -> P:
        """What is to be done. Raises ValueError for what can be seen before any process is started."""
        if self.launcher is not None and process_group.is_launched():
            raise ValueError(self.launcher)
        check_options(self)
        return self.plan()

    def plan(self) -> P:
        """The same, of what options cannot say of themselves."""
        return None  # type: ignore[return-value]  # nothing is left to find out

    @abstractmethod
    def measure(self, plan: P) -> Report:
        """Does it.

        Raises:
            RankFailedError: a process failed.
        """

    def settled(self) -> Mapping[str, Any]:
        """What the file says of the options before all figures."""
        return {}

    def _tell(self, report: Report, machine: Machine, arguments: Sequence[str]) -> None:
        if report.content is not None:
            for line in report.lines if self.at_once else [str(machine), *report.lines]:
                print(line, flush=True)
            plot = getattr(self, "plot", None)
            if plot is not None and report.picture is not None:
                save(report.picture(), plot)
                print(f"written: {plot}", flush=True)
            if self.output is not None:
                write_json(self.output, {**heading(arguments, machine), **self.settled(), **report.content})
                print(f"written: {self.output}", flush=True)
        for fault in report.faults:
            _log.error("tools.bench: %s", fault)
