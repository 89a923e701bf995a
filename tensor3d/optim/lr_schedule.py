"""The learning rate over a run, as a function of the step alone: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["linear", "polynomial", "cosine", "wsd", "constant"]
DecayShape = Literal["linear", "sqrt"]


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """A linear rise to the peak, then a schedule. Steps count from 0; step n follows n finished ones.

    | kind         | after the rise, as a share of the peak                                                       |
    | ------------ | -------------------------------------------------------------------------------------------- |
    | "linear"     | straight to 0 just after the last step                                                       |
    | "polynomial" | (1 - step/steps)**power, down to `floor`                                                     |
    | "cosine"     | half a cosine, down to `floor` (Loshchilov & Hutter 2017, without restarts)                  |
    | "wsd"        | 1, then to `floor` in the last `decay` of the steps (Hu et al. 2024, arXiv 2404.06395)         |
    | "constant"   | 1                                                                                            |

    The polynomial counts from the begin of the run and not from the end of the rise, as in BERT's and NVIDIA's code
    (power 0.5 for LAMB): where the rise ends the rate falls at once by (1 - warmup_steps/steps)**power.

    Raises:
        ValueError: a field out of range.
    """

    kind: Kind
    lr: float
    """The peak."""
    steps: int
    """Of the whole run."""
    warmup_steps: int = 0
    """Of the rise, which reaches the peak in its last step. 0: none."""
    power: float = 1.0
    """Of "polynomial"."""
    floor: float = 0.0
    """Share of the peak where "polynomial", "cosine" and "wsd" end."""
    decay: float = 0.1
    """Share of the steps in which "wsd" goes down."""
    decay_shape: DecayShape = "linear"
    """How "wsd" goes down: straight, or by 1 - sqrt(share of the way down), fast at first (Hägele et al. 2024, arXiv
    2405.18392)."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}. Got {self.kind!r}.")
        if self.decay_shape not in get_args(DecayShape):
            raise ValueError(f"decay_shape must be one of {', '.join(get_args(DecayShape))}. Got {self.decay_shape!r}.")
        for name, least in (("steps", 1), ("warmup_steps", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number, at least {least}. Got {value!r}.")
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps must be at most steps={self.steps}. Got {self.warmup_steps}.")
        for name in ("lr", "power"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite. Got {getattr(self, name)}.")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be a share of the peak, from 0 to 1. Got {self.floor}.")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be a share of the steps, above 0 and at most 1. Got {self.decay}.")
        if self.kind == "wsd" and self.warmup_steps + self._decay_steps > self.steps + 1:  # 1: both may be rounded up
            raise ValueError(
                f"warm-up and decay take {self.warmup_steps} + {self._decay_steps} steps; the run has {self.steps}. "
                "Make one of them shorter."
            )

    def at(self, step: int) -> float:
        """The rate of a step, from 0. Behind the last step it stays where the schedule ends.

        Raises:
            ValueError: a step below 0.
        """
        if step < 0:
            raise ValueError(f"step must be at least 0. Got {step}.")
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        left, falling = max(0.0, self.steps - step), max(1, self.steps - self.warmup_steps)
        if self.kind == "linear":
            return self.lr * left / falling  # in this order: the same bits as ever
        if self.kind == "polynomial":
            return self._above_floor((left / self.steps) ** self.power)
        if self.kind == "cosine":
            return self._above_floor(0.5 - 0.5 * math.cos(math.pi * left / falling))
        if self.kind == "wsd":
            ahead = min(1.0, left / self._decay_steps)
            return self._above_floor(ahead if self.decay_shape == "linear" else 1 - math.sqrt(1 - ahead))
        return self.lr

    @property
    def _decay_steps(self) -> int:
        return max(1, round(self.decay * self.steps))

    def _above_floor(self, share: float) -> float:
        return self.lr * (self.floor + (1 - self.floor) * share)
