"""model.json: what a folder of this project says of its model.

    {"format": 1, "model": "bert", "config": {...}, "heads": ["pooler", ...], "labels": ["no", "yes"] or null,
     "problem": "classify", "labels", "regress", "answer", "tag", "rank", "embed" or null, "facts": {...}}

Beside it lie `checkpoints/`, `tokenizer/`, and in imported folders `huggingface/config.json` as it was found.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, get_args, get_origin, get_type_hints

from models.bert.config import BertConfig
from models.bert.huggingface.param_names import HEADS
from tensor3d.files import draft, read_file

# --- JSON files that hold one object: read with errors that name the file, written whole or not at all ----------------


def read_object(path: Path) -> dict[str, Any]:
    """Raises ValueError, with the file's name, where there is no JSON object in it."""
    try:
        content = json.loads(read_file(path).decode("utf-8-sig"))  # editors of Windows begin with a byte order mark
    except (ValueError, RecursionError) as problem:  # ValueError: no UTF-8 and no JSON
        raise ValueError(f"{path} is no JSON: {problem}. Get it again from where the folder is from.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object. Got a {type(content).__name__}.")
    return content


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Beside and renamed."""
    with replacing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which gets the name `path` when the block ends well; else nothing of it stays.

    Raises:
        ValueError: the disk is full, or the like, of which the operating system does not say with which file.
    """
    try:
        with draft(path) as file:
            yield file
    except OSError as problem:
        if problem.filename not in (None, str(path)):
            raise
        raise ValueError(
            f"{path} cannot be written: {problem.strerror}. What there was of it has been removed. Make room, or write "
            "to another folder."
        ) from None


# --- model.json -------------------------------------------------------------------------------------------------------

MODEL_JSON = "model.json"
FORMAT = 1
PROBLEMS = ("classify", "labels", "regress", "answer", "tag", "rank", "embed")

T = TypeVar("T")
_JSON = {
    int: "a whole number",
    float: "a number",
    str: "a name",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


@dataclass(frozen=True, kw_only=True)
class ModelJson:
    """The content of a model.json.

    Raises:
        ValueError: an unknown head or problem, labels that are named twice, or values of other types.
    """

    config: BertConfig
    heads: tuple[str, ...]
    """Those whose weights the checkpoints have; of `HEADS`."""
    labels: tuple[str, ...] | None = None
    """Names of the classes or tags, in the order of the classifier's outputs."""
    problem: str | None = None
    """What the head of fine-tuning is for: one of `PROBLEMS`."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Whatever else is to be known: JSON."""

    def __post_init__(self) -> None:
        for name, values in (("heads", self.heads), ("labels", self.labels or ())):
            if not all(isinstance(value, str) for value in values):
                raise ValueError(f"{name} must be names. Got {list(values)!r}.")
        if unknown := [head for head in self.heads if head not in HEADS]:
            raise ValueError(f"heads must be among {', '.join(HEADS)}. Got {unknown[0]!r}.")
        if self.problem is not None and self.problem not in PROBLEMS:
            raise ValueError(f"problem must be one of {', '.join(PROBLEMS)}, or null. Got {self.problem!r}.")
        if self.labels is not None and len(set(self.labels)) != len(self.labels):
            raise ValueError(f"labels must differ. Got {list(self.labels)}.")
        types, sizes = self.facts.get("types") or {}, self.facts.get("sizes") or []
        if not isinstance(types, dict) or not all(isinstance(kind, str) for kind in types.values()):
            raise ValueError(f"facts.types must be an object of names. Got {types!r:.60}.")
        _of_type(sizes, list, "facts.sizes")


def write_model_json(
    folder: Path,
    *,
    config: BertConfig,
    heads: Sequence[str],
    labels: Sequence[str] | None = None,
    problem: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder's model.json, whole or not at all. One rank calls it. Raises ValueError as `ModelJson`."""
    content = ModelJson(
        config=config,
        heads=tuple(heads),
        labels=None if labels is None else tuple(labels),
        problem=problem,
        facts=dict(facts or {}),
    )
    write_object(folder / MODEL_JSON, {"format": FORMAT, "model": "bert", **dataclasses.asdict(content)})


def read_model_json(folder: Path) -> ModelJson:
    """What a folder's model.json says.

    Raises:
        ValueError: no such file, another format or model, or what makes no sense in it; with the file's name.
    """
    path = folder / MODEL_JSON
    if not path.exists():
        raise ValueError(f"{folder} has no {MODEL_JSON}: it is no folder of a model. Name one that a tool has written.")
    content = read_object(path)
    if content.get("format") != FORMAT:
        raise ValueError(f"{path} is of format {content.get('format')!r}, and this tensor3d reads format {FORMAT}.")
    if content.get("model") != "bert":
        raise ValueError(f"{path} is of the model {content.get('model')!r}, and only 'bert' can be read here.")
    try:
        labels = content.get("labels")
        return ModelJson(
            config=config_from_json(_of_type(content["config"], dict, "config")),
            heads=tuple(_of_type(content["heads"], list, "heads")),
            labels=None if labels is None else tuple(_of_type(labels, list, "labels")),
            problem=content.get("problem"),
            facts=_of_type(content.get("facts") or {}, dict, "facts"),
        )
    except (KeyError, TypeError, ValueError) as problem:
        told = f"it has no {problem}" if isinstance(problem, KeyError) else str(problem)
        raise ValueError(f"{path} makes no sense: {told}") from None


def _of_type(value: Any, kind: type[T], name: str) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {_JSON[kind]}. Got {value!r}.")
    return value


def config_from_json(content: Mapping[str, Any]) -> BertConfig:
    """A configuration as JSON has it. Raises ValueError for values of other types than the fields', which JSON cannot
    tell from these."""
    hints = get_type_hints(BertConfig)
    for name, value in content.items():
        kinds = _kinds(hints[name]) if name in hints else {type(value)}
        if type(value) not in kinds and not (float in kinds and type(value) is int):
            needed = " or ".join(sorted(_JSON[kind] for kind in kinds))
            raise ValueError(f"{name} must be {needed}. Got {value!r}.")
    return BertConfig(**content)


def _kinds(hint: Any) -> set[type]:
    """The types of values that a field's annotation allows: of `int | None` both, of a Literal those of its values."""
    if isinstance(hint, type):
        return {hint}
    if get_origin(hint) is Literal:
        return {type(value) for value in get_args(hint)}
    return {kind for each in get_args(hint) for kind in _kinds(each)}
