"""`python -m tools.corpus inspect FOLDER`: what any folder of the preparation holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import tyro

from tools.corpus.inspection.report import Report
from tools.corpus.work import read_manifest
from tools.corpus.work.manifest import STEP

PREPARED = "corpus.json"
MODULES: Mapping[str, str] = MappingProxyType(
    {
        "download": "downloads",
        "extract": "documents",
        "tokenizer": "tokenizer",
        "tokenize": "ids",
        "samples": "samples",
        "prepare": "prepared",
    }
)
"""The module that looks into what a step has made. Imported when it is asked for: text needs no torch."""


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Show what a folder of the preparation holds: counts, histograms of lengths, and a few pieces to read."""

    folder: tyro.conf.Positional[Path]
    """Output of a step of tools.corpus, `prepare` included."""
    plot: Path | None = None
    """PNG file to draw the histograms into."""
    samples: int = 3
    """Documents, sentences, pieces or sequences to show, drawn at random."""
    packs: int = 2
    """Packs to show, drawn at random."""
    seed: int = 0
    """Draws them; and the sentence pairs of a folder that `prepare` made."""
    max_length: int = 512
    """Tokens of a sequence, at most, where sequences are not cut yet: in a folder that `prepare` made."""
    json: bool = False
    """Print a JSON object instead of text."""


def inspect(options: InspectOptions) -> str:
    """What the folder holds, as text or JSON; also draws the picture that is asked for.

    Raises:
        ValueError: a folder of no step or a damaged one, a number below 0, or nothing to draw.
    """
    for name in ("samples", "packs", "seed"):
        if getattr(options, name) < 0:
            raise ValueError(f"--{name} must be at least 0. Got {getattr(options, name)}.")
    if options.plot is not None and (options.plot.is_dir() or not options.plot.parent.is_dir()):
        raise ValueError(f"--plot must be a file in a folder that exists. Got {options.plot}.")
    if options.plot is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs the package matplotlib: pip install matplotlib.")
    report = examine(options)
    if options.plot is not None:
        if not any(histogram.total for histogram in report.histograms):
            raise ValueError(f"{options.folder} holds {report.kind}; there is no histogram to draw. Drop --plot.")
        # matplotlib takes a second, for which nobody should wait who wants no picture.
        from tools.corpus.inspection.plot import draw_histograms

        shown = [histogram for histogram in report.histograms if histogram.total]
        draw_histograms(shown, f"{options.folder.name}: {report.kind}", options.plot)
    return report.json() if options.json else report.text()


def examine(options: InspectOptions) -> Report:
    """What the folder holds. Raises ValueError for one that cannot be used."""
    examiner: Callable[[InspectOptions], Report]
    examiner = import_module(f"tools.corpus.inspection.{MODULES[step_of(options.folder)]}").examine
    return examiner(options)


def step_of(folder: Path) -> str:
    """The step that has made a folder. Raises ValueError where none has."""
    if (folder / PREPARED).is_file() and not (folder / STEP).exists():
        return "prepare"
    try:
        step = json.loads((folder / STEP).read_bytes())["step"]
    except (ValueError, KeyError, TypeError, FileNotFoundError, NotADirectoryError):
        step = read_manifest(folder).step  # which says what is wrong
    if step not in MODULES:
        raise ValueError(f"{folder} was made by the step {step!r}; known are {', '.join(MODULES)}. Update tensor3d.")
    return step
