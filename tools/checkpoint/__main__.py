"""`python -m tools.checkpoint inspect DIR [--json]`, `python -m tools.checkpoint verify DIR [--all]`

DIR is a checkpoint, a folder of checkpoints or a run; of several checkpoints the newest is meant.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from tensor3d import checkpoint
from tools.checkpoint.report import as_json, as_text, found

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
def verify(folder: tyro.conf.Positional[Path], *, all_: Annotated[bool, tyro.conf.arg(name="all")] = False) -> int:
    """Reads every byte of a checkpoint and compares it with what was written; names each damaged or missing file.

    Args:
        folder: A checkpoint, or the newest one of a folder of checkpoints or of a run.
        all_: All checkpoints of the folder.
    """
    damaged = 0
    for path in found(folder, every=all_):
        problems = checkpoint.verify(path)
        damaged += bool(problems)
        print(f"{path}: {'DAMAGED' if problems else 'good'}")
        for problem in problems:
            print(f"  {problem}")
    return 1 if damaged else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where `verify` found damage; 2 for a bad call or what is no checkpoint."""
    try:
        status: int = app.cli(
            prog="python -m tools.checkpoint",
            args=None if arguments is None else list(arguments),
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except (ValueError, OSError) as problem:
        print(f"tools.checkpoint: {problem}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
