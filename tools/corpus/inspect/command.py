"""`python -m tools.corpus inspect FOLDER`: what any folder of the preparation holds."""

from __future__ import annotations

from pathlib import Path

from tools.common.files import parsed_json, read_file, what_is_wrong
from tools.common.plotting import check_picture
from tools.corpus.inspect.histogram import draw_histograms
from tools.corpus.inspect.report import InspectOptions, Report
from tools.corpus.pipeline import read_manifest
from tools.corpus.pipeline.step import STEP

PREPARED = "corpus.json"


def inspect(options: InspectOptions) -> str:
    """What the folder holds, as text or JSON; also draws the picture that is asked for.

    Raises:
        ValueError: a folder of no step or a damaged one, a number below 0, or nothing to draw.
    """
    for name in ("samples", "packs", "seed"):
        if getattr(options, name) < 0:
            raise ValueError(f"--{name} must be at least 0. Got {getattr(options, name)}.")
    check_picture(options.plot)
    report = examine(options)
    if options.plot is not None:
        if not any(histogram.total for histogram in report.histograms):
            raise ValueError(f"{options.folder} holds {report.kind}; there is no histogram to draw. Drop --plot.")
        shown = [histogram for histogram in report.histograms if histogram.total]
        draw_histograms(shown, f"{options.folder.name}: {report.kind}", options.plot)
    return report.json() if options.json else report.text()


def examine(options: InspectOptions) -> Report:
    """What the folder holds. Raises ValueError for one that cannot be used."""
    # Text needs no torch, and the options need nothing of this.
    from tools.corpus.inspect.folders import EXAMINERS

    step = step_of(options.folder)
    if step not in EXAMINERS:
        raise ValueError(
            f"{options.folder} was made by the step {step!r}; known are {', '.join(EXAMINERS)}. Update tensor3d."
        )
    try:
        return EXAMINERS[step](options)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # values that no step writes
        if isinstance(error, ValueError) and str(options.folder) in str(error):
            raise
        raise ValueError(
            f"{options.folder} is damaged: what {STEP} says does not fit its files ({what_is_wrong(error)}). Run "
            f"{step} again."
        ) from error


def step_of(folder: Path) -> str:
    """The step that has made a folder. Raises ValueError where none has."""
    if (folder / PREPARED).is_file() and not (folder / STEP).exists():
        return "prepare"
    try:
        return str(parsed_json(read_file(folder / STEP))["step"])
    except (ValueError, KeyError, TypeError, FileNotFoundError, NotADirectoryError):
        return read_manifest(folder).step  # which says what is wrong
