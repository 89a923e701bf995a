"""What a run's folder says, for its page: settings, environment, and the lines of metrics.jsonl by kind.

Pre-training and the GPT describe themselves in run.json, a seed of fine-tuning in model.json with finetune.json in the
folder around it. All of them write the same journal, with other numbers in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.folder_kinds import instead
from tensor3d import CubeShape
from tensor3d.files import WRONG_ENTRIES, read_file, what_is_wrong
from tools.common.files import LOCK, parsed_json
from tools.training.metrics import JOURNAL, read_journal

FACTS, SETTINGS, RESULT, RESULTS = "run.json", "finetune.json", "result.json", "results.json"
REMEDY = (
    "Name a folder that tools.pretrain, tools.gpt or tools.finetune has written, or a JSON file of tools.plan or of "
    "tools.bench strong or weak."
)
Record = dict[str, Any]
"""A line of metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training. `records` are by kind, those of steps one for each step, in order: of a step that was done again
    the later counts."""

    name: str
    folder: Path
    kind: str
    """pre-training, GPT, or a task of fine-tuning."""
    shape: CubeShape | None
    """None: a seed of fine-tuning tells it when it is done."""
    planned: int | None
    """Steps; None where nothing tells it."""
    entropy: float | None
    """Of the corpus' unigrams, nats."""
    settings: dict[str, str]
    """As resolved, "section.name" by "section.name"."""
    environment: dict[str, str]
    result: dict[str, Any]
    """Of a seed that is done."""
    records: dict[str, list[Record]] = field(default_factory=dict)
    damaged: int = 0
    """Lines of the journal that are not whole."""

    @property
    def steps(self) -> list[Record]:
        return self.records.get("step", [])

    def points(self, kind: str, key: str) -> tuple[list[int], list[float], int]:
        """Steps and numbers of a key, and how many there are beside them that are not finite."""
        read = [(line["step"], number(line.get(key))) for line in self.records.get(kind, [])]
        known = [(step, value) for step, value in read if value is not None]
        finite = [(step, value) for step, value in known if math.isfinite(value)]
        return [step for step, _ in finite], [value for _, value in finite], len(known) - len(finite)

    def mean(self, key: str, *, first: bool = False) -> float | None:
        """Over the steps. None: no step has it.

        Args:
            first: count step 1, whose time and traffic are no measure of the others.
        """
        steps = self.steps if first else self.steps[1:] or self.steps
        found = [value for line in steps if (value := number(line.get(key))) is not None]
        return sum(found) / len(found) if found else None

    def at_the_end(self, key: str, steps: int) -> list[float]:
        """The finite ones of the last steps; one that was skipped may have none."""
        found = (number(line.get(key)) for line in self.steps[-steps:])
        return [value for value in found if value is not None and math.isfinite(value)]

    @property
    def ended(self) -> bool:
        """Whether nothing more is to come: the run says so itself, or has done its steps and left its folder."""
        last = max((line for lines in self.records.values() for line in lines), key=_time, default={})
        left = not any((folder / LOCK).exists() for folder in (self.folder, self.folder.parent))
        done = self.planned is not None and bool(self.steps) and self.steps[-1]["step"] >= self.planned
        return last.get("event") == "end" or bool(self.result) or (done and left)


