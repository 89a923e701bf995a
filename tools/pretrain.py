"""Pre-trains a BERT: `python -m tools.pretrain RECIPE.toml [--cube XxYxZ] [--data-parallel N] [--section.key VALUE]`.

On several processes it is started by torchrun; launch/local.sh does that on one machine.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from models.bert.huggingface import GENERATOR, open_weights, write_model_json
from tensor3d import Cube, checkpoint
from tensor3d.checkpoint import Checkpoints
from tensor3d.checkpoint.directory import clean, unread, without_folder
from tensor3d.data.packed_batch import fit_packs_per_rank
from tensor3d.distributed.cube_shape import AXES
from tensor3d.distributed.host_all_to_all import PeerError
from tensor3d.distributed.object_collectives import run_on_all_ranks, run_on_rank0
from tensor3d.distributed.watchdog import PREEMPTED, Watchdog
from tools.common.cli import cube_of, run_main
from tools.common.files import check_unlocked, make_folder, remove
from tools.common.log import lasting_streams, progress, take_verbose
from tools.common.machine import environment, write_json
from tools.common.units import in_bytes
from tools.corpus.quick.corpus_info import CorpusInfo
from tools.corpus.quick.prepare import in_lines, prepare
from tools.corpus.tokenizers.model_dir import CONFIG, HUGGINGFACE, keep_tokenizer_of_run
from tools.corpus.training_corpus import CorpusFacts, TrainingCorpus, is_samples, open_corpus, read_facts
from tools.training.arguments import Command, parse, resolve
from tools.training.data import (
    TrainData,
    check_steps,
    global_batch,
    held_out_data,
    pretraining_data,
    ramp,
    training_source,
)
from tools.training.factory import set_kernels
from tools.training.idle_settings import idle_settings
from tools.training.loop import LoopSchedule, TrainLoop
from tools.training.metrics import JOURNAL, ConsoleLogger, first_step, summary, table
from tools.training.mlperf_log import MLPerfLog, settings
from tools.training.pretraining import PretrainTrainer
from tools.training.profiling import StepProfiler
from tools.training.resume import check_begin, check_resume, ended
from tools.training.run_plan import AUTO, RunPlan, first_intact, latest_checkpoint
from tools.training.trainer import Ending

_log = logging.getLogger("tools.pretrain")

# --- What a run needs before its first step: the corpus, and plans for its packs --------------------------------------


def prepare_corpus(plan: RunPlan, *, shown: bool) -> CorpusFacts:
    """The corpus of the recipe; fast where it is prepared already. With an exchange a machine need not have all shards,
    so a folder that is there is not prepared again. Samples are taken as they are.

    Other runs may read the folder: one whose checkpoint does not fit what would take its place is refused before.
    """
    data, folder = plan.recipe.data, plan.corpus
    if is_samples(folder) or (plan.exchange and folder.is_dir()):
        return read_facts(folder)
    return prepare(
        data.source,
        folder,
        vocab_size=data.vocab_size,
        held_out=data.held_out,
        seed=plan.recipe.run.seed,
        shards=data.shards,
        language=data.language,
        progress=shown,
        check=lambda draft: check_checkpoint(plan, draft),
    )


def prepare_packs(plan: RunPlan) -> None:
    """Checks what can be known when the corpus is packed, and writes the plan files of the epochs that the run will
    read, if the recipe has a folder for them.

    With an exchange this machine may lack shards; then the ranks check, and plan, for themselves.
    """
    recipe, shape, corpus = plan.recipe, plan.shape, open_corpus(plan.corpus)
    if plan.exchange and corpus.missing:
        return
    source = training_source(corpus, recipe, None)
    packing = corpus.plan(recipe.data.packing)
    data = pretraining_data(recipe, source, corpus.special, plan=packing, continuations=corpus.continuations)
    if recipe.data.plans is not None:
        data.epochs.save_plan(0)
    packs = global_batch(recipe.batch, data.packing_factor)
    check_steps(recipe, data, packs, shape)
    if recipe.data.plans is not None:
        epochs = -(-ramp(recipe.batch).before(recipe.run.steps, packs) // data.packs_per_epoch)
        for epoch in progress(range(1, epochs), desc="plans", unit="epoch"):
            data.epochs.save_plan(epoch)
        _log.info("plans of %d epochs in %s", epochs, recipe.data.plans)


def load_same_corpus(plan: RunPlan, info: CorpusFacts) -> TrainingCorpus:
    """The corpus of this machine. Raises ValueError unless it is the one that rank 0 sees, and the recipe's."""
    folder, data = plan.corpus, plan.recipe.data
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


