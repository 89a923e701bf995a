"""The best evaluation of a run, and when to stop waiting for a better one."""

from __future__ import annotations

from typing import Any

from tools.training.metrics.run_log import EvaluationRecord


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
