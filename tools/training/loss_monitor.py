"""What to say of a run that goes wrong: which tensor is not finite, and a loss that jumps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from tensor3d import Cube, local
from tensor3d.distributed.object_collectives import all_gather_object

_SHOWN = 8  # ranks that a message lists
_FLOOR = 0.01  # of the usual loss: a loss that does not move at all has no usual deviation
_SIGMA = 1.4826  # standard deviation over median absolute deviation, for a normal distribution


def first_non_finite(
    parameters: Iterable[tuple[str, nn.Parameter]], cube: Cube, *, norms: Tensor | None = None
) -> str | None:
    """Names what is nan or infinite, and on which ranks; None if all is finite everywhere. The same on every rank.

    For a step that is known to have gone wrong: it waits for the device, and all ranks call it. Gradients have been
    summed over ranks by then, so a copy is bad on each rank that holds it.

    Args:
        parameters: named, in the model's order, the same on every rank.
        norms: (parameters,): norms of this rank's gradients before they were clipped (`GradientNorm.parts`), for
            gradients that have been clipped (by a norm that is not finite, which spoils all of them) or are gone.
            None: read off the gradients that there are.

    Raises:
        ValueError: `norms` has another length than there are parameters: leave out those without a gradient.
    """
    named = list(parameters)
    if norms is not None and len(norms) != len(named):
        raise ValueError(
            f"norms must be one a parameter, {len(named)}. Got {len(norms)}. Leave out parameters without a gradient."
        )
    held = [(name, local(p.grad)) for name, p in named if p.grad is not None]
    with torch.no_grad():
        weights = _bad([name for name, _ in named], _finite([local(p) for _, p in named]))
        if norms is None:
            gradients = _bad([name for name, _ in held], _finite([gradient for _, gradient in held]))
        else:
            gradients = _bad([name for name, _ in named], norms.isfinite())
    everyone = all_gather_object(cube, (weights, gradients))
    order = [name for name, _ in named]
    bad_weights = _ranks_by_name([names for names, _ in everyone], order)
    if bad_weights:
        name, ranks = next(iter(bad_weights.items()))
        return f"the weight {name} is not finite {_on(ranks, cube)}{_more(len(bad_weights) - 1, 'weight')}"
    bad, count = _ranks_by_name([names for _, names in everyone], order), len(held if norms is None else named)
    if not bad:
        return None
    # The pass goes from the last parameter to the first, and what is not finite spreads on its way.
    name, ranks = list(bad.items())[-1]
    if len(bad) == count and count > 1:
        return f"all {count} gradients are not finite, {name} {_on(ranks, cube)}: it came with the loss or its scale"
    return f"the gradient of {name} is not finite {_on(ranks, cube)}{_more(len(bad) - 1, 'gradient')}"


class LossSpikeDetector:
    """Reports a loss that jumps: above the median of the last `window` by `factor` usual deviations.

    The usual deviation is the median absolute one, which a jump in the window does not spoil. Until the window is full
    nothing is reported; a jump is reported where it begins, and again only after the loss has come back.

    Args:
        factor: in standard deviations, as far as the loss is normally distributed. 0: nothing is reported.
        losses: of the steps before, of a run that is resumed.

    Raises:
        ValueError: a window below 3, or a factor below 0.
    """

    def __init__(self, window: int = 100, factor: float = 10.0, losses: Iterable[float] = ()) -> None:
        if window < 3:
            raise ValueError(f"a spike is seen against at least 3 losses. Got window={window}.")
        if not 0 <= factor < math.inf:
            raise ValueError(f"factor must be a number of usual deviations, at least 0 (0: off). Got {factor}.")
        self._factor = factor
        self._last = deque(losses, maxlen=window)
        self._above = False

    @property
    def losses(self) -> list[float]:
        """Those against which the next is held."""
        return list(self._last)

    def update(self, step: int, loss: float) -> str | None:
        """A sentence where a spike begins. A loss that is not finite is no spike and is left out."""
        if self._factor == 0 or not math.isfinite(loss):
            return None
        sentence = self._judge(step, loss) if len(self._last) == self._last.maxlen else None
        self._last.append(loss)
        return sentence

    def _judge(self, step: int, loss: float) -> str | None:
        usual = statistics.median(self._last)
        deviation = _SIGMA * statistics.median(abs(value - usual) for value in self._last)
        deviation = max(deviation, _FLOOR * abs(usual))
        before, self._above = self._above, loss > usual + self._factor * deviation
        if before or not self._above:
            return None
        return (
            f"step {step}: the loss jumped to {loss:.4g}, from {usual:.4g} usual in the {len(self._last)} steps before "
            f"({(loss - usual) / deviation:.0f} times its usual deviation)"
        )


def _finite(tensors: Sequence[Tensor]) -> Tensor:
    """(tensors,) of bool."""
    return torch.stack([tensor.isfinite().all() for tensor in tensors]) if tensors else torch.ones(0, dtype=torch.bool)


def _bad(names: Sequence[str], finite: Tensor) -> list[str]:
    """Those whose tensor is not; one look at the device for all."""
    return [name for name, fine in zip(names, finite.tolist(), strict=True) if not fine]


def _ranks_by_name(found: Sequence[Sequence[str]], order: Sequence[str]) -> dict[str, list[int]]:
    """By name, in the model's order: the ranks that have found it."""
    ranks = {name: [rank for rank, names in enumerate(found) if name in names] for name in order}
    return {name: where for name, where in ranks.items() if where}


def _on(ranks: Sequence[int], cube: Cube) -> str:
    if len(ranks) == cube.shape.ranks:
        return "on every rank" if len(ranks) > 1 else "on rank 0"
    listed = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"on rank{'s' if len(ranks) > 1 else ''} {listed} of {cube.shape.ranks}"


def _more(count: int, kind: str) -> str:
    return f" (and {count} other {kind}{'s' if count > 1 else ''})" if count else ""