def number(value: Any) -> float | None:
    """A number of the journal, also one that is not finite ("NaN"); None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def read_runs(folder: Path) -> list[Run]:
    """The run in a folder, or one for each seed of a fine-tuning.

    Raises:
        ValueError: it is no run, or what it says of itself is damaged.
    """
    if (folder / FACTS).is_file():
        return [_described(folder)]
    if (folder / SETTINGS).is_file():
        seeds = [each for each in folder.glob("seed-*") if each.is_dir()]
        return [_seed(each, f"{folder.resolve().name}/{each.name}") for each in sorted(seeds, key=_by_number)]
    if (folder.resolve().parent / SETTINGS).is_file():
        return [_seed(folder.resolve(), folder.resolve().name)]
    raise ValueError(f"{folder.absolute()} is no run: it has neither {FACTS} nor {SETTINGS}.{instead(folder)} {REMEDY}")


def named_apart(runs: Sequence[Run]) -> list[str]:
    """A name for each: of the folder, with the path where two have the same."""
    often = Counter(run.name for run in runs)
    paths = Counter(str(run.folder) for run in runs)
    repeated = [path for path, count in paths.items() if count > 1]
    if repeated:
        raise ValueError(f"{repeated[0]} is named twice. Name each run once.")
    return [str(run.folder) if often[run.name] > 1 else run.name for run in runs]


def read_json(path: Path) -> dict[str, Any]:
    """Raises ValueError, naming the file, where it holds no JSON object."""
    try:
        content = parsed_json(read_file(path))
    except ValueError as problem:
        raise ValueError(f"{path} is damaged: {problem}. {REMEDY}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object. {REMEDY}")
    return content


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as "section.name": text."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            found[prefix + name] = "-" if value in (None, "", [], {}) else text
    return found


def _described(folder: Path) -> Run:
    """A run of tools.pretrain or of tools.gpt."""
    facts = read_json(folder / FACTS)
    gpt = "command" in facts
    try:
        told = facts["command"] if gpt else facts
        settings = {"model": facts["model"], **told} if gpt else facts["recipe"]
        return Run(
            name=folder.resolve().name,
            folder=folder,
            kind="GPT" if gpt else "pre-training",
            shape=CubeShape.parse(told["cube"], told["data_parallel"]),
            planned=int(settings["steps"] if gpt else settings["run"]["steps"]),
            entropy=number(facts.get("unigram_entropy")),
            settings=flat(settings),
            environment=flat(facts.get("environment", {})),
            result={},
            **_journal(folder),
        )
    except WRONG_ENTRIES as problem:
        raise ValueError(f"{folder / FACTS} does not describe a run ({what_is_wrong(problem)}). {REMEDY}") from None


def _seed(folder: Path, name: str) -> Run:
    settings = read_json(folder.parent / SETTINGS)
    result = read_json(folder / RESULT) if (folder / RESULT).is_file() else {}
    journal, before = _journal(folder), 0.0
    for line in journal["records"]["step"]:  # seconds count from the beginning there
        seconds, tokens = number(line.get("seconds")), number(line.get("tokens"))
        if seconds is not None:
            line["seconds"], before = seconds - before, seconds
            if tokens is not None and line["seconds"] > 0:
                line["tokens_per_second"] = tokens / line["seconds"]
    return Run(
        name=name,
        folder=folder,
        kind=f"fine-tuning: {settings.get('task', 'unknown task')}",
        shape=_shape(result.get("cube")),
        planned=None,
        entropy=None,
        settings=flat(settings),
        environment={},
        result=result,
        **journal,
    )


def _journal(folder: Path) -> dict[str, Any]:
    """Fields of a Run: lines by kind, none where nothing has been written yet, and how many are damaged."""
    found: dict[str, list[Record]] = {}
    steps: dict[int, Record] = {}
    damaged = list[None]()
    path = folder / JOURNAL
    for line in read_journal(path, lambda: damaged.append(None)) if path.exists() else ():
        if line["kind"] == "step":
            steps[line["step"]] = line
        else:
            found.setdefault(line["kind"], []).append(line)
    return {"records": found | {"step": [steps[step] for step in sorted(steps)]}, "damaged": len(damaged)}


def _shape(text: Any) -> CubeShape | None:
    """Of "2x1x1", or of "2*(1x1x1)" with copies."""
    if not isinstance(text, str):
        return None
    copies, _, cube = text.rpartition("*")
    return CubeShape.parse(cube.strip("()"), int(copies or 1))


def _time(line: Record) -> float:
    return number(line.get("time")) or 0.0


def _by_number(folder: Path) -> tuple[int, str]:
    """seed-2 before seed-10."""
    text = folder.name.partition("-")[2]
    return (int(text) if text.isdigit() else 0, folder.name)
