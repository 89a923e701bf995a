"""How long a server is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

LONGEST_WAIT = 60.0
_LONGEST_ASKED_WAIT = 3600.0


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How much is put up with.

    Raises:
        ValueError: fewer than 0 retries, or seconds that are none.
    """

    retries: int = 8
    """Failures in a row, without a new byte, after which a file is given up."""
    first_wait: float = 1.0
    """Seconds before the second attempt; twice as many before each further one, up to a minute."""
    timeout: float = 60.0
    """Seconds without a byte after which a connection counts as cut."""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError(f"retries must be at least 0. Got {self.retries}.")
        if not (self.first_wait >= 0 and 0 < self.timeout < float("inf")):
            raise ValueError(f"seconds must be positive. Got a wait of {self.first_wait}, a timeout of {self.timeout}.")

    def pause(self, failures: int, asked: float, beat: Callable[[int], None]) -> None:
        """Waits before the next attempt, for as long as the server has asked at least.

        `beat` hears of no bytes every second, so that whoever wants to stop this can do so.
        """
        wait = min(self.first_wait * 2 ** (failures - 1), LONGEST_WAIT)
        end = time.monotonic() + max(wait, min(asked, _LONGEST_ASKED_WAIT))
        while (left := end - time.monotonic()) > 0:
            beat(0)
            time.sleep(min(left, 1.0))
