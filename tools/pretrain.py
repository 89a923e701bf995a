"""Pre-trains a BERT: `python -m tools.pretrain RECIPE.toml [--cube XxYxZ] [--data-parallel N] [--section.key VALUE]`.

On several processes it is started by torchrun; launch/local.sh does that on one machine.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import tyro
from tqdm import tqdm

from tensor3d import Cube, CubeShape, checkpoint
from tensor3d.data import ExchangeOptions
from tensor3d.data.exchange import check_within, shards_of
from tensor3d.data.layout import check_rows, fit_packs_per_rank
from tensor3d.peers import PeerError
from tools.agree import in_words, on_every_rank, on_first_rank
from tools.corpus.info import Corpus, CorpusInfo, load_corpus, read_info
from tools.corpus.prepare import prepare
from tools.feed import Feed, check_steps, global_batch, pretraining_data, training_source
from tools.metrics import Display, summary, table
from tools.recipe import Recipe, read_recipe
from tools.trainer import Trainer, check_resume

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
    output: Path | None = None
    """Folder of the run. Default: runs/NAME of the recipe, with a number behind it if that exists."""
    corpus: Path | None = None
    """Folder of the prepared corpus, made if missing. Default: runs/corpora/SOURCE-VOCABULARY."""
    resume: Path | None = None
    """A checkpoint (step-NNNNNNNN), or the newest one of a folder of checkpoints or of a run. The run goes on in its
    folder."""
    prepare_only: bool = False
    """Check everything, prepare the corpus and the plans that the recipe asks for, and stop before training."""
    exchange: bool = False
    """Let each data rank read its own shards only, and get sequences from the others while it trains. The corpus folder
    is then taken as it is on each machine."""
    exchange_every: int = EXCHANGE_EVERY
    """Steps of which the sequences are exchanged together."""
    exchange_within: int | None = None
    """Consecutive data ranks among which sequences move, such as those of a node; data.groups must allow it."""
    settings: Annotated[Recipe, tyro.conf.arg(name="")] = field(default_factory=Recipe)
    """The recipe's values, each of which can be given here."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 for a bad call, recipe, corpus or checkpoint or a file that cannot be read or written, 1 for
    a rank that died while sequences were exchanged (one message on standard error); 130 after Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        command = parse(arguments)
        shape = CubeShape.parse(command.cube, command.data_parallel)
        check(command, shape)
        check_folders(command)
        if command.prepare_only:
            prepare_corpus(command, shown=True)
            prepare_packs(command, shape)
            check_checkpoint(command)
            return 0
        train(command, shape)
    except (ValueError, FloatingPointError, OSError) as problem:
        print(f"tools.pretrain: {in_words(problem)}", file=sys.stderr, flush=True)
        return 2
    except PeerError as problem:
        print(f"tools.pretrain: {problem}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        # torchrun passes on the Ctrl-C that has reached this process already.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return 130
    return 0


def parse(arguments: Sequence[str]) -> Command:
    """The command line, with the recipe's values as the defaults of its options."""
    path = next((Path(argument) for argument in arguments if argument.endswith(".toml")), None)
    # Without a recipe tyro says what is missing, or prints the help.
    settings = Recipe() if path is None else read_recipe(path)
    default = Command(recipe=tyro.MISSING, settings=settings)
    command = tyro.cli(Command, args=list(arguments), default=default, prog="python -m tools.pretrain")
    if command.recipe != path:
        raise ValueError(f"a recipe is a file *.toml; shipped ones lie in launch/recipes. Got {command.recipe}.")
    return command


def check(command: Command, shape: CubeShape) -> None:
    """Raises ValueError for what can be seen before any process is connected."""
    recipe = command.settings
    recipe.model.config(recipe.data).check(shape)
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


def exchange_options(command: Command) -> ExchangeOptions | None:
    """How sequences are exchanged, if they are. Raises ValueError for numbers below 1."""
    if not command.exchange:
        return None
    return ExchangeOptions(every=command.exchange_every, within=command.exchange_within)


def check_folders(command: Command) -> None:
    """Raises ValueError where `--resume` is no checkpoint or a new run cannot have its folder, before text is read."""
    output = command.output
    if command.resume is not None:
        if output is not None:
            raise ValueError("--output and --resume exclude each other: a resumed run goes on in its folder. Drop one.")
        checkpoint.read_progress(resume_folder(command.resume))
        return
    folder = (output or Path("runs")).absolute()
    if output is not None and (output / "run.json").exists():
        raise ValueError(f"{output} holds a run already. Choose another --output, or --resume {output}/checkpoints.")
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"the run needs a folder, and {there} is a file. Choose another --output.")
    if not os.access(there, os.W_OK):
        raise ValueError(f"the run needs a folder, and nothing may be written in {there}. Choose another --output.")