def check_padding(plan: RunPlan, corpus: TrainingCorpus) -> None:
    """Raises ValueError where positions would not begin behind that of padding: the library, which begins them there,
    would number those of the trained model otherwise."""
    config, pad = plan.recipe.model.config(plan.recipe.data), corpus.special.pad
    if config.first_position not in (0, pad + 1):
        remedy = f"Set model.first_position = {pad + 1}"
        if config.family == "mpnet":
            remedy = (
                "Take one whose padding has the id 1: MPNet's own (tools.corpus tokenizer --tokenizer-file) or one of "
                "bytes (--model bpe-bytes)"
            )
        raise ValueError(
            f"model.first_position = {config.first_position} of family={config.family!r} is the id of padding and one "
            f"more, and padding has the id {pad} in the tokenizer of the corpus. {remedy}."
        )


# --- What the folder of a run says: what was asked for, where it ran, and what the model is ---------------------------

_BEGUN = ("run.json", "model.json", "tokenizer", "huggingface", "metrics.jsonl", "tensorboard")
"""What a run writes before its first step."""


def write_facts(plan: RunPlan, info: CorpusFacts, around: dict[str, Any], folder: Path) -> None:
    """Puts what was asked for, and where it runs, into the folder of the run."""
    facts = {
        "recipe": plan.recipe.to_dict(),
        "cube": plan.cube,
        "data_parallel": plan.shape.data,
        "unigram_entropy": info.unigram_entropy,
        "environment": around,
    }
    write_json(folder / "run.json", facts)


def write_model(plan: RunPlan, corpus: TrainingCorpus, folder: Path) -> None:
    """Puts what the model is, and its tokenizer, into the folder of the run: what reads models reads runs too."""
    recipe = plan.recipe
    facts: dict[str, Any] = {"source": str(plan.recipe_file), "max_length": recipe.data.max_length}
    keep_tokenizer_of_run(corpus.tokenizer, folder, plan.start_from)
    if plan.start_from is not None:
        _keep_settings(plan.start_from, folder)
    heads = ("masked_lm",) if recipe.data.single else ("pooler", "masked_lm", "next_sentence")
    if (generator := recipe.generator) is not None:
        heads = ("replaced_tokens",)
        facts[GENERATOR] = dataclasses.asdict(generator)
    write_model_json(folder, config=recipe.model.config(recipe.data), heads=heads, facts=facts)


def _keep_settings(start_from: Path, folder: Path) -> None:
    """Of a model of the library: what its config.json says besides, for `tools.convert to-hf`."""
    path, settings = folder / HUGGINGFACE / CONFIG, None
    with suppress(ValueError):  # a checkpoint alone, whose run has no model.json
        settings = None if path.exists() else open_weights(latest_checkpoint(start_from)).settings
    if settings is not None:
        make_folder(path.parent)
        write_json(path, settings)


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
    words, verbose = take_verbose(arguments)
    return run_main("tools.pretrain", lambda: carry_out(resolve(parse(words)), words), verbose=verbose, options=Command)


