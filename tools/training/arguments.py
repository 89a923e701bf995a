"""The command line of pre-training, and what can be checked of it before any process is connected."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, cast

import torch
import tyro

from models.bert.cost_model.memory import Device
from tensor3d import CubeShape, checkpoint
from tensor3d.data import ExchangeOptions
from tensor3d.data.batch import check_rows, fit_packs_per_rank
from tensor3d.data.shard_exchange import check_within, shards_of
from tensor3d.distributed.cube_shape import AxisName
from tools.corpus.training_corpus import is_samples, read_samples_info
from tools.training.config import DataConfig, TrainConfig, read_config
from tools.training.factory import check_attention, check_compiler, planned_device
from tools.training.profiling import ProfileSchedule
from tools.training.resume import has_optimizer_state, weights_for

EXCHANGE_EVERY = ExchangeOptions().every
AUTO = "auto"
"""`--resume auto`: go on from the newest checkpoint of --output, if there is one, else begin there."""


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
    """Folder of the prepared corpus, made if missing. Default: runs/corpora/SOURCE-VOCABULARY, with seed and share
    held out where they are not the defaults."""
    resume: str | None = None
    """A checkpoint (step-NNNNNNNN), or the newest one of a folder of checkpoints or of a run. The run goes on in its
    folder. "auto": the newest one of --output, and a new run there if it has none: the same command for the first start
    and for every restart."""
    start_from: Path | None = None
    """Weights and moments to begin with: a checkpoint of another run, or a folder as for --resume; or weights alone: a
    Hugging Face folder, or a folder of a model. Schedule and data are this recipe's own, from step 0: the second phase
    of two, or further training of somebody's model."""
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
    path = next((Path(argument) for argument in arguments if argument.endswith(".toml")), None)
    # Without a recipe tyro says what is missing, or prints the help.
    settings = TrainConfig() if path is None else read_config(path)
    default = Command(recipe=tyro.MISSING, settings=settings)
    command = tyro.cli(Command, args=list(arguments), default=default, prog="python -m tools.pretrain")
    if command.recipe != path:
        raise ValueError(f"a recipe is a file *.toml; shipped ones lie in launch/recipes. Got {command.recipe}.")
    return dataclasses.replace(command, settings=fitted(command.settings, command.corpus))


def fitted(recipe: TrainConfig, corpus: Path | None) -> TrainConfig:
    """The recipe with what samples have decided already, if it reads samples: vocabulary, shards, what is held out.

    Args:
        corpus: folder of the prepared corpus, if one is named beside the recipe.

    Raises:
        ValueError: the recipe asks for another vocabulary, or for shorter sequences than there are.
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
    if data.max_length < facts.max_length:
        raise ValueError(
            f"the recipe says data.max_length = {data.max_length}, the samples in {folder} have up to "
            f"{facts.max_length} tokens. Raise data.max_length, and data.capacity with it, or prepare shorter samples."
        )
    data = dataclasses.replace(data, vocab_size=facts.vocab_size, shards=facts.shards, held_out=facts.held_out)
    return dataclasses.replace(recipe, data=data)


def check(command: Command, shape: CubeShape) -> None:
    """Raises ValueError for what can be seen before any process is connected."""
    recipe = command.settings
    parse_rank_order(command)
    recipe.model.config(recipe.data).check(shape)
    _check_speed(command)
    parse_profile_ranks(command.profile_ranks, shape)
    if command.profile is not None:
        ProfileSchedule.parse(command.profile)
    options = exchange_options(command)
    if not command.exchange and (command.exchange_within is not None or command.exchange_every != EXCHANGE_EVERY):
        raise ValueError("--exchange-every and --exchange-within are about an exchange. Add --exchange, or drop them.")
    if options is not None:
        shards_of(recipe.data.shards, shape.data, 0)
        check_within(options, shape.data, recipe.data.groups)
    if recipe.batch.packing_rule == "sequences":
        return  # the packs of a step are known when the corpus is packed
    sizes = (shape.data, shape.x, shape.y, shape.z)
    k = fit_packs_per_rank(recipe.batch.global_batch, sizes, recipe.batch.packs_per_rank)
    check_rows(packs_per_rank=k, z=shape.z, capacity=recipe.data.capacity, y=shape.y)


def _check_speed(command: Command) -> None:
    """For the device that trains: this machine's, or the one that a dry run or a preparation is for."""
    recipe, there, where = command.settings, torch.cuda.is_available(), ""
    device: Device = "cuda" if there else "cpu"
    if command.dry_run and not there:
        device = planned_device(recipe)
        where = " (The dry run is for GPUs, since run.peak_tflops is stated.)"
        if device == "cpu":
            where = " (The dry run is for a CPU: this machine has no GPU. State run.peak_tflops to plan for GPUs.)"
    elif command.prepare_only and not there:
        # Often done where the GPUs of the run are not; and no CPU serves what a GPU does not.
        device, where = "cuda", " (No GPU can, nor this CPU.)"
    check_attention(recipe, device, where)
    check_compiler(recipe, device)


