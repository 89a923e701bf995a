"""How far a run has come, beside its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Ending = Literal["steps", "target", "patience", "signal"]
"""Why a run ended: all steps done, accuracy reached, no better evaluation for too long, a signal."""


@dataclass(kw_only=True)
class Standing:
    """How far a run has come, beside its weights; kept in its checkpoints."""

    step: int = 0
    """Steps done."""
    samples: int = 0
    """Sequences trained on."""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    """Up to now."""
    evaluation_due: bool = False
    """Whether a signal has kept the evaluation of this step from being done; it then comes first."""
    seconds: float = 0.0
    """Of training so far, evaluations and checkpoints included, restarts not."""
    ending: Ending | None = None
    """Why the run ended, if it did."""

    @classmethod
    def of(cls, progress: Mapping[str, Any]) -> Standing:
        """That of a checkpoint."""
        known = {field.name for field in dataclasses.fields(cls)}
        told = {name: value for name, value in progress.get("standing", {}).items() if name in known}
        return cls(**(told | {"step": progress["step"]}))
