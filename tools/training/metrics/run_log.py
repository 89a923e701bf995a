"""What every kind of training tells while it runs, on rank 0 alone: a progress line and metrics.jsonl. And the best of
its evaluations, with when to stop waiting for a better one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from tqdm import tqdm

from tensor3d import Cube
from tools.common.log import progress
from tools.training.metrics.jsonl import EVENT, JOURNAL, JsonlLogger

_log = logging.getLogger(__name__)


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
    restore: Callable[[], object] = lambda: None
    """Writes what else belongs into the folder, where somebody has removed that while the run goes on."""

    def __enter__(self: R) -> R:
        self._done, self._failing = self.first_step, False
        self._journal: JsonlLogger | None = None
        if self.shown:
            self.open_files()
        self._bar = self.bar()
        return self

    def open_files(self) -> None:
        """Those in the folder, which is made if it is not there. Raises OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._journal = JsonlLogger(self.directory / JOURNAL, first_step=self._done)
        if self._journal.left_out:
            self.say(
                f"{self.directory / JOURNAL}: {self._journal.left_out:,} of its lines were damaged, and are left out.",
                logging.WARNING,
            )

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
        """A checkpoint is complete, or has failed; what is left over beside one that is complete ends no run."""
        if outcome.path is not None and outcome.error is not None:
            self.say(f"step {outcome.step}: the checkpoint is written, but {outcome.error}", logging.WARNING)

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
                if self._journal.is_gone:
                    self._journal.close()
                    self.say(
                        f"{self.directory / JOURNAL} was removed: it begins anew after step {self._done}.",
                        logging.WARNING,
                    )
                    self.open_files()
                    self.restore()
            except OSError as problem:
                self._complain(problem)

    def stopped(self, samples: int, *, reached: bool) -> None:
        """The end. `reached`: what the run was to reach."""

    def say(self, line: str, level: int = logging.INFO) -> None:
        """One line of the log."""
        if self.shown:
            with suppress(OSError):
                _log.log(level, "%s", line)

    # --- what differs ---------------------------------------------------------------------------------------------

    def bar(self) -> tqdm[Any]:
        """Where no terminal shows it there is none."""
        return progress(total=self.steps, unit="step", shown=self.shown)

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
            told = f"{self.directory / JOURNAL} cannot be written ({problem}): the run goes on, lines are missing."
            self.say(told, logging.WARNING)
        self._failing = True


R = TypeVar("R", bound="RunLog[Any, Any]")


# --- Early stopping ---------------------------------------------------------------------------------------------------


class EarlyStopping:
    """Follows what evaluations cost, such as the held-out loss.

    Args:
        patience: evaluations in a row without a lower cost, after which to stop. 0: never.
        state: what `to_dict` gave, of a run that is resumed; patience may differ from that run's.

    Raises:
        ValueError: patience below 0, or a state that is none.
    """

    def __init__(self, patience: int, state: dict[str, Any] | None = None) -> None:
        if patience < 0:
            raise ValueError(f"patience must be at least 0 evaluations (0: never stop). Got {patience}.")
        self.patience = patience
        self.loss: float | None = None
        """The lowest cost; None before the first evaluation with a finite one."""
        self.step: int | None = None
        """Where the cost was that low."""
        self.waited = 0
        """Evaluations since then."""
        if state is not None:
            self._restore(state)

    def update(self, evaluation: EvaluationRecord) -> tuple[bool, bool]:
        """Whether this evaluation is the best so far, and whether to stop. The same on every rank, as the costs are.

        A cost equal to the best is no better; one that is not a number is never better.
        """
        # Any comparison with NaN is false.
        if evaluation.cost < (float("inf") if self.loss is None else self.loss):
            self.loss, self.step, self.waited = evaluation.cost, evaluation.step, 0
            return True, False
        self.waited += 1
        return False, 0 < self.patience <= self.waited

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, for a checkpoint."""
        return {"loss": self.loss, "step": self.step, "waited": self.waited}

    def _restore(self, state: dict[str, Any]) -> None:
        loss, step, waited = (state.get(name) for name in ("loss", "step", "waited"))
        none_yet = loss is None and step is None
        if not (none_yet or (isinstance(loss, float) and isinstance(step, int))) or not isinstance(waited, int):
            raise ValueError(
                f'the best evaluation must be like {{"loss": 1.5, "step": 100, "waited": 0}}. Got {state}.'
            )
        self.loss, self.step, self.waited = loss, step, waited
