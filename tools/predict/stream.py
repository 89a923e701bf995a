"""Where queries come from, block by block; on a cube the first rank reads, and all ranks get the same."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from tensor3d import Cube
from tensor3d.distributed.object_collectives import run_on_rank0
from tools.common.log import progress
from tools.predict.inputs import Fields, InputProblem, LineReader, Query, query_of_line
from tools.predict.outputs import Outcome, OutputProgress
from tools.predict.predictor import Predictor

# --- What has been done, while it is done and at the end --------------------------------------------------------------


class StreamStats:
    """Counts texts, tokens and seconds.

    Args:
        is_shown: whether a line on standard error tells them while they grow.
    """

    def __init__(self, predictor: Predictor[Any], *, is_shown: bool) -> None:
        self._predictor, self._start = predictor, time.perf_counter()
        self._texts = self._skipped = 0
        self.bar = progress(unit=" texts", shown=is_shown, lines=True, dynamic_ncols=True)

    def add(self, batch: Sequence[Outcome]) -> None:
        self._texts += len(batch)
        self._skipped += sum(isinstance(result, InputProblem) for _, result in batch)
        seconds = time.perf_counter() - self._start
        self.bar.set_postfix_str(f"{self._predictor.tokens / seconds:,.0f} tokens/s", refresh=False)
        self.bar.update(len(batch))

    def in_words(self) -> str:
        seconds = time.perf_counter() - self._start
        texts = f"{self._texts:,} text{'' if self._texts == 1 else 's'}"
        named, unknown = self._predictor.named, self._predictor.unknown.in_words()
        return (
            f"{texts}, {self._predictor.truncated:,} truncated, {self._skipped:,} skipped, "
            + (f"{named:,} with the name of a special token (--special-tokens), " if named else "")
            + f"{seconds:.2f} s, {self._texts / seconds:,.1f} texts/s, "
            f"{self._predictor.tokens / seconds:,.0f} tokens/s{self._predictor.task.findings}"
            + (f"; {unknown}" if unknown else "")
        )


# --- Where queries come from, block by block --------------------------------------------------------------------------

Block = list[Query | InputProblem]
IDLE = 60.0
"""Seconds without input after which the ranks hear of each other all the same: they would give each other up."""


class ListInput:
    """Queries that are all there."""

    def __init__(self, queries: Sequence[Query | InputProblem]) -> None:
        self._queries: Block = list(queries)

    def take(self) -> Block | None:
        taken, self._queries = self._queries, []
        return taken or None


class StreamInput:
    """Queries of a stream of lines.

    Args:
        size: bytes of a block, about.
        wait: seconds that a block waits for more lines.
        is_plain: whether lines are texts, and not JSON.
        idle: seconds after which an empty block is given where no line has come; None: never.
    """

    def __init__(
        self, file: BinaryIO, fields: Fields, *, size: int, wait: float, is_plain: bool, idle: float | None
    ) -> None:
        self._lines, self._size, self._idle = LineReader(file, wait), size, idle
        self._fields, self._is_plain, self._number = fields, is_plain, 0

    def take(self) -> Block | None:
        """Raises what `LineReader.take` raises."""
        lines = self._lines.take(self._size, self._idle)
        if lines is None:
            return None
        first, self._number = self._number + 1, self._number + len(lines)
        return [
            query_of_line(line, self._fields, number, is_plain=self._is_plain)
            for number, line in enumerate(lines, start=first)
        ]


Source = ListInput | StreamInput


def blocks_of(source: Source | None, written: OutputProgress, cube: Cube) -> Iterator[Block]:
    """The blocks of the source, on every rank, until it ends or nobody reads the results any more.

    Args:
        source, written: of the first rank.

    Raises:
        ValueError: the input cannot be read or the output not be written; on every rank.
    """

    def take() -> Block | None:
        assert source is not None, "the first rank reads"
        return None if written.is_over() else source.take()

    while (block := run_on_rank0(cube, take)) is not None:
        yield block
