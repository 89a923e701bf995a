"""What has been done, while it is done and at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from tools.predict.predictor import Predictor
from tools.predict.queries import Problem
from tools.predict.writing import Outcome


class Tally:
    """Counts texts, tokens and seconds.

    Args:
        is_shown: whether a line on standard error tells them while they grow.
    """

    def __init__(self, predictor: Predictor[Any], *, is_shown: bool) -> None:
        self._predictor, self._start = predictor, time.perf_counter()
        self._texts = self._skipped = 0
        self.bar = tqdm(unit=" texts", disable=not is_shown, file=sys.stderr, dynamic_ncols=True)

    def add(self, batch: Sequence[Outcome]) -> None:
        self._texts += len(batch)
        self._skipped += sum(isinstance(result, Problem) for _, result in batch)
        seconds = time.perf_counter() - self._start
        self.bar.set_postfix_str(f"{self._predictor.tokens / seconds:,.0f} tokens/s", refresh=False)
        self.bar.update(len(batch))

    def in_words(self) -> str:
        seconds = time.perf_counter() - self._start
        texts = f"{self._texts:,} text{'' if self._texts == 1 else 's'}"
        return (
            f"{texts}, {self._predictor.truncated:,} truncated, {self._skipped:,} skipped, {seconds:.2f} s, "
            f"{self._texts / seconds:,.1f} texts/s, {self._predictor.tokens / seconds:,.0f} tokens/s"
        )
