"""What one call of tools.pretrain comes to, and what can be checked of it before any process is connected."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal, TypeVar

import torch

from models.bert.cost_model.memory import Device
from models.folder_kinds import check_no_model, instead, is_gpt_run
from tensor3d import CubeShape, checkpoint
from tensor3d.checkpoint.directory import PROGRESS, without_folder
from tensor3d.data import ExchangeOptions
from tensor3d.data.packed_batch import check_rows, fit_packs_per_rank
from tensor3d.data.shard_exchange import check_within, shards_of
from tensor3d.distributed.cube_shape import AxisName
from tensor3d.files import check_folder
from tools.common.files import FolderInUseError, check_unlocked, lock_folder
from tools.training.config import TrainConfig
from tools.training.data import ramp
from tools.training.factory import check_attention, check_compiler, check_graph, planned_device
from tools.training.profiling import ProfileSchedule
from tools.training.resume import generator_for, has_optimizer_state, weights_for

AUTO: Literal["auto"] = "auto"
"""`--resume auto`: go on from the newest checkpoint of --output, if there is one, else begin there."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run, resolved: the same on every rank, and made once, of the command line (`arguments.resolve`)."""

    recipe_file: Path
    recipe: TrainConfig
    shape: CubeShape
    rank_order: tuple[AxisName, ...] | None
    """Order of the axes on consecutive ranks. None: the best one for the nodes that there are."""
    output: Path | None
    """Folder that was asked for."""
    corpus: Path
    """Folder of the prepared corpus, or of samples."""
    resume: Path | Literal["auto"] | None
    """What the run goes on from, if it does."""
    start_from: Path | None
    """A checkpoint, a folder with one or a model's, with whose weights the run begins."""
    start_generator_from: Path | None
    """A model's folder, with whose weights the generator beside that one begins."""
    purpose: Literal["train", "prepare", "dry run"]
    exchange: ExchangeOptions | None
    """How data ranks that read their own shards get the other sequences. None: each reads all."""
    profile: ProfileSchedule | None
    """Steps to trace."""
    profile_ranks: tuple[int, ...]

    @property
    def cube(self) -> str:
        return f"{self.shape.x}x{self.shape.y}x{self.shape.z}"

    # --- checks ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises ValueError where recipe, cube and options do not fit together."""
        recipe, shape = self.recipe, self.shape
        config, replaced = recipe.model.config(recipe.data), recipe.replaced_tokens
        if config.vocab < (pieces := recipe.data.vocab_size):  # known since samples have told it
            raise ValueError(
                f"model.vocab_rows must be at least data.vocab_size={pieces}, the pieces of the tokenizer. Got "
                f"{config.vocab}. Leave it out, or raise it."
            )
        config.check(shape)
        if replaced is not None:
            replaced.check(config, shape)
        self._check_speed()
        if self.profile is not None and (last := self.profile.windows[-1])[0] > recipe.run.steps:
            raise ValueError(
                f"--profile asks for steps {last[0]} to {last[1]}, and the run has run.steps = {recipe.run.steps}. "
                "Choose others."
            )
        if self.exchange is not None:
            shards_of(recipe.data.shards, shape.data, 0)
            check_within(self.exchange, shape.data, recipe.data.groups)
        if recipe.batch.packing_rule == "sequences":
            return  # the packs of a step are known when the corpus is packed
        packs = ramp(recipe.batch).unit(recipe.batch.global_batch)
        k = fit_packs_per_rank(packs, shape, recipe.batch.packs_per_rank)
        check_rows(shape, k, recipe.data.capacity)

    def _check_speed(self) -> None:
        """For the device that trains: this machine's, or the one that a dry run or a preparation is for."""
        recipe, there, where = self.recipe, torch.cuda.is_available(), ""
        device: Device = "cuda" if there else "cpu"
        if self.purpose == "dry run" and not there:
            device = planned_device(recipe)
            where = " (The dry run is for GPUs, since run.peak_tflops is stated.)"
            if device == "cpu":
                where = " (The dry run is for a CPU: this machine has no GPU. State run.peak_tflops to plan for GPUs.)"
        elif self.purpose == "prepare" and not there:
            # Often done where the GPUs of the run are not; and no CPU serves what a GPU does not.
            device, where = "cuda", " (No GPU can, nor this CPU.)"
        check_attention(recipe, device, where)
        check_compiler(recipe, device)
        check_graph(recipe, self.shape.ranks, device, where)

    def check_folders(self) -> None:
        """Raises ValueError where `--resume` or `--start-from` is no checkpoint or this machine cannot write the run's
        folder, before text is read."""
        output = self.output
        if self.resume == AUTO and output is None:
            raise ValueError("--resume auto needs the run's folder. Name it by --output.")
        if self.start_from is not None:
            if self.resume not in (None, AUTO):
                raise ValueError("--start-from begins a run and --resume goes on with one. Drop one of them.")
            source = latest_checkpoint(self.start_from)
            if not self.resume_candidates() and not has_optimizer_state(source):
                weights_for(source, self.recipe, None)
            if self.start_generator_from is not None and not self.resume_candidates():
                generator_for(self.start_generator_from, source, self.recipe)
        if self.resume not in (None, AUTO):
            if output is not None:
                raise ValueError(
                    "--output and --resume exclude each other: a resumed run goes on in its folder. Drop one."
                )
            (folder,) = self.resume_candidates()
            if not (folder / PROGRESS).exists():
                raise ValueError(
                    f"{folder} is not a checkpoint: it has no {PROGRESS}.{instead(folder)} Name a run of "
                    "tools.pretrain, or one of its checkpoints."
                )
            _check_own(folder)
            checkpoint.check_writable(folder.parent)
            return
        folder = output or Path("runs")
        check_folder(folder)
        if output is not None:
            self._check_new(output, taken=False)
        checkpoint.check_writable(folder / "checkpoints")

    # --- folders as they are now ----------------------------------------------------------------------------------

    def resume_candidates(self) -> list[Path]:
        """The checkpoints that the run may go on from, the first choice first; none where it begins.

        Raises:
            ValueError: it would begin where there is something of a checkpoint's name.
        """
        if self.resume == AUTO:
            assert self.output is not None, "checked before"
            found = checkpoint.complete(self.output / "checkpoints")[::-1]
            if not found and (strange := without_folder(self.output / "checkpoints")):
                raise ValueError(
                    f"{strange[-1]} has the name of a checkpoint and is no folder: {_kind(strange[-1])}. The run would "
                    "begin anew. Bring the checkpoint back, or remove that."
                )
            return found
        return [] if self.resume is None else [latest_checkpoint(Path(self.resume))]

    def run_folders(self) -> Iterator[Path]:
        """The folder of this run, which need not exist; where none was named, those that it may take, one after
        another. A new run never writes into another run's folder."""
        if self.resume not in (None, AUTO):
            yield self.resume_candidates()[0].parent.parent
        elif self.output is not None:
            yield self.output
        else:
            name = self.recipe_file.stem
            named = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in count(1))
            yield from (folder for folder in named if not _holds_run(folder))

    def take_folder(self, held: ExitStack) -> Path:
        """The run's folder, which exists and is this process's until the stack is closed. One process of a run calls
        it.

        Raises:
            FolderInUseError: another run has it; ValueError: it holds one, or there can be no such folder.
        """
        for folder in self.run_folders():
            try:
                with ExitStack() as taken:
                    taken.enter_context(lock_folder(folder))
                    self._check_new(folder, taken=True)  # again: a run may have come and gone since
                    held.push(taken.pop_all())
                return folder
            except FolderInUseError:
                if self.output is not None or self.resume is not None:
                    raise
        raise AssertionError("the names end")

    def _check_new(self, folder: Path, *, taken: bool) -> None:
        """Args: taken: whether the folder is this process's. Where it may be another one's, that is to be said."""
        if self.resume is None and _holds_run(folder) and (taken or check_unlocked(folder)):
            go_on = "." if is_gpt_run(folder) else f", or go on there: --resume auto --output {folder}."
            raise FolderInUseError(f"{folder} holds a run already. Choose another --output{go_on}")
        candidates = self.resume_candidates()
        if not candidates:
            check_no_model(folder)
        elif self.resume == AUTO:
            with suppress(checkpoint.DamagedError):  # one before it may do
                _check_own(candidates[0])


def _check_own(found: Path) -> None:
    """Raises ValueError for a checkpoint of something else than pre-training."""
    if "recipe" not in checkpoint.read_progress(found):
        raise ValueError(
            f"{found} is no checkpoint of tools.pretrain, which alone can be resumed here.{instead(found)}"
        )


def _kind(path: Path) -> str:
    return f"it is a link to {os.readlink(path)}, which is not there" if path.is_symlink() else "it is a file"


def _holds_run(folder: Path) -> bool:
    return os.path.lexists(folder / "run.json")


def latest_checkpoint(path: Path) -> Path:
    """The checkpoint meant by a path: itself, or the newest one in it."""
    return checkpoint.latest(path) or checkpoint.latest(path / "checkpoints") or path


def first_intact(candidates: list[Path], use: Callable[[Path], T], damaged: Callable[[str], None]) -> T | None:
    """What `use` makes of the first candidate that is not damaged; None where there is no candidate.

    Args:
        damaged: told of a candidate that is left out.

    Raises:
        checkpoint.DamagedError: all are.
    """
    for number, found in enumerate(candidates, start=1):
        try:
            return use(found)
        except checkpoint.DamagedError as damage:
            if number == len(candidates):
                raise
            damaged(str(damage))
    return None
