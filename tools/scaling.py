"""One run of a scaling sweep on the ranks of a launcher, and the table and picture of all runs.

    launch/torchrun.sh ... --module tools.scaling --cube 2x2x2 RECIPE --output DIR/NAME
    python -m tools.scaling --collect DIR

The first measures one box and writes DIR/NAME/strong.json; the second makes DIR/scaling.md and DIR/strong.png of all.
A run is that of `python -m tools.bench strong` (or `weak`, with --kind weak); what is not known here goes there as it
is: --steps, --rounds, --model.layers and so on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tools.bench.__main__ import main as bench
from tools.bench.harness.figures import cells, header
from tools.bench.harness.scaling_plots import draw, read_results
from tools.bench.harness.step_trial import CubeFigures
from tools.bench.scaling import Point, base_of, compared
from tools.common.cli import run_main
from tools.common.files import WRONG_ENTRIES, make_folder, what_is_wrong, write_file
from tools.common.machine import format_table
from tools.common.parse import check_home
from tools.common.plotting import check_drawing, save

KINDS = ("strong", "weak")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: as of tools.bench; 2 for a bad call."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("--cube", default="1x1x1", help="sizes of the axes x, y and z (default: %(default)s)")
    parser.add_argument("--data-parallel", default="1", help="copies of the cube (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="folder of this run, made if missing")
    parser.add_argument("--kind", choices=KINDS, default="strong")
    parser.add_argument("--collect", type=Path, metavar="DIR", help="read all runs in this folder, and measure nothing")

    def act() -> int:
        asked, rest = parser.parse_known_args(arguments)
        check_home([asked.output, asked.collect])
        return collect(asked.collect) if asked.collect else run(asked, rest)

    return run_main("tools.scaling", act)


def run(asked: argparse.Namespace, rest: Sequence[str]) -> int:
    """One box, on all ranks. Raises ValueError for a bad call."""
    if asked.recipe is None or asked.output is None:
        raise ValueError("a recipe and --output DIR are needed, or --collect DIR.")
    make_folder(asked.output)
    box = ["--cube", asked.cube, "--data-parallel", asked.data_parallel]
    return bench([asked.kind, asked.recipe, *box, "--output", str(asked.output / f"{asked.kind}.json"), *rest])


def collect(folder: Path) -> int:
    """One table and one picture of all runs in a folder. Raises ValueError where there is none."""
    files = sorted(path for kind in KINDS for path in folder.glob(f"*/{kind}.json"))
    if not files:
        raise ValueError(
            f"{folder} holds no run. One is a folder in it with strong.json or weak.json, of tools.scaling."
        )
    check_drawing("--collect")
    for file in files:
        try:
            for results in read_results([file]).values():
                points = [point_of(result) for result in results]
                _ = [cells(each) for each in compared(points)]
        except WRONG_ENTRIES as problem:
            raise ValueError(f"{file} is damaged ({what_is_wrong(problem)}). Measure it again, or remove it.") from None
    pages = []
    for kind, results in read_results(files).items():
        points = sorted((point_of(result) for result in results), key=lambda each: (each.step.ranks, each.step.name))
        base = base_of(points)
        titles, rows = header(Point), [cells(point) for point in compared(points)]
        print("\n".join([f"{kind} scaling; efficiency is to {base.step.name}", *format_table(titles, rows), ""]))
        pages.append("\n".join([f"## {kind} scaling, efficiency to {base.step.name}", "", *markdown(titles, rows), ""]))
        save(draw(kind, results), folder / f"{kind}.png")
        print(f"written: {folder / f'{kind}.png'}")
    page = folder / "scaling.md"
    write_file(page, "\n".join(pages))
    print(f"written: {page}")
    return 0


def point_of(result: Mapping[str, Any]) -> Point:
    """The inverse of `tools.bench.scaling.to_json`; efficiency is taken anew, over all runs."""
    known = {field.name for field in fields(CubeFigures)}  # files of before have some that there are no more
    step = {name: value for name, value in result.items() if name in known}
    return Point(
        kinds=tuple(result["kinds"]),
        global_batch=result["global_batch"],
        hidden=result["hidden"],
        step=CubeFigures(**step),
    )


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]


if __name__ == "__main__":
    try:
        status = main()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    sys.exit(status)