def check_checkpoint(command: Command) -> None:
    """Raises ValueError where `--resume` names a checkpoint that the recipe and its corpus do not continue."""
    if command.resume is not None:
        progress = checkpoint.read_progress(resume_folder(command.resume))
        check_resume(progress, command.settings, load_corpus(corpus_folder(command)))


def train(command: Command, shape: CubeShape) -> None:
    """The run, on every rank."""
    cube = Cube.from_env(shape.x, shape.y, shape.z, shape.data)
    try:
        run(command, cube)
    except KeyboardInterrupt:
        if cube.rank == 0:
            print("tools.pretrain: stopped. --resume goes on from the last checkpoint.", file=sys.stderr)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run(command: Command, cube: Cube) -> None:
    """The run on a cube. Its folder is made when nothing can be refused any more."""
    first = cube.rank == 0
    info = on_first_rank(cube, lambda: prepare_corpus(command, shown=first))
    corpus = on_every_rank(cube, lambda: load_same_corpus(command, info))
    with Feed.of_corpus(command.settings, cube, corpus, exchange_options(command)) as feed:
        trainer = Trainer(command.settings, cube, feed, corpus)
        if command.resume is not None:
            trainer.resume(resume_folder(command.resume))
        folder = on_first_rank(cube, lambda: make_run_folder(command, info))
        if first:
            describe(command, cube, trainer, info, folder)
        with (
            Display(
                directory=folder / "tensorboard",
                steps=command.settings.run.steps,
                first_step=trainer.first_step,
                shown=first,
                log_every=command.settings.run.log_every,
            ) as display,
            naming_lost_ranks(feed),
        ):
            trainer.run(display, folder / "checkpoints")
    if first:
        conclude(display, info, folder)


@contextmanager
def naming_lost_ranks(feed: Feed) -> Iterator[None]:
    """Where a collective fails, its error names no rank. Those who exchange sequences can find out who is lost."""
    try:
        yield
    except RuntimeError as error:
        collective = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
        if feed.exchange is None or not collective:
            raise
        raise feed.exchange.everyone.blame(str(error)) from error


def load_same_corpus(command: Command, info: CorpusInfo) -> Corpus:
    """The corpus of this machine. Raises ValueError unless it is the one that rank 0 sees, and the recipe's."""
    folder, data = corpus_folder(command), command.settings.data
    corpus = load_corpus(folder)
    if corpus.info != info:
        raise ValueError(
            f"{folder} is not the corpus that rank 0 sees: it was replaced while this run began, or this machine has "
            "another one. Give each run a --corpus of its own, the same on all machines."
        )
    # With an exchange the folder was taken as it is.
    for name in ("vocab_size", "shards", "held_out"):
        if getattr(info, name) != getattr(data, name):
            raise ValueError(
                f"{folder} was prepared with {name} = {getattr(info, name)}, the recipe says data.{name} = "
                f"{getattr(data, name)}. Prepare it again, or change the recipe."
            )
    return corpus


def prepare_corpus(command: Command, *, shown: bool) -> CorpusInfo:
    """The corpus of the recipe; fast where it is prepared already. With an exchange a machine need not have all shards,
    so a folder that is there is not prepared again."""
    data = command.settings.data
    if command.exchange and corpus_folder(command).is_dir():
        return read_info(corpus_folder(command))
    return prepare(
        data.source,
        corpus_folder(command),
        vocab_size=data.vocab_size,
        held_out=data.held_out,
        seed=command.settings.run.seed,
        shards=data.shards,
        progress=shown,
    )


