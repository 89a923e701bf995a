"""Seeds made of numbers."""

from __future__ import annotations

import numpy as np


def mix(*numbers: int) -> int:
    """A seed below 2**63 that depends on every one of `numbers` (whole numbers of at least 0) and on their order."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
