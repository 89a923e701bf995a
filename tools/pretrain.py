"""Pre-trains a BERT: `python -m tools.pretrain RECIPE.toml [--cube XxYxZ] [--data-parallel N] [--section.key VALUE]`.

On several processes it is started by torchrun; launch/local.sh does that on one machine.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from models.bert.huggingface import write_model_json
from tensor3d import Cube, CubeShape, checkpoint
from tensor3d.checkpoint import Checkpoints
from tensor3d.data.packed_batch import fit_packs_per_rank
from tensor3d.distributed.cube_shape import AXES
from tensor3d.distributed.host_all_to_all import PeerError
from tensor3d.distributed.object_collectives import format_error, run_on_all_ranks, run_on_rank0
from tensor3d.distributed.watchdog import PREEMPTED, Watchdog
from tools.common.machine import write_json
from tools.corpus.quick.prepare import prepare
from tools.corpus.tokenizers.model_dir import keep_tokenizer_of_corpus
from tools.corpus.training_corpus import CorpusFacts, TrainingCorpus, is_samples, open_corpus, read_facts
from tools.training.arguments import (
    AUTO,
    Command,
    check,
    check_folders,
    corpus_folder,
    exchange_options,
    latest_checkpoint,
    parse,
    parse_profile_ranks,
    parse_rank_order,
    resume_candidates,
)
from tools.training.data import TrainData, check_steps, global_batch, held_out_data, pretraining_data, training_source
from tools.training.environment import environment
from tools.training.loop import TrainLoop
from tools.training.metrics import ConsoleLogger, summary, table
from tools.training.mlperf_log import MLPerfLog, settings
from tools.training.profiling import ProfileSchedule, StepProfiler
from tools.training.resume import check_begin, check_resume, ended
from tools.training.trainer import Ending, Trainer

# --- What a run needs before its first step: the corpus, and plans for its packs --------------------------------------


def prepare_corpus(command: Command, *, shown: bool) -> CorpusFacts:
    """The corpus of the recipe; fast where it is prepared already. With an exchange a machine need not have all shards,
    so a folder that is there is not prepared again. Samples are taken as they are."""
    data, folder = command.settings.data, corpus_folder(command)
    if is_samples(folder) or (command.exchange and folder.is_dir()):
        return read_facts(folder)
    return prepare(
        data.source,
        folder,
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
    recipe, corpus = command.settings, open_corpus(corpus_folder(command))
    if command.exchange and corpus.missing:
        return
    source = training_source(corpus, recipe, None)
    plan = corpus.plan(recipe.data.packing)
    data = pretraining_data(recipe, source, corpus.special, plan=plan, continuations=corpus.continuations)
    if recipe.data.plans is not None:
        data.epochs.save_plan(0)
    packs = global_batch(recipe.batch, data.packing_factor)
    check_steps(recipe, data, packs, shape)
    if recipe.data.plans is not None:
        epochs = -(-recipe.run.steps * packs // data.packs_per_epoch)
        for epoch in tqdm(range(1, epochs), desc="plans", unit="epoch", disable=None):
            data.epochs.save_plan(epoch)
        print(f"plans of {epochs} epochs in {recipe.data.plans}")


def load_same_corpus(command: Command, info: CorpusFacts) -> TrainingCorpus:
    """The corpus of this machine. Raises ValueError unless it is the one that rank 0 sees, and the recipe's."""
    folder, data = corpus_folder(command), command.settings.data
    corpus = open_corpus(folder)
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


# --- What the folder of a run says: what was asked for, where it ran, and what the model is ---------------------------

_HEADS = ("pooler", "masked_lm", "next_sentence")


def write_facts(command: Command, info: CorpusFacts, around: dict[str, Any], folder: Path) -> None:
    """Puts what was asked for, and where it runs, into the folder of the run."""
    facts = {
        "recipe": command.settings.to_dict(),
        "cube": command.cube,
        "data_parallel": command.data_parallel,
        "unigram_entropy": info.unigram_entropy,
        "environment": around,
    }
    write_json(folder / "run.json", facts)


