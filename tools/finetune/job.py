"""What the commands of all tasks have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import tyro

from models.bert.huggingface import model_folder_of, open_weights
from models.bert.huggingface.config import CONFIG
from models.bert.huggingface.from_pretrained import CheckpointWeights
from models.bert.huggingface.reader import file_tensors
from tensor3d import Cube, CubeShape
from tensor3d.checkpoint.format import CHECKSUMS
from tensor3d.distributed.object_collectives import check_all_same_on_all_ranks, run_on_all_ranks
from tensor3d.files import check_folder, read_file, remove
from tools.common.cli import recipe_among
from tools.common.files import parsed_json
from tools.common.machine import write_json
from tools.corpus.quick.text_sources import hash_files
from tools.corpus.tokenizers import Tokenizer
from tools.corpus.tokenizers.model_dir import MODEL, TOKENIZER, tokenizers_in
from tools.finetune.config import SHIPPED, FinetuneConfig, ModelSection
from tools.finetune.init_model import check_start_folder
from tools.finetune.rows import EMBEDDED, check_there
from tools.finetune.tasks import FinetuneTask
from tools.training.config import read_recipe
from tools.training.idle_settings import Rule, optimizer_rules, precision_rules, told_of


@dataclass(frozen=True, kw_only=True)
class FinetuneCommand:
    """Fine-tunes a model for one task. Subclasses add `settings`, a `FinetuneConfig` with their own section `data`."""

    task: ClassVar[str]
    """Its name on the command line."""
    task_class: ClassVar[Callable[..., Any]]
    """Makes a `FinetuneTask` of the section `data`, the recipe, a tokenizer and a cube."""
    recipe_class: ClassVar[type[FinetuneConfig]]

    recipe: tyro.conf.Positional[Path]
    """TOML file; shipped ones lie in launch/recipes/finetune."""
    cube: str = "1x1x1"
    """Sizes of the axes x, y and z, as XxYxZ."""
    data_parallel: int = 1
    """Copies of the cube."""
    output: Path | None = None
    """Folder of the results. Default: runs/finetune/NAME of the recipe. If seeds are done there already, with the same
    settings, the command goes on with the others."""

    settings: Any
    """The recipe's values: one of `recipe_class`."""

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence: the model needs positions for them."""
        length: int = self.settings.data.max_length
        return length

    @property
    def pairs(self) -> bool:
        """Whether sequences are of two texts, as a question and its context are."""
        return getattr(self.settings.data, "text_b", True) is not None

    @property
    def start_folder(self) -> Path | None:
        """Where the weights to begin with lie."""
        name = self.settings.model.start_from
        return None if name is None else Path(name)

    def inputs(self) -> Sequence[Path]:
        """The files that the task reads: their content is part of the settings."""
        files: Sequence[Path] = self.settings.data.files()
        return files

    def idle_settings(self) -> Sequence[str]:
        """A line for each key that was set and changes nothing."""
        recipe, model = self.settings, self.settings.model
        of_fresh = ("preset", "std", "lowercase", "strip_accents")
        fresh = Rule("model", model, of_fresh, model.vocab is not None, "a model that begins with model.vocab")
        of_file = Rule("model", model, of_fresh[2:], (model.vocab or ".txt").endswith(".txt"), "a vocab.txt")
        rules = (of_file, *optimizer_rules(recipe.optimizer), *precision_rules(recipe.precision), *self.data_rules())
        return told_of((fresh, *rules))

    def data_rules(self) -> Sequence[Rule]:
        """What keys of the section `data` need."""
        return ()

    def make_task(self, tokenizer: Tokenizer, cube: Cube) -> FinetuneTask:
        """Reads the files, on every rank.

        Raises:
            ValueError: of a file, naming it and the place in it.
        """
        task: FinetuneTask = self.task_class(self.settings.data, self.settings, tokenizer, cube)
        return task

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        """A command with the values of the recipe among the arguments; tyro says what is missing without one."""
        path = recipe_among(arguments)
        kind = cls.recipe_class
        settings: Any = kind() if path is None else read_recipe(kind, path, shipped=SHIPPED)
        options: dict[str, Any] = {"recipe": tyro.MISSING, "settings": settings}
        return cls(**options)

    def check(self) -> None:
        """Raises ValueError for what can be seen before any process is connected."""
        _ = self.shape
        for path in self.inputs():
            check_there(path, self._key_of(path))
        check_folder(self.folder)
        if self.start_folder is not None:
            check_start_folder(self.start_folder, self.max_length, self.shape, pairs=self.pairs)

    def _key_of(self, path: Path) -> str:
        """The key of the recipe that names a file; empty where it is one of a folder that a key names."""
        named = {key: value for key, value in vars(self.settings.data).items() if isinstance(value, str)}
        return next((f"data.{key}" for key, value in named.items() if Path(value) == path), "")

    @property
    def shape(self) -> CubeShape:
        return CubeShape.parse(self.cube, self.data_parallel)

    @property
    def folder(self) -> Path:
        return self.output or Path("runs/finetune") / self.recipe.stem


# --- finetune.json says with which settings, files and weights the seeds in a folder were trained ---------------------
#
# Which run has the folder, `tools.common.files.lock_folder` says; what follows is done by the one that has it.
#
# {"task": ..., the recipe's sections, "files": {path: hash}, "weights": {"model": ..., "tokenizer": ...}}

SETTINGS = "finetune.json"
SEEDS = "seed-*"


def keep_settings(command: FinetuneCommand) -> str | None:
    """Notes the settings in the folder, or compares them with those that are there. Settings without a seed, of a
    command that did not come to train, are no reason to refuse others. One rank calls it.

    Returns:
        The folder to take the weights from: of a model with several checkpoints the newest one. None: random weights.

    Raises:
        ValueError: the folder holds results of other settings, or what was not made here; a file to be read lies where
            a seed is to be written; no weights there.
    """
    folder, model = command.folder, command.settings.model
    path = folder / SETTINGS
    if not path.exists():
        _check_ours(folder)
    named = [Path(name) for name in (model.start_from, model.vocab) if name is not None and name != EMBEDDED]
    _check_outside(folder, [*named, *command.inputs()])
    source = None if command.start_folder is None else _chosen(command.start_folder)
    settings = json.loads(json.dumps(_settings(command, source)))
    if not _has_seeds(folder):
        drop_settings(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)
    elif different := _differences(_with_defaults(_read(path), command.recipe_class()), settings):
        raise ValueError(
            f"{folder} holds results of other settings: {different[0]}. Choose another --output, or remove the folder."
        )
    return None if source is None else str(source)


def drop_settings(folder: Path) -> None:
    """Takes them back, as nothing has been trained: whoever corrects the command may have the folder. Several ranks
    may call it at once."""
    if (folder / SETTINGS).exists() and not _has_seeds(folder):
        # The settings last: without them a tokenizer would be somebody else's.
        remove(folder / TOKENIZER)
        (folder / SETTINGS).unlink(missing_ok=True)


def _has_seeds(folder: Path) -> bool:
    return any(folder.glob(SEEDS))


def _check_ours(folder: Path) -> None:
    """A seed is made anew where it is not done: what others have put there would be lost."""
    found = next((path for name in (SEEDS, TOKENIZER) for path in sorted(folder.glob(name))), None)
    if found is not None:
        raise ValueError(
            f"{folder} has no {SETTINGS}, so this tool has not made it, and {found.name} in it would be overwritten. "
            "Choose another --output."
        )


def _check_outside(folder: Path, named: Sequence[Path]) -> None:
    inside = [path for path in named if path.resolve().is_relative_to(folder.resolve())]
    for path in inside:
        first = path.resolve().relative_to(folder.resolve()).parts[:1]
        if first and Path(first[0]).match(SEEDS):
            raise ValueError(
                f"{path} lies in {folder / first[0]}, where a seed of this command is to be written. Choose another "
                "--output."
            )


def _chosen(folder: Path) -> Path:
    weights = open_weights(folder)
    return weights.checkpoint if isinstance(weights, CheckpointWeights) else folder


def _settings(command: FinetuneCommand, source: Path | None) -> dict[str, Any]:
    """What decides a seed's result. Not the cube, which changes rounding alone, and not which seeds there are."""
    return {
        "task": command.task,
        **_sections(command.settings),
        "files": {str(path): _hash(path) for path in command.inputs()},
        "weights": _hash_of_vocab(command.settings.model) if source is None else _hashes_of_model(source),
    }