def carry_out(plan: RunPlan, words: Sequence[str]) -> int:
    """What the call was for. Its exit status.

    Args:
        words: the command line, to be told with what is left to do.
    """
    plan.check()
    plan.check_folders()
    if plan.purpose == "dry run":
        print(dry_run(plan))
        return 0
    if plan.purpose == "prepare":
        if tell_ended(ended_run(plan)):
            return 0
        if plan.output is not None or plan.resume is not None:
            check_unlocked(next(plan.run_folders()))
        info = prepare_corpus(plan, shown=True)
        prepare_packs(plan)
        check_checkpoint(plan, plan.corpus)
        print(prepared(plan, info, words))
        return 0
    with lasting_streams():
        return train(plan)


def prepared(plan: RunPlan, info: CorpusFacts, words: Sequence[str]) -> str:
    """What a preparation has come to, where it lies, and how to train on it."""
    sizes = [path.stat().st_size for path in plan.corpus.iterdir() if path.is_file()]
    train = [word for word in words if word not in ("--prepare-only", "--prepare_only")]
    start = ["launch/local.sh"] if plan.shape.ranks > 1 else ["python", "-m", "tools.pretrain"]
    told = in_lines(info) if isinstance(info, CorpusInfo) else f"  corpus      {info.in_words()}"
    return "\n".join(
        [
            f"{plan.corpus}: prepared, {in_bytes(sum(sizes))} in {len(sizes)} files",
            told,
            *([f"  plans       {plan.recipe.data.plans}"] if plan.recipe.data.plans is not None else []),
            "next:",
            f"  {shlex.join([*start, *train])}",
        ]
    )


def dry_run(plan: RunPlan) -> str:
    """What a run would need and take."""
    from tools.training.estimate import report

    known = is_samples(plan.corpus) or (plan.corpus / "corpus.json").exists()
    return report(plan.recipe, plan.shape, read_facts(plan.corpus) if known else None)


def check_checkpoint(plan: RunPlan, folder: Path) -> None:
    """Raises ValueError where `--resume` or `--start-from` names a checkpoint that does not fit the recipe, or the
    corpus in a folder."""
    corpus = open_corpus(folder)

    def check(found: Path) -> Path:
        check_resume(checkpoint.read_progress(found), plan.recipe, corpus)
        return found

    goes_on = first_intact(plan.resume_candidates(), check, damaged=lambda _: None)
    if goes_on is None:
        if plan.start_from is not None:
            check_begin(latest_checkpoint(plan.start_from), plan.recipe, corpus, plan.start_generator_from)
        check_padding(plan, corpus)


class EndedRun(NamedTuple):
    """A run of which nothing is left to do."""

    checkpoint: Path
    """The last one, which is whole."""
    ending: Ending
    damaged: tuple[str, ...]
    """What is wrong with later ones."""


def ended_run(plan: RunPlan) -> EndedRun | None:
    """The run that `--resume auto` would go on with, where it has come to its end. Its corpus is not looked at, which
    may have made way for another one's.

    Raises:
        ValueError: what a checkpoint says of its run cannot be read.
    """

    def look(found: Path) -> tuple[Path, Ending | None]:
        reason = ended(checkpoint.read_progress(found), plan.recipe)
        # Nothing will be loaded, so that nobody else would notice.
        if reason is not None and (problems := checkpoint.verify(found)):
            raise checkpoint.DamagedError(f"{'; '.join(problems)}.")
        return found, cast("Ending | None", reason)

    if plan.resume != AUTO:
        return None
    damaged: list[str] = []
    found, ending = first_intact(plan.resume_candidates(), look, damaged.append) or (None, None)
    return None if found is None or ending is None else EndedRun(found, ending, tuple(damaged))


def tell_ended(run: EndedRun | None) -> bool:
    """Whether there is one."""
    if run is None:
        return False
    for problem in run.damaged:
        tell_damage(problem)
    _log.info("%s is the end of its run (%s): there is nothing left to do.", run.checkpoint, _ENDINGS[run.ending])
    return True


def tell_damage(problem: str) -> None:
    _log.warning("tools.pretrain: %s Trying the one before.", problem)