def write_model(command: Command, corpus: TrainingCorpus, folder: Path) -> None:
    """Puts what the model is, and its tokenizer, into the folder of the run: what reads models reads runs too."""
    recipe = command.settings
    facts = {"source": str(command.recipe), "max_length": recipe.data.max_length}
    keep_tokenizer_of_corpus(corpus.tokenizer, folder)
    write_model_json(folder, config=recipe.model.config(recipe.data), heads=_HEADS, facts=facts)


# --- Pre-trains a BERT ------------------------------------------------------------------------------------------------

UNSAVED = 74
"""Exit status (EX_IOERR) of a run that ended and whose last checkpoint could not be written."""
_ENDINGS: dict[Ending, str] = {
    "steps": "done",
    "target": "the target accuracy is reached",
    "patience": "stopped: the held-out loss does not fall any more",
    "signal": "stopped by a signal",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 for a bad call, recipe, corpus or checkpoint or a file that cannot be read or written, 1 where
    another rank died (one message on standard error), 74 where the last checkpoint could not be written, 75 after
    SIGTERM or SIGUSR1 and a checkpoint, 130 after Ctrl-C.
    Those with which a run ends that hangs or is orphaned stand in `tensor3d.distributed.watchdog`.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        command = parse(arguments)
        shape = CubeShape.parse(command.cube, command.data_parallel)
        check(command, shape)
        check_folders(command)
        if command.dry_run:
            print(dry_run(command, shape))
            return 0
        if command.prepare_only:
            prepare_corpus(command, shown=True)
            prepare_packs(command, shape)
            check_checkpoint(command)
            return 0
        return train(command, shape)
    except (ValueError, FloatingPointError, OSError) as problem:
        print(f"tools.pretrain: {format_error(problem)}", file=sys.stderr, flush=True)
        return 2
    except PeerError as problem:
        print(f"tools.pretrain: {problem}", file=sys.stderr, flush=True)
        return 1
    except dist.DistError as problem:
        print(f"tools.pretrain: {str(problem).splitlines()[0]}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        # torchrun passes on the Ctrl-C that has reached this process already.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return 130


def dry_run(command: Command, shape: CubeShape) -> str:
    """What a run would need and take."""
    from tools.training.estimate import report

    folder = corpus_folder(command)
    known = is_samples(folder) or (folder / "corpus.json").exists()
    return report(command.settings, shape, read_facts(folder) if known else None)


def check_checkpoint(command: Command) -> None:
    """Raises ValueError where `--resume` or `--start-from` names a checkpoint that does not fit the recipe."""
    corpus = open_corpus(corpus_folder(command))
    candidates = resume_candidates(command)
    for number, found in enumerate(candidates, start=1):
        try:
            progress = checkpoint.read_progress(found)
        except checkpoint.DamagedError:
            if number == len(candidates):
                raise
            continue
        if command.resume != AUTO or ended(progress, command.settings) is None:
            check_resume(progress, command.settings, corpus)
        return
    if command.start_from is not None:
        check_begin(latest_checkpoint(command.start_from), command.settings, corpus)


def train(command: Command, shape: CubeShape) -> int:
    """The run, on every rank. Its exit status."""
    # The watch must be first: the error of a collective that times out names nobody.
    timeout = timedelta(seconds=2 * command.settings.run.hang_after + 60)
    cube = Cube.from_env(shape.x, shape.y, shape.z, shape.data, wire=parse_rank_order(command), timeout=timeout)
    if cube.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if command.settings.precision.tf32 else "highest")
    try:
        times = command.settings.run
        with Watchdog(cube, hang_after=times.hang_after, patience=times.stop_within) as watch:
            status = run(command, cube, watch)
        cube.close()
        return status
    except KeyboardInterrupt:
        if cube.rank == 0:
            print("tools.pretrain: stopped. --resume goes on from the last checkpoint.", file=sys.stderr)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run(command: Command, cube: Cube, watch: Watchdog) -> int:
    """The run on a cube. Its folder is made when nothing can be refused any more."""
    first, recipe = cube.rank == 0, command.settings
    mllog = MLPerfLog(shown=recipe.run.mllog and first)
    mllog.starting()
    info = run_on_rank0(cube, lambda: prepare_corpus(command, shown=first))
    corpus = run_on_all_ranks(cube, lambda: load_same_corpus(command, info))
    with naming_lost_ranks(watch), TrainData.of_corpus(recipe, cube, corpus, exchange_options(command)) as feed:
        trainer = Trainer(recipe, cube, feed, corpus, watch=watch)
        found = resume_or_start(command, cube, trainer)
        if (ended := trainer.ended) is not None:
            if first:
                print(f"{found} is the end of its run ({_ENDINGS[ended]}): there is nothing left to do.")
            return 0
        folder = run_on_rank0(cube, lambda: make_run_folder(command, found))
        around = environment(cube)
        run_on_rank0(cube, lambda: write_facts(command, info, around, folder))
        run_on_rank0(cube, lambda: write_model(command, corpus, folder))
        if first:
            describe(command, cube, trainer, info, around, folder)
        if recipe.run.mllog:
            mllog.settings(settings_of(trainer, corpus))
        return loop(command, cube, trainer, mllog, folder, info)


def loop(command: Command, cube: Cube, trainer: Trainer, mllog: MLPerfLog, folder: Path, info: CorpusFacts) -> int:
    """Trains, with all that is written on the way."""
    recipe, first = command.settings.run, cube.rank == 0

    def waiting(written: int) -> None:
        trainer.at(f"checkpoint, {written:,} bytes written")

    profile = None if command.profile is None else ProfileSchedule.parse(command.profile)
    ranks = parse_profile_ranks(command.profile_ranks, cube.shape)
    with (
        ConsoleLogger(
            directory=folder,
            steps=recipe.steps,
            first_step=trainer.first_step,
            shown=first,
            log_every=recipe.log_every,
        ) as display,
        Checkpoints(
            folder / "checkpoints",
            cube,
            keep_last=recipe.checkpoint_keep,
            keep_every=recipe.checkpoint_keep_every or None,
            asynchronous=recipe.asynchronous,
            waiting=waiting,
        ) as checkpoints,
        StepProfiler(profile, folder, rank=cube.rank, ranks=ranks) as tracer,
    ):
        run = TrainLoop(trainer, display, checkpoints, mllog=mllog, tracer=tracer)
        ending = run.to_the_end()
        display.event("end", reason=ending, samples=trainer.standing.samples, seconds=trainer.standing.seconds)
    if first:
        conclude(display, trainer, ending, info, folder, tracer.written)
    if run.unsaved:
        if first:
            print(
                f"tools.pretrain: the run has ended after step {trainer.standing.step}, and its last checkpoint could "
                "not be written (above). What came after the one before is lost.",
                file=sys.stderr,
            )
        return UNSAVED
    return PREEMPTED if ending == "signal" else 0


def resume_or_start(command: Command, cube: Cube, trainer: Trainer) -> Path | None:
    """Loads what the run goes on or begins with, and returns the checkpoint that it goes on from, if any; the same on
    every rank."""
    candidates = run_on_rank0(cube, lambda: resume_candidates(command))
    for number, found in enumerate(candidates, start=1):
        try:
            trainer.resume(found, finished=command.resume == AUTO)
            return found
        except checkpoint.DamagedError as damage:
            if number == len(candidates):
                raise
            if cube.rank == 0:
                print(f"tools.pretrain: {damage} Trying the one before.", file=sys.stderr, flush=True)
    if command.start_from is not None:
        source = command.start_from
        told = trainer.start_from(run_on_rank0(cube, lambda: latest_checkpoint(source)))
        if cube.rank == 0:
            print(told, flush=True)
    return None


@contextmanager
def naming_lost_ranks(watch: Watchdog) -> Iterator[None]:
    """Where a collective fails, its error names no rank; the watch has heard who is lost."""
    try:
        yield
    except RuntimeError as error:
        collective = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
        if isinstance(error, PeerError) or not collective:
            raise
        raise PeerError(watch.failed(str(error))) from error


def make_run_folder(command: Command, found: Path | None) -> Path:
    """The folder of this run. A new run never writes into another run's folder."""
    if command.resume == AUTO and command.output is not None:
        folder = command.output
    elif found is not None:
        folder = found.parent.parent
    else:
        folder = command.output or Path("runs") / command.recipe.stem
        number = 2
        while command.output is None and (folder / "run.json").exists():
            folder = Path("runs") / f"{command.recipe.stem}-{number}"
            number += 1
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def settings_of(trainer: Trainer, corpus: TrainingCorpus) -> dict[str, Any]:
    """What MLPerf asks a log to say of a run."""
    recipe, feed, shape = trainer.recipe, trainer.feed, trainer.cube.shape
    data, held_out = feed.data, corpus.info.has_held_out
    k = fit_packs_per_rank(feed.global_batch, shape, recipe.batch.packs_per_rank)
    return settings(
        recipe.optimizer,
        betas=feed.betas(),
        seed=recipe.run.seed,
        steps=recipe.run.steps,
        global_batch=round(feed.global_batch * data.packing_factor),
        accumulation=feed.global_batch // (shape.data * shape.x * shape.z * k),
        train_samples=int(data.epochs[0].sequences.sum()),
        eval_samples=int(held_out_data(recipe, corpus).epochs[0].sequences.sum()) if held_out else 0,
    )


def describe(
    command: Command, cube: Cube, trainer: Trainer, info: CorpusFacts, around: dict[str, Any], folder: Path
) -> None:
    """What is about to happen, with the resolved recipe."""
    config = trainer.model.config
    rows = [
        (
            "model",
            f"{config.layers} layers, hidden {config.hidden}, {config.heads} heads, {trainer.parameters:,} weights",
        ),
        ("cube", f"{cube.shape} = {cube.shape.ranks} processes on {cube.device.type}{placement(cube)}"),
        ("corpus", info.in_words()),
        ("environment", ", ".join(f"{name} {value}" for name, value in around.items() if name != "command")),
        ("run", str(folder)),
    ]
    if trainer.first_step:
        rows.append(("goes on", f"after step {trainer.first_step}"))
    print("\n".join(table(rows)))
    for section, values in command.settings.to_dict().items():
        print(f"  [{section}] " + ", ".join(f"{name} = {value}" for name, value in values.items()))
    sys.stdout.flush()


def placement(cube: Cube) -> str:
    """How the axes lie on nodes, in words, where there are several."""
    per_node, shape = cube.ranks_per_node, cube.shape
    order = "" if shape.wire == AXES else f", in the order {','.join(shape.wire)}"
    return order + (f", {shape.placement(per_node)}" if per_node is not None and per_node < shape.ranks else "")


def conclude(
    display: ConsoleLogger, trainer: Trainer, ending: Ending, info: CorpusFacts, folder: Path, traces: Sequence[Path]
) -> None:
    """What was done, and where things are."""
    standing, found = trainer.standing, checkpoint.latest(folder / "checkpoints")
    rows = [
        (
            "time and samples",
            f"{standing.seconds:,.1f} s of training, {standing.samples:,} sequences, {standing.step} steps",
        ),
        ("checkpoint", str(found) if found else "none was asked for"),
        ("TensorBoard", shlex.join(["tensorboard", "--logdir", str(folder / "tensorboard")])),
        ("plot of the loss", shlex.join(["python", "-m", "tools.plot", str(folder)])),
        *(("trace", str(path)) for path in traces),
    ]
    if ending == "signal":
        rows.append(("go on with", f"--resume {folder}"))
    lines = summary(display.history, display.evaluations, info.unigram_entropy, memories=display.memories)
    print("\n".join(["", f"{_ENDINGS[ending]}:", *lines, *table(rows)]))


if __name__ == "__main__":
    sys.exit(main())
