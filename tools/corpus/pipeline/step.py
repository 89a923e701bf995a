"""A step of the preparation: done in units, taken up again where it was killed, published whole."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tools.common.files import (
    append,
    check_folder,
    draft,
    make_folder,
    nearest,
    parsed_json,
    read_file,
    remove,
    write_file,
)
from tools.common.log import progress
from tools.corpus.pipeline.units import Context, Outcome, U, WorkItem
from tools.corpus.pipeline.workers import Options, Team

# --- step.json: what a finished folder is, and what lies in it --------------------------------------------------------

STEP, LEFT_OUT = "step.json", "left-out.jsonl"
VERSION = 1
"""Raised when the same input and settings would give other bytes."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A finished step. It holds nothing of the machine, the time or the workers: the same work gives the same bytes."""

    step: str
    settings: dict[str, Any]
    """Everything that decides the output."""
    counts: dict[str, Any]
    files: dict[str, int]
    """Bytes of every file, by its name below the folder."""
    left_out: int
    """Places left out because they were bad; listed in left-out.jsonl."""
    folder: Path

    def check(self) -> None:
        """Raises TypeError for what no step writes, in a file that somebody has changed."""
        numbers = [self.left_out, *dict(self.files).values()]
        known = isinstance(self.step, str) and isinstance(self.settings, dict) and isinstance(self.counts, dict)
        if not known or not all(type(number) is int and number >= 0 for number in numbers):
            raise TypeError("step, settings, counts, files and left_out are of other types")


def write_manifest(manifest: Manifest) -> None:
    values = {
        "step": manifest.step,
        "version": VERSION,
        "settings": manifest.settings,
        "counts": manifest.counts,
        "left_out": manifest.left_out,
        "files": manifest.files,
    }
    # Counts keep their order, in which they are shown: what was read, what was left out and why, what is there.
    write_file(manifest.folder / STEP, json.dumps(values, indent=1) + "\n")


