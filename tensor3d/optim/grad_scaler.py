"""The dynamic loss scale of fp16 (Micikevicius et al. 2018, arXiv 1710.03740, §3.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tensor3d.distributed.cube import Cube
from tensor3d.torch_private import amp_update_scale_

SMALLEST, LARGEST = 2.0**-24, 2.0**24
"""Bounds of the scale. fp16 spans 2**-24 (its least value) to 2**16. At 2**24 a gradient of 2**-48 is still seen, and
what is less is nothing; without a bound a model whose gradients in fp16 are all 0 would drive the scale to infinity.
At 2**-24 a gradient of 2**39 still fits, so what is not finite then is so at any scale; without a bound some hundred
such steps would leave a scale of 0, from which nothing comes back. The reciprocals of both are exact."""


class GradScaler:
    """Multiplies the loss, so that small gradients survive fp16, and finds the largest scale that does not overflow.

    A step whose gradients are not finite is skipped and multiplies the scale by `backoff_factor`; `growth_interval`
    good steps in a row multiply it by `growth_factor`. All is done on the device, without waiting. Every rank updates
    with the same `found_inf` (`clip_gradients` gives it), so all have the same scale: nothing is sent.

    Factors and an initial scale that are powers of two change no bit of a gradient that stays in range.

    Args:
        cube: where the scale lives.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(
        self,
        cube: Cube,
        *,
        initial: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if not SMALLEST <= initial <= LARGEST:
            raise ValueError(f"initial must be from 2**-24 to 2**24. Got {initial}.")
        if not 1 < growth_factor < math.inf:
            raise ValueError(f"growth_factor must be above 1 and finite. Got {growth_factor}.")
        if not 0 < backoff_factor < 1:
            raise ValueError(f"backoff_factor must be above 0 and below 1. Got {backoff_factor}.")
        if isinstance(growth_interval, bool) or not isinstance(growth_interval, int) or growth_interval < 1:
            raise ValueError(f"growth_interval must be a whole number of steps, at least 1. Got {growth_interval!r}.")
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.scale = torch.full((), initial, dtype=torch.float32, device=cube.device)
        """Scalar fp32: by what the loss is multiplied now."""
        self._good_steps = torch.zeros((), dtype=torch.int32, device=cube.device)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on."""
        return loss * self.scale

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """After a step.

        Args:
            found_inf: scalar fp32 on the cube's device, the same on every rank: 1 where the step was skipped, else 0.
        """
        amp_update_scale_(
            self.scale, self._good_steps, found_inf, self.growth_factor, self.backoff_factor, self.growth_interval
        )
        self.scale.clamp_(SMALLEST, LARGEST)

    def state_dict(self) -> dict[str, Tensor]:
        """The two tensors themselves, not copies: `scale` and `good_steps`, the good steps in a row."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state_dict` gave. Raises ValueError, and changes nothing, where it is something else."""
        if set(state) != {"scale", "good_steps"}:
            raise ValueError(f"the state of a loss scaler is scale and good_steps. Got {sorted(state)}.")
        scale, good_steps = float(state["scale"]), int(state["good_steps"])
        if not SMALLEST <= scale <= LARGEST or good_steps < 0:
            raise ValueError(
                f"a loss scale is from 2**-24 to 2**24, after 0 or more good steps. Got {scale} after {good_steps}. "
                "The checkpoint is damaged or from another program; resume from an earlier one."
            )
        self.scale.fill_(scale)
        self._good_steps.fill_(good_steps)
