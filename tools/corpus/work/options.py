"""What every step can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.corpus.work.mpi import connect
from tools.corpus.work.team import Team, local_team


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every step."""

    output: Path
    """Folder to write. It appears when it is complete; what a killed run has done is kept beside it, and the same
    command goes on from there."""
    skip_bad: bool = False
    """Leave out what is damaged, count it and list it in left-out.jsonl, instead of stopping there."""
    workers: int | None = None
    """Processes of this machine. Default: as many as there are cores, or under mpirun the ranks of the job."""

    def team(self) -> Team:
        """Who does the work: processes of this machine, or under mpirun the ranks. ValueError for less than one."""
        # With --workers MPI is not even looked for: on some machines it cannot be where no job is.
        return local_team(self.workers) if self.workers is not None else connect() or local_team()
