"""Pre-trains a BERT: `python -m tools.pretrain RECIPE.toml [--cube XxYxZ] [--data-parallel N] [--section.key VALUE]`.

On several processes it is started by torchrun; launch/local.sh does that on one machine.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
import tyro

from tensor3d import Cube, CubeShape, checkpoint
from tensor3d.data.layout import check_rows, fit_packs_per_rank
from tools.corpus.info import CorpusInfo, load_corpus
from tools.corpus.prepare import prepare
from tools.metrics import Display, summary, table
from tools.recipe import Recipe, read_recipe
from tools.trainer import Trainer, check_resume

T = TypeVar("T")


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
    """Check everything, prepare the corpus, and stop before training."""
    settings: Annotated[Recipe, tyro.conf.arg(name="")] = field(default_factory=Recipe)
    """The recipe's values, each of which can be given here."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 for a bad call, recipe, corpus or checkpoint or a file that cannot be read or written (one
    message on standard error); 130 after Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        command = parse(arguments)
        shape = CubeShape.parse(command.cube, command.data_parallel)
        check(command, shape)
        check_folders(command)
        if command.prepare_only:
            prepare_corpus(command, shown=True)
            check_checkpoint(command)
            return 0
        train(command, shape)
    except (ValueError, FloatingPointError, OSError) as problem:
        print(f"tools.pretrain: {in_words(problem)}", file=sys.stderr, flush=True)
        return 2
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
    sizes = (shape.data, shape.x, shape.y, shape.z)
    k = fit_packs_per_rank(recipe.batch.global_batch, sizes, recipe.batch.packs_per_rank)
    check_rows(packs_per_rank=k, z=shape.z, capacity=recipe.data.capacity, y=shape.y)


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
    """The run, on every rank. Its folder is made when nothing can be refused any more."""
    cube = Cube.from_env(shape.x, shape.y, shape.z, shape.data)
    try:
        first = cube.rank == 0
        info = on_first_rank(cube, lambda: prepare_corpus(command, shown=first))
        corpus = load_corpus(corpus_folder(command))
        if corpus.info != info:
            raise ValueError(
                f"{corpus_folder(command)} was replaced while this run began. Give each run a --corpus of its own."
            )
        trainer = Trainer(command.settings, cube, corpus)
        if command.resume is not None:
            trainer.resume(resume_folder(command.resume))
        folder = on_first_rank(cube, lambda: make_run_folder(command, info))
        if first:
            describe(command, cube, trainer, folder)
        with Display(
            directory=folder / "tensorboard",
            steps=command.settings.run.steps,
            first_step=trainer.first_step,
            shown=first,
            log_every=command.settings.run.log_every,
        ) as display:
            trainer.run(display, folder / "checkpoints")
        if first:
            conclude(display, info, folder)
    except KeyboardInterrupt:
        if cube.rank == 0:
            print("tools.pretrain: stopped. --resume goes on from the last checkpoint.", file=sys.stderr)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def on_first_rank(cube: Cube, action: Callable[[], T]) -> T:
    """The result of `action`, done on rank 0 alone; its ValueError or OSError is a ValueError on every rank."""
    outcome: list[Any] = [None, None]
    if cube.rank == 0:
        try:
            outcome[0] = action()
        except (ValueError, OSError) as problem:
            outcome[1] = in_words(problem)
    if cube.mesh is not None:
        dist.broadcast_object_list(outcome, device=cube.device)
    if outcome[1] is not None:
        raise ValueError(outcome[1])
    result: T = outcome[0]
    return result


def in_words(problem: Exception) -> str:
    """One line for the user, also of what the operating system refuses."""
    if isinstance(problem, OSError) and problem.filename is not None:
        return f"{problem.filename} cannot be read or written: {problem.strerror}."
    return str(problem)


def prepare_corpus(command: Command, *, shown: bool) -> CorpusInfo:
    """The corpus of the recipe; fast where it is prepared already."""
    data = command.settings.data
    return prepare(
        data.source,
        corpus_folder(command),
        vocab_size=data.vocab_size,
        held_out=data.held_out,
        seed=command.settings.run.seed,
        progress=shown,
    )


def corpus_folder(command: Command) -> Path:
    data = command.settings.data
    return command.corpus or Path("runs/corpora") / f"{Path(data.source).stem}-{data.vocab_size}"


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


def describe(command: Command, cube: Cube, trainer: Trainer, folder: Path) -> None:
    """What is about to happen, with the resolved recipe."""
    config, info = trainer.model.config, trainer.corpus.info
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