def check_same_settings(command: FinetuneCommand, source: str | None, cube: Cube) -> None:
    """Compares what ranks read each for itself: recipe and options, files, tokenizer and model. Weights are compared by
    what their folder says of them, and not read whole by every rank.

    Raises:
        ValueError: some differ, as between machines whose copies are of different days; on every rank, with what. Else
            steps would be of other texts than the ranks agree on, and end in a failed collective, or not at all.
    """

    def read() -> dict[str, str]:
        model = (
            _hash_of_vocab(command.settings.model) if source is None else _hashes_of_model(Path(source), whole=False)
        )
        return {
            "the recipe, with the options": _short(json.dumps(_sections(command.settings), sort_keys=True)),
            **{f"the content of {path}": _hash(path) for path in command.inputs()},
            **{f"the {name} to begin with": _short(value) for name, value in model.items()},
        }

    check_all_same_on_all_ranks(cube, run_on_all_ranks(cube, read))


def _sections(recipe: FinetuneConfig) -> dict[str, Any]:
    sections = recipe.to_dict()
    for name in ("seeds", "tokens_per_rank"):
        del sections["run"][name]
    return sections


def _hashes_of_model(source: Path, *, whole: bool = True) -> dict[str, str]:
    """Of all that is taken from a folder. A checkpoint is known by its checksums, with which it is compared anyway.

    Args:
        whole: weights without checksums count, too.
    """
    if (source / CHECKSUMS).is_file():
        files = [model_folder_of(source) / MODEL, source / CHECKSUMS]
    else:
        weights = file_tensors(source).values() if whole else ()
        files = [source / CONFIG, *sorted({tensor.path for tensor in weights})]
    tokenizer = tokenizers_in(source)[0]
    # What BERT does by itself was not named in runs of before.
    accents = f" strip_accents={tokenizer.strip_accents}" if tokenizer.has_accents_of_its_own else ""
    return {
        "model": " ".join([source.name, *map(_hash, files)]),
        "tokenizer": f"{tokenizer.kind} {tokenizer.lowercase}{accents} {_hash(tokenizer.file)}",
    }


