"""A folder of samples, as training opens it."""

from __future__ import annotations

import hashlib
import resource
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensor3d.data import MaskingRules, SpecialTokens
from tensor3d.data.epochs import PackingRules
from tensor3d.data.masking import MASKED_SHARE
from tensor3d.data.stored_samples import LABELS, MASKS, StoredShard, read_array
from tensor3d.packing import Limits, PackingPlan, fingerprint_of, load_plan
from tools.common.files import parsed_json, read_file, what_is_wrong
from tools.corpus.pipeline.step import STEP, VERSION
from tools.corpus.samples.draw import CONTINUATIONS
from tools.corpus.samples.options import HISTOGRAM, PLAN

HELD_OUT = "heldout"
_COPY = "Copy it again, or run `python -m tools.corpus samples` again in a new folder."
_SETTINGS = (
    *("special", "held_out", "shards", "max_length", "single_texts", "masking", "whole_words"),
    *("packing", "capacity", "max_sequences", "masked_per_pack"),
)
_COUNTS = ("sequences", "tokens", "held_out_sequences", "unigram_entropy", "corpora")
"""Of step.json, what its readers ask for."""


def sample_shard_names(shards: int) -> list[str]:
    """Names of the shards' files, without their endings."""
    return [f"samples-{shard:05d}-of-{shards:05d}" for shard in range(shards)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """What the step `samples` has written, memory-mapped."""

    folder: Path
    settings: dict[str, Any]
    counts: dict[str, Any]
    left_out: int
    """Places left out because they were bad."""
    special: SpecialTokens
    shards: tuple[StoredShard | None, ...]
    """None for one that is not on this machine. For `tensor3d.data.StoredSamples` or `RemoteSamples`."""
    held_out: StoredShard | None
    """None where nothing was held out."""
    continuations: NDArray[np.generic] | None
    """bool or uint8 (vocab_size,), for `PretrainingData`: what each piece says of words; None unless words are masked
    whole."""
    fingerprint: str
    """Changes with everything that decides the samples."""

    @property
    def vocab_size(self) -> int:
        return self.special.vocab_size

    @property
    def max_length(self) -> int:
        """Tokens of a sequence, at most."""
        return int(self.settings["max_length"])

    @property
    def single(self) -> bool:
        """Single texts: there is no next-sentence label."""
        return bool(self.settings["single_texts"])

    @property
    def static(self) -> bool:
        """Masks are stored."""
        return self.settings["masking"] == "static"

    @property
    def masking(self) -> MaskingRules:
        """By which the masks were drawn, if they are stored; of its share the plan has room."""
        return _masking(self.settings)

    @property
    def packing(self) -> str:
        """The method of the plan."""
        return str(self.settings["packing"])

    @cached_property
    def histogram(self) -> NDArray[np.int64]:
        """int64 (max_length + 1,): lengths of all training sequences, also of shards that are not here."""
        path = self.folder / HISTOGRAM
        try:
            found = np.array(parsed_json(read_file(path))["counts"], dtype=np.int64)
            if found.ndim != 1 or (found < 0).any():
                raise ValueError("counts must be a list of numbers of at least 0")
            return found
        except (FileNotFoundError, ValueError, TypeError, KeyError, OverflowError) as error:
            raise ValueError(f"{path} is missing or damaged: {what_is_wrong(error)}. {_COPY}") from error

    def plan(self) -> PackingPlan:
        """The plan of all training sequences, for `PretrainingData` with the method `packing`. ValueError for a file
        that is damaged."""
        return load_plan(self.folder / PLAN, fingerprint_of(self.histogram, self.limits, self.packing))

    @property
    def limits(self) -> Limits:
        """Of the plan's packs."""
        return PackingRules(
            method=self.packing,
            capacity=self.settings["capacity"],
            max_sequences=self.settings["max_sequences"],
            masked_per_pack=self.settings["masked_per_pack"],
            masked_share=self.masking.share,
            seed=0,
        ).limits


def open_samples(folder: Path) -> Samples:
    """Opens an output of the step `samples`, or a copy of it that lacks some of the training shards.

    Raises:
        ValueError: the folder is none, a file is missing or damaged, or it has no shard at all.
    """
    values, fingerprint = read_step(folder)
    try:
        return _opened(folder, values, fingerprint)
    except (TypeError, KeyError, IndexError, AttributeError, ValueError, FileNotFoundError) as error:  # of no step
        if isinstance(error, ValueError) and str(folder) in str(error):
            raise
        raise ValueError(f"{folder / STEP} is damaged: {what_is_wrong(error)}. {_COPY}") from error


def _opened(folder: Path, values: dict[str, Any], fingerprint: str) -> Samples:
    settings, files = values["settings"], values["files"]
    single, static = settings["single_texts"], settings["masking"] == "static"
    stored = partial(StoredShard, single=single, static=static, masked_share=_masking(settings).share)
    names = sample_shard_names(settings["shards"])
    missing = {name for name in names if not any((folder / file).exists() for file in _files(name, files))}
    for name, size in files.items():
        if not any(name in _files(shard, files) for shard in missing):
            _check_file(folder / name, size)
    if len(missing) == len(names):
        raise ValueError(
            f"{folder} has none of its {len(names)} shards; the first is {names[0]}.bin and .idx. Copy some here."
        )
    _allow_open_files()
    return Samples(
        folder=folder,
        settings=settings,
        counts=values["counts"],
        left_out=values["left_out"],
        special=SpecialTokens(**settings["special"]),
        shards=tuple(None if name in missing else stored(folder / name) for name in names),
        held_out=stored(folder / HELD_OUT) if f"{HELD_OUT}.idx" in files else None,
        continuations=read_array(folder / CONTINUATIONS) if settings["whole_words"] else None,
        fingerprint=fingerprint,
    )


def _masking(settings: dict[str, Any]) -> MaskingRules:
    replaced = {name: settings[name] for name in ("mask_replace", "random_replace") if name in settings}
    share, spans = settings.get("masked_share", MASKED_SHARE), settings.get("masked_spans", False)
    return MaskingRules(share=share, spans=spans, **replaced)


def read_step(folder: Path) -> tuple[dict[str, Any], str]:
    """The contents of step.json and their hash. Not every file need be there, as `read_manifest` has it.

    Raises:
        ValueError: there is none, it is damaged, or of another step or version.
    """
    path = folder / STEP
    try:
        content = read_file(path)
        values = parsed_json(content)
        step, version = values["step"], values["version"]
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{folder.absolute()} holds no samples: there is no {STEP}. Run `python -m tools.corpus samples` first."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {what_is_wrong(error)}. {_COPY}") from error
    if step != "samples":
        raise ValueError(f"{folder} is an output of the step {step!r}. Run `python -m tools.corpus samples` on it.")
    if version != VERSION:
        raise ValueError(f"{path} has version {version}, this program reads {VERSION}. {_COPY}")
    lacking = [name for name in ("settings", "counts", "files", "left_out") if name not in values]
    tables = [name for name in ("settings", "counts", "files") if not isinstance(values.get(name), dict)]
    lacking = lacking or [f"the table {name}" for name in tables]
    lacking = lacking or [name for name in _SETTINGS if name not in values["settings"]]
    lacking = lacking or [name for name in _COUNTS if name not in values["counts"]]
    if lacking:
        raise ValueError(f"{path} is damaged: it lacks {', '.join(lacking)}. {_COPY}")
    whole = ("shards", "max_length", "capacity", "max_sequences", "masked_per_pack")
    for name in whole:
        if type(number := values["settings"][name]) is not int or not 0 < number < 2**31:
            raise ValueError(f"{path} is damaged: {name} must be a whole number of at least 1. Got {number!r}. {_COPY}")
    return values, hashlib.blake2b(content, digest_size=16).hexdigest()


def _allow_open_files() -> None:
    """Shards stay open all through training, a few files each: as many as this process may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems name a limit that they do not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _files(name: str, files: dict[str, int]) -> list[str]:
    """Those of one shard."""
    kinds = ("bin", "idx", LABELS, f"{MASKS}.bin", f"{MASKS}.idx")
    return [f"{name}.{kind}" for kind in kinds if f"{name}.{kind}" in files]


def _check_file(path: Path, size: int) -> None:
    found = path.stat().st_size if path.is_file() else None
    if found != size:
        state = "is missing" if found is None else f"has {found} bytes"
        raise ValueError(f"{path} {state} where {STEP} speaks of {size} bytes. {_COPY}")
