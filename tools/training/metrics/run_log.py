"""What every kind of training tells while it runs: a progress line and metrics.jsonl. On rank 0 alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TextIO, TypeVar

from tqdm import tqdm

from tensor3d import Cube
from tools.training.metrics.jsonl import EVENT, JOURNAL, JsonlLogger


class StepRecord(Protocol):
    """The numbers of a step."""

    @property
    def step(self) -> int:
        """Steps done, this one included."""

    def record(self) -> dict[str, Any]:
        """For metrics.jsonl."""


class EvaluationRecord(Protocol):
    """The numbers of an evaluation."""

    @property
    def step(self) -> int: ...
    @property
    def cost(self) -> float:
        """By which evaluations are compared; lower is better."""

    def record(self) -> dict[str, Any]:
        """For metrics.jsonl."""


class CheckpointOutcome(Protocol):
    """How the writing of a checkpoint ended."""

    @property
    def step(self) -> int: ...
    @property
    def path(self) -> Path | None:
        """None where it failed."""

    @property
    def seconds(self) -> float:
        """That writing took, in the background or not."""

    @property
    def bytes(self) -> int: ...
    @property
    def error(self) -> str | None: ...


S = TypeVar("S", bound=StepRecord)
E = TypeVar("E", bound=EvaluationRecord)


@dataclass(kw_only=True)
class RunLog(Generic[S, E]):
    """Shows a run's metrics. With `shown=False` (every rank but 0) it tells nothing. Made to be subclassed: of what a
    training loop calls, this tells steps and evaluations alone."""

    directory: Path
    """The folder of the run: metrics.jsonl is written in it."""
    steps: int
    first_step: int = 0
    """Steps done before: what the folder says of later ones, from a run that was killed, is cut off."""
    shown: bool
    stream: TextIO | None = None
    """For what is said. Default: standard output."""

    def __enter__(self: R) -> R:
        self._done, self._failing = self.first_step, False
        self._journal: JsonlLogger | None = None
        if self.shown:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._journal = JsonlLogger(self.directory / JOURNAL, first_step=self.first_step)
        self._bar = self.bar()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._bar.close()
        if self._journal is not None:
            self._journal.close()

    # --- what a loop calls ------------------------------------------------------------------------------------------

    def ready(self, samples: int) -> None:
        """The first step begins."""

    def step(self, metrics: S) -> None:
        """A step is done."""
        self._done = metrics.step
        self._bar.set_postfix_str(self.in_words(metrics), refresh=False)
        # A log on a full disk ends no training.
        with suppress(OSError):
            self._bar.update()
        self._note("step", metrics.record())

    def evaluating(self, samples: int) -> None:
        """An evaluation begins."""

    def evaluation(self, metrics: E, *, best: bool, goes_on: bool) -> None:
        """It has ended.

        Args:
            best: no evaluation before was as good.
            goes_on: the run trains on.
        """
        self._note("evaluation", metrics.record())

    def boundary(self, step: int, cube: Cube) -> None:
        """After what is done between two steps; every rank calls it."""

    def checkpoint(self, outcome: CheckpointOutcome) -> None:
        """A checkpoint is complete, or has failed."""

    def event(self, name: str, **facts: Any) -> None:
        """Something that happened, for the journal alone: a restart, a signal, a spike of the loss.

        `facts` are JSON-able; `step` among them replaces the number of steps done.
        """
        self._note(EVENT, {"event": name, "step": self._done} | facts)

    def flush(self) -> None:
        """Puts all points on disk: before a checkpoint, so that a run that resumes from it has no gap."""
        if self._journal is not None:
            try:
                self._journal.sync()
            except OSError as problem:
                self._complain(problem)

    def stopped(self, samples: int, *, reached: bool) -> None:
        """The end. `reached`: what the run was to reach."""

    def say(self, line: str) -> None:
        """One line above the progress bar."""
        if self.shown:
            with suppress(OSError):
                tqdm.write(line, file=self.stream)

    # --- what differs ---------------------------------------------------------------------------------------------

    def bar(self) -> tqdm[Any]:
        """Where no terminal shows it there is none."""
        return tqdm(total=self.steps, unit="step", disable=None if self.shown else True)

    def in_words(self, metrics: S) -> str:
        """Of a step, beside the bar."""
        raise NotImplementedError

    def _note(self, kind: str, record: Mapping[str, Any]) -> None:
        if self._journal is not None:
            try:
                self._journal.write(kind, record)
                self._failing = False
            except OSError as problem:
                self._complain(problem)

    def _complain(self, problem: OSError) -> None:
        """Weeks of training do not end for want of a line; said once, until lines can be written again."""
        if not self._failing:
            self.say(f"{self.directory / JOURNAL} cannot be written ({problem}): the run goes on, lines are missing.")
        self._failing = True


R = TypeVar("R", bound="RunLog[Any, Any]")