def _hash_of_vocab(model: ModelSection) -> dict[str, str]:
    if model.vocab is None or model.vocab == EMBEDDED:
        return {}
    path = Path(model.vocab)
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    return {"tokenizer": " ".join(map(_hash, files))}


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _hash(file: Path) -> str:
    """Of its name and its whole content."""
    return hash_files([file], file.parent)


def _read(path: Path) -> Any:
    try:
        settings = parsed_json(read_file(path))
        model = settings["model"] if isinstance(settings, dict) and isinstance(settings.get("model"), dict) else {}
        if "keep_gathered" in model:  # the name of the opposite, in folders of before
            model["reshard_after_forward"] = not model.pop("keep_gathered")
        return settings
    except ValueError as problem:
        raise ValueError(f"{path} is damaged: {problem}. Choose another --output, or remove the folder.") from None


def _with_defaults(there: Any, recipe: FinetuneConfig) -> Any:
    """With the settings that did not exist when the folder was made, as they are where nobody names them."""
    if not isinstance(there, dict):
        return there
    defaults: Mapping[str, Any] = json.loads(json.dumps(_sections(recipe)))
    filled = {name: defaults[name] | value for name, value in there.items() if name in defaults and type(value) is dict}
    return there | filled


def _differences(there: Any, here: Any, name: str = "") -> list[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [*there, *(key for key in here if key not in there)]
        return [
            told
            for key in keys
            for told in _differences(there.get(key), here.get(key), f"{name}.{key}" if name else key)
        ]
    return [] if there == here else [_told(name, there, here)]


def _told(name: str, there: Any, here: Any) -> str:
    section, _, rest = name.partition(".")
    if section == "files":
        return f"{rest} has another content now"
    if section == "weights":
        first, second = (str(value).split(" ")[0] for value in (there, here))
        if rest == "model" and first != second:
            return f"the weights were those of {first} there and are those of {second} now"
        return f"weights.{rest}, a hash of the files, is another one now"
    return f"{name} was {there!r} there and is {here!r} now"
