"""Whether a folder is the same place for all nodes, and each of them can write there."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tensor3d.agree import in_words
from tools.doctor.findings import Finding, Names
from tools.doctor.judging import odd_ones, who_has

SEEN = 10.0
"""Seconds in which a file must be seen by other nodes: network file systems look again after some."""
_PREFIX = ".tensor3d-doctor-"

State = Mapping[str, str]
"""JSON of one folder on one node: `base`, its nearest part that exists, and `error`, empty where that is writable."""


def state_of(folder: Path) -> State:
    """How a folder looks from here. A file is written beside what is there, and gone when this returns."""
    folder = folder.absolute()
    base = next(path for path in (folder, *folder.parents) if path.exists())
    error = ""
    if not base.is_dir():
        error = "is a file"
    else:
        try:
            with tempfile.NamedTemporaryFile(prefix=_PREFIX, dir=base):
                pass
        except OSError as problem:
            error = problem.strerror or str(problem)
    return {"folder": str(folder), "base": str(base), "error": error}


def judge_states(states: Sequence[Sequence[State]], names: Names) -> list[Finding]:
    """What nodes say of the same folders.

    Args:
        states: by node and folder.
        names: of nodes.
    """
    found = []
    for of_nodes in zip(*states, strict=True):
        folder, paths = of_nodes[0]["folder"], [state["folder"] for state in of_nodes]
        if len(set(paths)) > 1:
            text = (
                f"a directory has different paths: {who_has(paths, names)}. Start in the same folder, or give it whole."
            )
            found.append(Finding(text=text, about=odd_ones(paths)))
            continue
        deepest = max((state["base"] for state in of_nodes), key=len)
        lost = [node for node, state in enumerate(of_nodes) if state["base"] != deepest]
        refused = [node for node, state in enumerate(of_nodes) if state["error"] and node not in lost]
        if lost:
            there = [node for node in range(len(of_nodes)) if node not in lost]
            what = folder if deepest == folder else f"{deepest}, for {folder},"
            text = (
                f"directory {what} is missing on {names.many(lost)} and there on {names.many(there)}. It must be the "
                "same place on all nodes: mount it there, or choose another one."
            )
            found.append(Finding(text=text, about=tuple(lost)))
        if refused:
            base, error = of_nodes[refused[0]]["base"], of_nodes[refused[0]]["error"]
            text = f"directory {folder} cannot be written on {names.many(refused)}: {base}: {error}."
            found.append(Finding(text=text, about=tuple(refused)))
    return found


@contextmanager
def probes(folders: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """A file in each folder, or in what there is of its path, until the end. Yields the word in their names, and why
    one cannot be written, if so."""
    word, problem = uuid.uuid4().hex, ""
    made: list[Path] = []
    try:
        for folder in folders:
            path = probe_of(folder, word)
            made.append(path)
            try:
                path.write_text(word)
            except OSError as error:
                problem = in_words(error)
        yield word, problem
    finally:
        for path in made:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def probe_of(folder: Path, word: str) -> Path:
    """Where the file for a folder is."""
    return Path(state_of(folder)["base"]) / f"{_PREFIX}{word}"


def sees(folders: Sequence[Path], word: str, wait: float) -> list[bool]:
    """Whether the file for each folder is there, after at most `wait` seconds in all."""
    paths = [probe_of(folder, word) for folder in folders]
    until = time.monotonic() + wait
    while not all(path.exists() for path in paths) and time.monotonic() < until:
        time.sleep(0.05)
    return [path.exists() for path in paths]


def judge_seen(seen: Sequence[Sequence[bool]], folders: Sequence[Path], names: Names) -> list[Finding]:
    """Findings for folders in which nodes do not see what node 0 has written there; `seen` by node and folder."""
    found = []
    for folder, of_nodes in zip(folders, zip(*seen, strict=True), strict=True):
        if lost := [node for node, there in enumerate(of_nodes) if not there]:
            text = (
                f"directory {folder} is another place on {names.many(lost)} than on {names.one(0)}: a file written on "
                "this one is not seen there. Checkpoints need one place for all nodes; choose one that they share."
            )
            found.append(Finding(text=text, about=tuple(lost)))
    return found