def parse_rank_order(command: Command) -> tuple[AxisName, ...] | None:
    """The order of the axes, if one is asked for. Raises ValueError for one that is none."""
    if command.wire is None:
        return None
    # Its own check tells what a wire is.
    return CubeShape(wire=cast("tuple[AxisName, ...]", tuple(command.wire.split(",")))).wire


def exchange_options(command: Command) -> ExchangeOptions | None:
    """How sequences are exchanged, if they are. Raises ValueError for numbers below 1."""
    if not command.exchange:
        return None
    return ExchangeOptions(every=command.exchange_every, within=command.exchange_within)


def check_folders(command: Command) -> None:
    """Raises ValueError where `--resume` or `--start-from` is no checkpoint or a run cannot write its folder, before
    text is read."""
    output = command.output
    if command.resume == AUTO and output is None:
        raise ValueError("--resume auto needs the run's folder. Name it by --output.")
    if command.start_from is not None:
        if command.resume not in (None, AUTO):
            raise ValueError("--start-from begins a run and --resume goes on with one. Drop one of them.")
        if not resume_candidates(command) and not has_optimizer_state(source := latest_checkpoint(command.start_from)):
            weights_for(source, command.settings, None)
    if command.resume not in (None, AUTO):
        if output is not None:
            raise ValueError("--output and --resume exclude each other: a resumed run goes on in its folder. Drop one.")
        (folder,) = resume_candidates(command)
        checkpoint.read_progress(folder)
        checkpoint.check_writable(folder.parent)
        return
    if command.resume is None and output is not None and (output / "run.json").exists():
        raise ValueError(
            f"{output} holds a run already. Choose another --output, or go on there: --resume auto --output {output}."
        )
    folder = (output or Path("runs")).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"the run needs a folder, and {there} is a file. Choose another --output.")
    checkpoint.check_writable(folder / "checkpoints")


def resume_candidates(command: Command) -> list[Path]:
    """The checkpoints that the run may go on from, the first choice first; none where it begins."""
    if command.resume == AUTO:
        assert command.output is not None, "checked before"
        return checkpoint.complete(command.output / "checkpoints")[::-1]
    return [] if command.resume is None else [latest_checkpoint(Path(command.resume))]


def latest_checkpoint(path: Path) -> Path:
    """The checkpoint meant by a path: itself, or the newest one in it."""
    return checkpoint.latest(path) or checkpoint.latest(path / "checkpoints") or path


def parse_profile_ranks(text: str, shape: CubeShape) -> list[int]:
    """Reads "0,3". Raises ValueError for what is no rank of the cube."""
    ranks = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
    if not all(0 <= rank < shape.ranks for rank in ranks):
        raise ValueError(f'--profile-ranks are written "0,3", each below {shape.ranks}. Got {text!r}.')
    return ranks


def corpus_folder(command: Command) -> Path:
    data = command.settings.data
    if command.corpus is None and is_samples(Path(data.source)):
        return Path(data.source)
    seed = command.settings.run.seed
    parts = [
        f"{Path(data.source).stem}-{data.vocab_size}",
        f"{data.shards}-shards" if data.shards > 1 else "",
        f"held-out-{data.held_out:g}" if data.held_out != DataConfig().held_out else "",
        f"seed-{seed}" if seed else "",
    ]
    return command.corpus or Path("runs/corpora") / "-".join(part for part in parts if part)