def prepare_packs(command: Command, shape: CubeShape) -> None:
    """Checks what can be known when the corpus is packed, and writes the plan files of the epochs that the run will
    read, if the recipe has a folder for them.

    With an exchange this machine may lack shards; then the ranks check, and plan, for themselves.
    """
    recipe, corpus = command.settings, load_corpus(corpus_folder(command))
    if command.exchange and None in corpus.train:
        return
    data = pretraining_data(recipe, training_source(corpus, recipe, None), corpus.special)
    if recipe.data.plans is not None:
        data.epochs.save_plan(0)
    packs = global_batch(recipe.batch, data.packing_factor)
    sizes = (shape.data, shape.x, shape.y, shape.z)
    check_steps(recipe, data, packs, cube_shape=sizes, data_index=0, x_index=0, z_index=0)
    if recipe.data.plans is not None:
        epochs = -(-recipe.run.steps * packs // data.packs_per_epoch)
        for epoch in tqdm(range(1, epochs), desc="plans", unit="epoch", disable=None):
            data.epochs.save_plan(epoch)
        print(f"plans of {epochs} epochs in {recipe.data.plans}")


def corpus_folder(command: Command) -> Path:
    data = command.settings.data
    shards = f"-{data.shards}-shards" if data.shards > 1 else ""
    return command.corpus or Path("runs/corpora") / f"{Path(data.source).stem}-{data.vocab_size}{shards}"


def resume_folder(path: Path) -> Path:
    """The checkpoint meant by `--resume`."""
    return checkpoint.latest(path) or checkpoint.latest(path / "checkpoints") or path


def make_run_folder(command: Command, info: CorpusInfo) -> Path:
    """The folder of this run, with what was asked for in it. A run never writes into another run's folder."""
    if command.resume is not None:
        folder = resume_folder(command.resume).parent.parent
    else:
        folder = command.output or Path("runs") / command.recipe.stem
        number = 2
        while command.output is None and (folder / "run.json").exists():
            folder = Path("runs") / f"{command.recipe.stem}-{number}"
            number += 1
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "recipe": command.settings.to_dict(),
        "cube": command.cube,
        "data_parallel": command.data_parallel,
        "unigram_entropy": info.unigram_entropy,
        "torch": torch.__version__,
    }
    draft = folder / "run.json.partial"
    draft.write_text(json.dumps(facts, indent=2) + "\n")
    os.replace(draft, folder / "run.json")
    return folder


def describe(command: Command, cube: Cube, trainer: Trainer, info: CorpusInfo, folder: Path) -> None:
    """What is about to happen, with the resolved recipe."""
    config = trainer.model.config
    rows = [
        (
            "model",
            f"{config.layers} layers, hidden {config.hidden}, {config.heads} heads, {trainer.parameters:,} weights",
        ),
        ("cube", f"{cube.shape} = {cube.shape.ranks} processes on {cube.device.type}"),
        ("corpus", f"{info.pieces:,} pieces of {info.vocab_size:,}, unigram entropy {info.unigram_entropy:.3f} nats"),
        ("run", str(folder)),
    ]
    print("\n".join(table(rows)))
    for section, values in command.settings.to_dict().items():
        print(f"  [{section}] " + ", ".join(f"{name} = {value}" for name, value in values.items()))
    sys.stdout.flush()


def conclude(display: Display, info: CorpusInfo, folder: Path) -> None:
    """What was done, and where things are."""
    newest = checkpoint.latest(folder / "checkpoints")
    places = [
        ("checkpoint", str(newest) if newest else "none was asked for"),
        ("TensorBoard", shlex.join(["tensorboard", "--logdir", str(folder / "tensorboard")])),
        ("plot of the loss", shlex.join(["python", "-m", "tools.plot", str(folder)])),
    ]
    print(
        "\n".join(["", "done:", *summary(display.history, display.evaluations, info.unigram_entropy), *table(places)])
    )


if __name__ == "__main__":
    sys.exit(main())
