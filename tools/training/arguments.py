"""The command line of pre-training, and the plan that it is resolved into."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, cast

import tyro

from tensor3d import CubeShape
from tensor3d.data import ExchangeOptions
from tensor3d.distributed.cube_shape import AxisName
from tools.common.cli import recipe_among, refuse_empty
from tools.common.parse import parse_options
from tools.corpus.training_corpus import is_samples, read_samples_info
from tools.training.config import DataConfig, TrainConfig, read_config, with_new_names
from tools.training.profiling import ProfileSchedule
from tools.training.run_plan import AUTO, RunPlan

EXCHANGE_EVERY = ExchangeOptions().every


@dataclass(frozen=True, kw_only=True)
class Command:
    """Pre-train a BERT on packed text, split three ways."""

    recipe: tyro.conf.Positional[Path]
    """TOML file; shipped ones lie in launch/recipes."""
    cube: str = "1x1x1"
    """Sizes of the axes x, y and z, as XxYxZ."""
    data_parallel: int = 1
    """Copies of the cube."""
    wire: str | None = None
    """Order of the axes on consecutive ranks, such as data,x,y,z: the last ones lie inside a node. Default: the one
    that keeps y and z inside, for the nodes that there are."""
    output: Path | None = None
    """Folder of the run. Default: runs/NAME of the recipe, with a number behind it if that exists."""
    corpus: Path | None = None
    """Folder of the prepared corpus, made if missing. Default: runs/corpora/SOURCE-VOCABULARY, with language, seed
    and share held out where they are not the defaults."""
    resume: str | None = None
    """A checkpoint (step-NNNNNNNN), or the newest one of a folder of checkpoints or of a run. The run goes on in its
    folder. "auto": the newest one of --output, and a new run there if it has none: the same command for the first start
    and for every restart."""
    start_from: Path | None = None
    """Weights and moments to begin with: a checkpoint of another run, or a folder as for --resume; or weights alone: a
    Hugging Face folder, or a folder of a model. Schedule and data are this recipe's own, from step 0: the second phase
    of two, or further training of somebody's model."""
    start_generator_from: Path | None = None
    """Of the objective "replaced-tokens", beside --start-from: the folder of the generator that learnt with that model,
    whose weights the generator begins with. Default: it begins fresh."""
    dry_run: bool = False
    """Print sizes, memory, traffic and the time to expect, and stop. No process but this one is needed."""
    profile: str | None = None
    """Steps to trace, such as "10-12": traces for Perfetto are written into the run's folder."""
    profile_ranks: str = "0"
    """Ranks that write traces, such as "0,3"."""
    prepare_only: bool = False
    """Check everything, prepare the corpus and the plans that the recipe asks for, and stop before training."""
    exchange: bool = False
    """Let each data rank read its own shards only, and get sequences from the others while it trains. The corpus folder
    is then taken as it is on each machine."""
    exchange_every: int = EXCHANGE_EVERY
    """Steps of which the sequences are exchanged together."""
    exchange_within: int | None = None
    """Consecutive data ranks among which sequences move, such as those of a node; data.groups must allow it."""
    settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    """The recipe's values, each of which can be given here."""


def parse(arguments: Sequence[str]) -> Command:
    """The command line, with the recipe's values as the defaults of its options."""
    refuse_empty(arguments, "--output", "--corpus", "--resume", "--start-from", "--data.source")
    path = recipe_among(arguments)
    # Without a recipe tyro says what is missing, or prints the help.
    settings = TrainConfig() if path is None else read_config(path)
    default = Command(recipe=tyro.MISSING, settings=settings)
    command = parse_options(Command, with_new_names(arguments), "python -m tools.pretrain", default=default)
    if command.recipe != path:
        raise ValueError(f"a recipe is a file *.toml; shipped ones lie in launch/recipes. Got {command.recipe}.")
    return dataclasses.replace(command, settings=fitted(command.settings, command.corpus))