def train(plan: RunPlan) -> int:
    """The run, on every rank. Its exit status."""
    times = plan.recipe.run
    # The watch must be first: the error of a collective that times out names nobody.
    timeout, rank = timedelta(seconds=2 * times.hang_after + 60), -1
    try:
        with cube_of(plan.shape, wire=plan.rank_order, timeout=timeout) as cube:
            rank = cube.rank
            set_kernels(plan.recipe, cube)
            with Watchdog(cube, hang_after=times.hang_after, patience=times.stop_within) as watch:
                return run(plan, cube, watch)
    except KeyboardInterrupt:
        if rank == 0:
            _log.warning("tools.pretrain: stopped. --resume goes on from the last checkpoint.")
        raise


def run(plan: RunPlan, cube: Cube, watch: Watchdog) -> int:
    """The run on a cube. Its folder is this run's from before anything in it is read; where the run is refused, nothing
    is left in it."""
    with ExitStack() as held:  # by rank 0
        folder = run_on_rank0(cube, lambda: plan.take_folder(held))
        if plan.resume is not None:
            # What a kill has left there: with the folder nobody writes to it, so that no time has to pass first.
            run_on_rank0(cube, lambda: clean(folder / "checkpoints", older_than=0.0), any_time=True)
        return run_in(folder, plan, cube, watch)


def run_in(folder: Path, plan: RunPlan, cube: Cube, watch: Watchdog) -> int:
    """The run in its folder."""
    first, recipe = cube.rank == 0, plan.recipe
    mllog = MLPerfLog(shown=recipe.run.mllog and first)
    mllog.starting()
    done = run_on_rank0(cube, lambda: ended_run(plan), any_time=True)
    if done is not None:
        if first:
            tell_ended(done)
        return 0
    info = run_on_rank0(cube, lambda: prepare_corpus(plan, shown=first), any_time=True)
    corpus = run_on_all_ranks(cube, lambda: load_same_corpus(plan, info))
    with naming_lost_ranks(watch), TrainData.of_corpus(recipe, cube, corpus, plan.exchange) as feed:
        trainer = PretrainTrainer(recipe, cube, feed, corpus, watch=watch)
        found = resume_or_start(plan, cube, trainer)
        if found is None:
            run_on_all_ranks(cube, lambda: check_padding(plan, corpus))
        around = environment(cube)

        def restore() -> None:
            write_facts(plan, info, around, folder)
            write_model(plan, corpus, folder)

        begun = trainer.state.step
        new = [folder / name for name in _BEGUN if first and found is None and not os.path.lexists(folder / name)]
        try:
            run_on_rank0(cube, restore)
            if first:
                describe(cube, trainer, info, around, folder)
            if recipe.run.mllog:
                mllog.settings(settings_of(trainer, corpus))
            return loop(plan, cube, trainer, mllog, folder, info, restore)
        except (OSError, ValueError):
            # Of a run that could not even begin, as on a full disk, nothing is left that would keep the next one out.
            for path in reversed(new) if trainer.state.step == begun else ():  # run.json at last
                remove(path)
            raise


