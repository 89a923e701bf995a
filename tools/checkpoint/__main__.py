"""`python -m tools.checkpoint inspect DIR [--json]`, `python -m tools.checkpoint verify DIR [--all] [--values]`

DIR is a checkpoint, a folder of checkpoints or a run; of several checkpoints the newest is meant.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Any

import tyro

from models.folder_kinds import instead
from tensor3d import checkpoint
from tensor3d.checkpoint import CheckpointIndex, StoredTensor
from tools.common.cli import run_main
from tools.common.log import take_verbose
from tools.common.machine import format_table
from tools.common.parse import parse_options

# --- What a checkpoint holds, for people and for programs -------------------------------------------------------------

KINDS = ("model", "optimizer", "fp8", "extra", "random")


def found(folder: Path, *, every: bool) -> list[Path]:
    """The checkpoints that are meant by a checkpoint, a folder of checkpoints or a run: the newest, or every one.

    Raises:
        ValueError: there is none.
    """
    if folder.name.startswith("step-") or (folder / "progress.json").exists():
        return [folder]
    there = checkpoint.complete(folder) or checkpoint.complete(folder / "checkpoints")
    if not there:
        raise ValueError(
            f"{folder.absolute()} holds no checkpoint.{instead(folder)} Name a checkpoint (step-NNNNNNNN), a folder of "
            "checkpoints or a run."
        )
    if every:
        return there
    newest = checkpoint.latest(there[0].parent)  # which tells of those that may be newer
    assert newest is not None, "there are some"
    return [newest]


def as_text(contents: CheckpointIndex) -> str:
    """Facts, totals by kind, and every tensor."""
    progress = contents.progress
    lines = [
        f"{contents.folder}",
        f"  step {progress['step']}, written on {progress['cube']} ({progress['ranks']} ranks), optimiser "
        f"{progress['optimizer']}, {contents.bytes:,} bytes in {len(contents.files)} files",
    ]
    known = {"step", "cube", "ranks", "optimizer", "version", "serial"}
    lines += [f"  {name}: {json.dumps(value)}" for name, value in progress.items() if name not in known]
    rows = [(kind, f"{tensors}", f"{numbers:,}", f"{size:,}") for kind, tensors, numbers, size in totals(contents)]
    lines += ["", *format_table(("kind", "tensors", "numbers", "bytes"), rows), ""]
    table = [_row(tensor) for tensor in _sorted(contents)]
    return "\n".join([*lines, *format_table(("tensor", "shape", "type", "bytes", "blocks"), table)])


def as_json(contents: CheckpointIndex) -> dict[str, Any]:
    """The same, as an object for JSON."""
    return {
        "folder": str(contents.folder),
        "progress": contents.progress,
        "bytes": contents.bytes,
        "files": {name: {"bytes": file.bytes, "crc32": f"{file.crc32:08x}"} for name, file in contents.files.items()},
        "kinds": {
            kind: {"tensors": tensors, "numbers": numbers, "bytes": size}
            for kind, tensors, numbers, size in totals(contents)
        },
        "tensors": {
            tensor.name: {
                "shape": tensor.shape,
                "dtype": _type(tensor),
                "bytes": tensor.bytes,
                "blocks": len(tensor.chunks),
            }
            for tensor in _sorted(contents)
        },
    }


def totals(contents: CheckpointIndex) -> list[tuple[str, int, int, int]]:
    """Of each kind that there is: tensors, numbers in them, bytes."""
    result = []
    for kind in dict.fromkeys((*KINDS, *map(_kind, contents.tensors.values()))):
        tensors = [tensor for tensor in contents.tensors.values() if _kind(tensor) == kind]
        if tensors:
            result.append((kind, len(tensors), sum(prod(t.shape) for t in tensors), sum(t.bytes for t in tensors)))
    return result


def _sorted(contents: CheckpointIndex) -> Sequence[StoredTensor]:
    """By kind, then as they were stored."""
    tensors: Iterable[StoredTensor] = contents.tensors.values()
    return sorted(tensors, key=lambda tensor: KINDS.index(_kind(tensor)) if _kind(tensor) in KINDS else len(KINDS))


def _row(tensor: StoredTensor) -> tuple[str, ...]:
    shape = "x".join(map(str, tensor.shape)) or "one"
    return tensor.name, shape, _type(tensor), f"{tensor.bytes:,}", str(len(tensor.chunks))


def _kind(tensor: StoredTensor) -> str:
    return tensor.name.partition(".")[0]


def _type(tensor: StoredTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# --- The command ------------------------------------------------------------------------------------------------------

app = tyro.extras.SubcommandApp()


@app.command
def inspect(folder: tyro.conf.Positional[Path], *, json_: Annotated[bool, tyro.conf.arg(name="json")] = False) -> int:
    """Shows what a checkpoint holds: its step and facts, and every tensor with shape, type and size.

    Args:
        folder: A checkpoint, or the newest one of a folder of checkpoints or of a run.
        json_: Print one JSON object.
    """
    contents = checkpoint.read_contents(found(folder, every=False)[0])
    print(json.dumps(as_json(contents), indent=2) if json_ else as_text(contents))
    return 0


@app.command
def verify(
    folder: tyro.conf.Positional[Path],
    *,
    all_: Annotated[bool, tyro.conf.arg(name="all")] = False,
    values: bool = False,
) -> int:
    """Reads every byte of a checkpoint and compares it with what was written; names each damaged or missing file, and
    what else lies in the folder, which is never opened and makes no checkpoint bad.

    Args:
        folder: A checkpoint, or the newest one of a folder of checkpoints or of a run.
        all_: All checkpoints of the folder.
        values: Also look for numbers that are not finite (NaN, inf), which a checkpoint keeps as well as any.
    """
    bad = 0
    for path in found(folder, every=all_):
        problems, judgement = checkpoint.verify(path), "DAMAGED"
        strangers = [] if problems else checkpoint.strangers(path)
        if values and not problems:
            problems, judgement = checkpoint.value_problems(checkpoint.read_contents(path)), "NOT FINITE"
        bad += bool(problems)
        print(f"{path}: {judgement if problems else 'good'}")
        for problem in problems:
            print(f"  {problem}")
        for name in strangers:
            print(f"  {name} is a stranger: no save has written it, and nothing reads it")
    return 1 if bad else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where `verify` found damage or numbers that are not finite; 2 for a bad call or what is no
    checkpoint."""
    words, verbose = take_verbose(arguments)
    commands: dict[str, Callable[..., int]] = {"inspect": inspect, "verify": verify}
    chosen, *rest = words or [""]
    prog, config = "python -m tools.checkpoint", (tyro.conf.FlagCreatePairsOff,)

    def run() -> int:
        status: int
        if chosen in commands:
            # Alone, so that messages are about its own options.
            status = parse_options(commands[chosen], rest, f"{prog} {chosen}", config=config)
        else:
            status = app.cli(prog=prog, args=words, config=config)
        return status

    return run_main("tools.checkpoint", run, verbose=verbose)


if __name__ == "__main__":
    sys.exit(main())