def fitted(recipe: TrainConfig, corpus: Path | None) -> TrainConfig:
    """The recipe with what samples have decided already, if it reads samples: vocabulary, shards, what is held out.

    Args:
        corpus: folder of the prepared corpus, if one is named beside the recipe.

    Raises:
        ValueError: the recipe asks for another vocabulary, for shorter sequences than there are, or for a language's
            rules.
    """
    folder = Path(recipe.data.source) if corpus is None else corpus
    if not is_samples(folder):
        return recipe
    facts, data, default = read_samples_info(folder), recipe.data, DataConfig()
    if data.vocab_size not in (default.vocab_size, facts.vocab_size):
        raise ValueError(
            f"the recipe says data.vocab_size = {data.vocab_size}, the samples in {folder} were made with a vocabulary "
            f"of {facts.vocab_size}. Leave it out of the recipe, or set it so."
        )
    if data.language != default.language:
        raise ValueError(
            f"the recipe says data.language = {data.language!r}, and the samples in {folder} have been cut into "
            "sentences already (tools.corpus tokenize --language). Leave it out of the recipe."
        )
    if data.max_length < facts.max_length:
        raise ValueError(
            f"the recipe says data.max_length = {data.max_length}, the samples in {folder} have up to "
            f"{facts.max_length} tokens. Raise data.max_length, and data.capacity with it, or prepare shorter samples."
        )
    data = dataclasses.replace(data, vocab_size=facts.vocab_size, shards=facts.shards, held_out=facts.held_out)
    return dataclasses.replace(recipe, data=data)


# --- From the command line to a plan ----------------------------------------------------------------------------------


def resolve(command: Command) -> RunPlan:
    """What the command line comes to; no file is looked at but the samples of the recipe.

    Raises:
        ValueError: an option that is not written as it must be, or is about another one that is missing.
    """
    shape = CubeShape.parse(command.cube, command.data_parallel)
    if not command.exchange and (command.exchange_within is not None or command.exchange_every != EXCHANGE_EVERY):
        raise ValueError("--exchange-every and --exchange-within are about an exchange. Add --exchange, or drop them.")
    if command.profile is None and command.profile_ranks != Command.profile_ranks:
        raise ValueError("--profile-ranks are those of a trace. Add --profile with its steps, or drop them.")
    if command.start_generator_from is not None and command.start_from is None:
        raise ValueError(
            "--start-generator-from is about a generator beside the model of --start-from. Name that, too, or drop it."
        )
    if command.dry_run and command.prepare_only:
        raise ValueError("--dry-run stops before the corpus that --prepare-only prepares. Drop one of them.")
    return RunPlan(
        recipe_file=command.recipe,
        recipe=command.settings,
        shape=shape,
        rank_order=None if command.wire is None else _rank_order(command.wire),
        output=command.output,
        corpus=_corpus_folder(command),
        resume=command.resume if command.resume in (None, AUTO) else Path(command.resume),
        start_from=command.start_from,
        start_generator_from=command.start_generator_from,
        purpose="dry run" if command.dry_run else "prepare" if command.prepare_only else "train",
        exchange=_exchange_options(command),
        profile=None if command.profile is None else ProfileSchedule.parse(command.profile),
        profile_ranks=_profile_ranks(command.profile_ranks, shape),
    )


def _rank_order(wire: str) -> tuple[AxisName, ...]:
    """The order of the axes. Raises ValueError for one that is none."""
    # Its own check tells what a wire is.
    return CubeShape(wire=cast("tuple[AxisName, ...]", tuple(wire.split(",")))).wire


def _exchange_options(command: Command) -> ExchangeOptions | None:
    """How sequences are exchanged, if they are. Raises ValueError for numbers below 1."""
    return ExchangeOptions(every=command.exchange_every, within=command.exchange_within) if command.exchange else None


def _profile_ranks(text: str, shape: CubeShape) -> tuple[int, ...]:
    """Reads "0,3". Raises ValueError for what is no rank of the cube."""
    ranks = tuple(int(part) if part.strip().isdecimal() else -1 for part in text.split(","))
    if not all(0 <= rank < shape.ranks for rank in ranks):
        raise ValueError(f'--profile-ranks are written "0,3", each below {shape.ranks}. Got {text!r}.')
    return ranks


def _corpus_folder(command: Command) -> Path:
    data = command.settings.data
    if command.corpus is None and is_samples(Path(data.source)):
        return Path(data.source)
    seed = command.settings.run.seed
    parts = [
        f"{Path(data.source).stem}-{data.vocab_size}",
        data.language if data.language != DataConfig().language else "",
        f"{data.shards}-shards" if data.shards > 1 else "",
        f"held-out-{data.held_out:g}" if data.held_out != DataConfig().held_out else "",
        f"seed-{seed}" if seed else "",
    ]
    return command.corpus or Path("runs/corpora") / "-".join(part for part in parts if part)