def loop(
    plan: RunPlan,
    cube: Cube,
    trainer: PretrainTrainer,
    mllog: MLPerfLog,
    folder: Path,
    info: CorpusFacts,
    restore: Callable[[], None],
) -> int:
    """Trains, with all that is written on the way."""
    recipe, first = plan.recipe.run, cube.rank == 0

    schedule = LoopSchedule(
        steps=recipe.steps,
        evaluate_every=recipe.evaluate_every,
        checkpoint_every=recipe.checkpoint_every,
        keep_best="marked" if recipe.patience > 0 else "no",
    )

    def waiting(written: int) -> None:
        trainer.at(f"checkpoint, {written:,} bytes written")

    display = ConsoleLogger(
        directory=folder,
        steps=recipe.steps,
        first_step=trainer.state.step,
        shown=first,
        restore=restore,
        log_every=recipe.log_every,
        mllog=mllog,
    )
    with ExitStack() as stack:
        run_on_all_ranks(cube, lambda: stack.enter_context(display))
        checkpoints = stack.enter_context(
            Checkpoints(
                folder / "checkpoints",
                trainer.cube,
                keep_last=recipe.checkpoint_keep,
                keep_every=recipe.checkpoint_keep_every or None,
                asynchronous=recipe.asynchronous,
                waiting=waiting,
            )
        )
        tracer = stack.enter_context(StepProfiler(plan.profile, folder, rank=cube.rank, ranks=plan.profile_ranks))
        if trainer.state.step:
            display.event("resume", cube=plan.cube, data_parallel=plan.shape.data)
        run = TrainLoop(trainer, display, checkpoints, schedule, tracer=tracer)
        ending = run.to_the_end()
        display.event("end", reason=ending, samples=trainer.state.samples, seconds=trainer.state.seconds)
    if first:
        conclude(display, trainer, ending, info, folder, tracer.written)
    if run.unsaved:
        if first:
            _log.error(
                "tools.pretrain: the run has ended after step %d, and its last checkpoint could not be written "
                "(above). What came after the one before is lost.",
                trainer.state.step,
            )
        return UNSAVED
    return PREEMPTED if ending == "signal" else 0


def resume_or_start(plan: RunPlan, cube: Cube, trainer: PretrainTrainer) -> Path | None:
    """Loads what the run goes on or begins with, and returns the checkpoint that it goes on from, if any; the same on
    every rank."""

    def resume(found: Path) -> Path:
        trainer.resume(found)
        return found

    def damaged(problem: str) -> None:
        if cube.rank == 0:
            tell_damage(problem)

    candidates = run_on_rank0(cube, plan.resume_candidates)
    if candidates and candidates[0] != plan.resume and cube.rank == 0:  # nobody has named this one
        for strange in without_folder(candidates[0].parent):
            damaged(f"{strange} has the name of a checkpoint and is no folder.")
    found = first_intact(candidates, resume, damaged)
    if found is not None and plan.resume == AUTO and cube.rank == 0:
        for problem in unread(candidates[candidates.index(found) + 1 :]):
            _log.warning("tools.pretrain: %s Whether it is newer than %s nobody can tell.", problem, found)
    if found is None and (source := plan.start_from) is not None:
        told = trainer.start_from(run_on_rank0(cube, lambda: latest_checkpoint(source)), plan.start_generator_from)
        if cube.rank == 0:
            _log.info("%s", told)
    return found


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


def settings_of(trainer: PretrainTrainer, corpus: TrainingCorpus) -> dict[str, Any]:
    """What MLPerf asks a log to say of a run."""
    recipe, feed, shape = trainer.recipe, trainer.feed, trainer.cube.shape
    data, held_out = feed.data, corpus.info.has_held_out
    k = fit_packs_per_rank(ramp(recipe.batch).unit(feed.global_batch), shape, recipe.batch.packs_per_rank)
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


def describe(cube: Cube, trainer: PretrainTrainer, info: CorpusFacts, around: dict[str, Any], folder: Path) -> None:
    """What is about to happen, in a few lines of the log; all settings and facts at the level DEBUG, as they are in
    run.json."""
    config, recipe, generator = trainer.model.config, trainer.recipe, trainer.recipe.generator
    ranks, steps, packs = cube.shape.ranks, recipe.run.steps, trainer.feed.global_batch
    stages, rises = recipe.batch.ramp_stages, recipe.batch.ramp_steps
    least = packs // stages
    device = ", ".join(f"{count} x {name}" for name, count in around["devices"].items())
    rows = [
        (
            "model",
            f"{config.layers} layers, hidden {config.hidden}, {config.heads} heads, {trainer.parameters:,} weights"
            + (
                ""
                if generator is None
                else f"; generator: {generator.layers} layers, hidden {generator.hidden}, {generator.heads} heads"
            ),
        ),
        ("cube", f"{cube.shape} = {ranks} process{'es' if ranks > 1 else ''} on {device}{placement(cube)}"),
        ("machine", f"{around['cores']} cores of {around['cpu']}, torch {around['torch']}"),
        ("corpus", info.in_words()),
        *([("not text", info.omissions)] if info.omissions else []),
        ("step", f"{packs:,} packs of {recipe.data.capacity:,} tokens; {recipe.data.objective}"),
        *([("batch", f"from {least:,} packs, in {stages} sizes by step {rises:,}")] if stages > 1 else []),
        ("training", f"{steps:,} steps of {recipe.optimizer.kind}, learning rate up to {recipe.optimizer.lr:g}"),
        *([("goes on", f"after step {trainer.state.step}")] if trainer.state.step else []),
        *(("idle setting", told) for told in idle_settings(recipe)),
        ("run", str(folder)),
        ("settings", f"{folder / 'run.json'}, all of them; --verbose shows them here"),
    ]
    for line in table(rows):
        _log.info("%s", line)
    for section, values in {**recipe.to_dict(), "environment": around}.items():
        _log.debug("  [%s] %s", section, ", ".join(f"{name} = {value}" for name, value in values.items()))


