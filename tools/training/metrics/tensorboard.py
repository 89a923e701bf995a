"""TensorBoard's files, which a run can do without."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tensor3d.files import sync

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger:
    """Writes TensorBoard's files in a folder. Where that fails, it says so and the run goes on without.

    Args:
        first_step: points of later steps, of a run that was killed, are hidden.
        say: for one line to the user.
    """

    def __init__(self, folder: Path, *, first_step: int, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._writer: SummaryWriter | None = None
        try:
            # Imported here: it takes a second, and seven of eight ranks do without.
            from torch.utils.tensorboard import SummaryWriter as Writer
        except ImportError:
            say("TensorBoard is not installed (pip install tensorboard): metrics.jsonl alone is written.")
        else:
            _let_the_second_pass(folder)
            self._writer = Writer(str(folder), purge_step=first_step + 1)

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """One point of each curve."""
        if self._writer is not None:
            try:
                for name, value in scalars.items():
                    self._writer.add_scalar(name, value, step)
            except OSError as problem:
                self._give_up(problem)

    def sync(self) -> None:
        """Waits until all points are on disk."""
        if self._writer is not None:
            try:
                self._writer.flush()
                for path in self._folder.glob("*tfevents*"):
                    sync(path)
            except OSError as problem:
                self._give_up(problem)

    def close(self) -> None:
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as problem:
                self._give_up(problem)

    def _give_up(self, problem: OSError) -> None:
        # Its thread has ended with the error, and would raise it again at every point.
        self._writer = None
        self._say(f"TensorBoard's files cannot be written any more ({problem}): the run goes on without.")


def _let_the_second_pass(folder: Path) -> None:
    """Waits while a file of this very second lies in the folder.

    TensorBoard reads a folder's files by name: the second of their beginning, the host, the process. The file of a run
    resumed in the second in which the one before began could come first, and its points would be hidden.
    """
    while list(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
        time.sleep(0.02)