def read_manifest(folder: Path, *steps: str) -> Manifest:
    """What the folder of a finished step holds.

    Args:
        folder: as the step's --output named it.
        steps: those that may have made it; none: any.

    Raises:
        ValueError: no such folder, unfinished, not of one of these steps, or a file that is missing or has another
            size.
    """
    path = folder / STEP
    wanted = " or ".join(f"`python -m tools.corpus {step}`" for step in steps) or "a step of tools.corpus"
    try:
        values = parsed_json(read_file(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"{folder.absolute()} is no output of {wanted}: there is no {STEP}. Run that step first."
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. Remove the folder and run {wanted} again.") from error
    try:
        manifest = Manifest(folder=folder, **{name: value for name, value in values.items() if name != "version"})
        version = values["version"]
        manifest.check()
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no record of a step. Remove the folder and run {wanted} again.") from error
    if version != VERSION:
        raise ValueError(f"{path} has version {version}, this program reads {VERSION}. Run {wanted} again.")
    if steps and manifest.step not in steps:
        raise ValueError(f"{folder} was made by the step {manifest.step!r}; what is needed is the output of {wanted}.")
    for name, size in manifest.files.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes"
            raise ValueError(f"{file} {state} where {STEP} speaks of {size} bytes. Run {wanted} again in a new folder.")
    return manifest


# --- A step of the preparation ----------------------------------------------------------------------------------------

T = TypeVar("T")
SETTINGS = "settings.json"


class Stage:
    """A step while its output is made, in `.NAME.partial` beside it: the folder to be, marks of units done, and
    what lies between two phases. Every rank makes one and calls the same methods in the same order. A context manager.

    Raises:
        ValueError: the output is there, made with other settings or by something else; work on it was begun with
            other settings; or another process is at it.
    """

    manifest: Manifest
    """Of the output, where it is done."""

    def __init__(self, output: Path, name: str, settings: dict[str, Any], team: Team, *, skip_bad: bool) -> None:
        self.name, self.output, self._team, self._skip_bad = name, output, team, skip_bad
        # As it comes back from JSON, so that it can be compared.
        self._settings: dict[str, Any] = json.loads(json.dumps({**settings, "skip_bad": skip_bad}))
        self._partial = output.with_name(f".{output.name}.partial")
        self.folder, self.scratch = self._partial / "output", self._partial / "scratch"
        self._outcomes: list[Outcome] = []
        self._lock = ExitStack()
        try:
            found = team.on_first(self._open)
        except BaseException:
            self._lock.close()
            raise
        self.done = found is not None
        if found is not None:
            self.manifest = found

    @classmethod
    def open(cls, options: Options, name: str, settings: dict[str, Any], team: Team) -> Stage:
        """The step that makes `options.output`."""
        check_folder(Path(options.output).parent)
        nearest(Path(options.output))
        # A link to an empty folder stands for that folder, also for what lies beside it.
        return cls(Path(options.output).resolve(), name, settings, team, skip_bad=options.skip_bad)

    def run(self, phase: str, units: Sequence[U], work: Callable[[U, Context], dict[str, Any]]) -> list[dict[str, Any]]:
        """Does the units that are not done yet, each by one worker.

        Args:
            phase: a name of its own in this step.
            units: the parts of the work, in the order of the output. How it is cut is a function of the settings alone.
            work: a function of a module, or a `partial` of one. It writes by `draft`, below `folder` or `scratch`.

        Returns:
            What `work` returned, in the order of the units.

        Raises:
            What `work` raises, on every rank.
        """
        if len({unit.name for unit in units}) < len(units):
            raise ValueError(f"two units of the phase {phase!r} have one name; their files would overwrite each other.")
        marks = self._partial / "marks" / phase
        task = WorkItem(work=work, folder=self.folder, scratch=self.scratch, marks=marks, skip_bad=self._skip_bad)
        self._team.on_first(lambda: marks.mkdir(parents=True, exist_ok=True))
        done = self._team.on_first(lambda: {unit.name: found for unit in units if (found := task.earlier(unit))})
        left = [unit for unit in units if unit.name not in done]
        total, before = sum(unit.size for unit in units), sum(unit.size for unit in units if unit.name in done)
        with progress(
            desc=f"{self.name}: {phase}", total=total, initial=before, unit="B", unit_scale=True,
            shown=self._team.rank == 0, lines=True,
        ) as bar:  # fmt: skip
            done.update(self._team.do(task, left, bar.update))
        outcomes = [done[unit.name] for unit in units]
        self._outcomes += outcomes
        return [outcome.result for outcome in outcomes]

    def on_first(self, do: Callable[[], T]) -> T:
        """What rank 0 makes of it, on every rank; or what it raises."""
        return self._team.on_first(do)

    def finish(self, counts: dict[str, Any]) -> Manifest:
        """Writes what the step has come to, and gives the folder its name."""
        self.manifest = self._team.on_first(lambda: self._finish(counts))
        self.done = True
        return self.manifest

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.close()

    def _open(self) -> Manifest | None:
        make_folder(self.output.parent)
        self._take_lock()
        if self._partial.is_symlink():
            self._partial.unlink()  # no step makes one: what it names is somebody else's
        is_done = (self.output / STEP).exists()
        if self._partial.exists() and not self.folder.exists():
            # Its output has got its name; what is left of it says nothing about another one, and must be gone for that.
            problem = remove(self._partial)
            if problem is not None and not is_done:
                raise problem
        if is_done:
            return self._check_done()
        if self.output.exists() and not (self.output.is_dir() and not any(self.output.iterdir())):
            raise ValueError(
                f"{self.output} exists and was not made by `python -m tools.corpus {self.name}`; it is not "
                "overwritten. Choose another --output."
            )
        self._partial.mkdir(exist_ok=True)
        self._check_begun()
        for folder in (self.scratch, self.folder):
            folder.mkdir(exist_ok=True)
        for left in self._partial.rglob("*.tmp"):
            remove(left)
        return None

    def _check_done(self) -> Manifest:
        manifest = read_manifest(self.output)
        same = manifest.settings == self._settings or (
            # Where nothing was bad, it makes no difference what was to be done about it.
            not manifest.left_out and {**manifest.settings, "skip_bad": self._skip_bad} == self._settings
        )
        if manifest.step != self.name or not same:
            raise ValueError(
                f"{self.output} was made by the step {manifest.step!r} with other settings or input "
                f"({_difference(manifest.settings, self._settings)}). Remove it, or choose another --output."
            )
        return manifest

    def _check_begun(self) -> None:
        path = self._partial / SETTINGS
        mine = {"step": self.name, **self._settings}
        try:
            begun = parsed_json(read_file(path)) if path.exists() else None
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}. Remove {self._partial} to begin afresh.") from error
        if begun is None or begun == {**mine, "skip_bad": False}:
            # The second: units that are done had nothing bad in them, so they are what --skip-bad makes of them.
            write_file(path, json.dumps(mine))
        elif begun != mine:
            raise ValueError(
                f"{self._partial} holds what a run with other settings or input has begun "
                f"({_difference(begun, mine)}). Go on with the same ones, or remove that folder to begin afresh."
            )

    def _take_lock(self) -> None:
        path = self.output.with_name(f".{self.output.name}.lock")
        file = self._lock.enter_context(append(path))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise BlockingIOError  # whoever had it has just taken it away, and somebody may have made another
        except BlockingIOError as error:
            raise ValueError(
                f"{self.output} is being written by another process. Wait for it, or choose another --output. (Under "
                "mpirun every rank takes itself for the only one where mpi4py is missing, or --workers is given.)"
            ) from error
        except OSError:
            pass  # a file system without locks: one process at a time is up to the user
        self._lock.callback(lambda: path.unlink(missing_ok=True))

    def _finish(self, counts: dict[str, Any]) -> Manifest:
        left_out = self._write_left_out()
        files = {
            path.relative_to(self.folder).as_posix(): path.stat().st_size
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }
        files.pop(STEP, None)
        manifest = Manifest(
            step=self.name, settings=self._settings, counts=counts, files=files, left_out=left_out, folder=self.folder
        )
        write_manifest(manifest)
        with suppress(FileNotFoundError):
            self.output.rmdir()  # an empty folder is in nobody's way
        os.rename(self.folder, self.output)
        # What cannot be removed now, such as a file that another machine still maps, is removed by the next run.
        remove(self._partial)
        return read_manifest(self.output)

    def _write_left_out(self) -> int:
        count = 0
        with draft(self.folder / LEFT_OUT) as file:
            for outcome in self._outcomes:
                count += outcome.skipped
                for place in outcome.left_out:
                    file.write(json.dumps(place).encode() + b"\n")
        if not count:
            (self.folder / LEFT_OUT).unlink()
        return count


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The settings that are not the same, short enough for a message."""
    names = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    return "; ".join(f"{name}: {_short(one.get(name))} there, {_short(other.get(name))} now" for name in names)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