def placement(cube: Cube) -> str:
    """How the axes lie on nodes, in words, where there are several."""
    per_node, shape = cube.ranks_per_node, cube.shape
    order = "" if shape.wire == AXES else f", in the order {','.join(shape.wire)}"
    return order + (f", {shape.placement(per_node)}" if per_node is not None and per_node < shape.ranks else "")


def conclude(
    display: ConsoleLogger,
    trainer: PretrainTrainer,
    ending: Ending,
    info: CorpusFacts,
    folder: Path,
    traces: Sequence[Path],
) -> None:
    """What was done, where things are, and what comes next."""
    state, found = trainer.state, checkpoint.latest(folder / "checkpoints")
    missing = "none could be written" if trainer.recipe.run.checkpoint_every else "none was asked for"
    rows = [
        ("time and samples", f"{state.seconds:,.1f} s of training, {state.samples:,} sequences, {state.step} steps"),
        ("checkpoint", str(found) if found else missing),
        ("TensorBoard", shlex.join(["tensorboard", "--logdir", str(folder / "tensorboard")])),
        ("plot of the loss", shlex.join(["python", "-m", "tools.plot", str(folder)])),
        *(("trace", str(path)) for path in traces),
    ]
    lines = summary(
        display.history,
        display.evaluations,
        info.unigram_entropy,
        memories=display.memories,
        first=first_step(folder / JOURNAL),
        stalled=state.stall,
        more=rows,
    )
    begun = display.first_step
    told = "; no step was left"
    if display.history:
        told = f"; shares, medians and means are those of the steps after {begun}"
    title = _ENDINGS[ending] + (told if begun else "")
    commands = next_commands(folder, found, ending, generator=trainer.recipe.generator is not None)
    print("\n".join(["", f"{title}:", *lines, "next:", *table(commands)]))


def next_commands(
    folder: Path, found: Path | None, ending: Ending, *, generator: bool = False
) -> list[tuple[str, str]]:
    """What to do with a run, and how that is typed; without a checkpoint there is no model to be asked, and one that
    tells replaced tokens, beside a `generator`, fills no masks."""

    def command(*words: str) -> str:
        return shlex.join(["python", "-m", *words])

    curves = ("curves, time, memory", command("tools.report", str(folder)))
    if found is None:
        return [curves]
    ask = ("ask the model", command("tools.predict", "fill-mask", str(folder), "Your text with a [MASK] in it."))
    convert = ("to Hugging Face's format", command("tools.convert", "to-hf", str(folder), f"{folder}-hf"))
    if generator:
        more = command("tools.convert", "to-hf", str(folder), f"{folder}-generator-hf", "--generator")
        ask, convert = convert, ("the generator alone", more)
    if ending == "signal":
        return [curves, ask, ("go on", f"the same command with --resume {folder} instead of --output")]
    return [curves, ask, convert]


if __name__ == "__main__":
    sys.exit(main())
