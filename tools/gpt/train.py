"""`python -m tools.gpt train`: a small GPT on the corpus that is always there, or on a text of one's own."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from models.folder_kinds import check_no_model, instead, is_gpt_run
from models.gpt import PRESETS, Gpt, GptConfig, count_targets, lay, pack_texts
from models.gpt.causal_batch import Text
from tensor3d import Cube, CubeShape, checkpoint
from tensor3d.checkpoint import Checkpoints
from tensor3d.data import IndexedDataset, SpecialTokens
from tensor3d.data.packed_batch import check_rows, fit_packs_per_rank
from tensor3d.distributed.object_collectives import check_same_on_all_ranks, run_on_all_ranks, run_on_rank0
from tensor3d.files import check_folder, read_file, remove, what_is_wrong
from tensor3d.optim import AdamW, LRSchedule, decay_groups
from tensor3d.packing import StreamPacker
from tools.common.bounds import LANGUAGE, AtLeast, Positive, check_bounds
from tools.common.cli import cube_of, run_folder
from tools.common.files import check_unlocked, parsed_json, write_file
from tools.common.idle_options import IdleRule
from tools.common.log import lasting_streams
from tools.common.machine import write_json
from tools.corpus.quick.corpus_info import Corpus, load_corpus
from tools.corpus.quick.prepare import prepare
from tools.training.loop import LoopSchedule, TrainLoop
from tools.training.metrics import RunLog
from tools.training.metrics.jsonl import JOURNAL
from tools.training.step import PendingStep, StepScalars
from tools.training.trainer import Trainer

# --- From a corpus to the packs of training steps, the same on every rank ---------------------------------------------

_WINDOW = 512  # texts that wait for a pack: few, so that short ones do not come late


def texts_of(documents: IndexedDataset, special: SpecialTokens, length: int) -> list[Text]:
    """Documents as texts of at most `length` tokens: [CLS], the document, [SEP], cut where it is too long.

    A rest of a single token, at which there is nothing to be predicted, is left out.
    """
    texts: list[Text] = []
    bounds = documents.starts[documents.documents]
    for first, last in pairwise(bounds.tolist()):
        ids = [special.cls, *documents.ids[first:last].tolist(), special.sep]
        parts = (ids[start : start + length] for start in range(0, len(ids), length))
        texts += [part for part in parts if len(part) > 1]
    return texts


def packs_of(texts: Sequence[Text], capacity: int, seed: int) -> Iterator[list[Text]]:
    """Packs without end: every epoch has all texts, in an order of its own."""
    packer, waiting = StreamPacker(capacity, window=_WINDOW), dict[int, Text]()
    numbers = count()
    for epoch in count():
        for text in np.random.default_rng((seed, epoch)).permutation(len(texts)).tolist():
            waiting[next(numbers)] = texts[text]
            pack = packer.add(len(texts[text]))
            if pack is not None:
                yield [waiting.pop(number) for number in pack]


# --- The folder of a run: what `train` leaves there and `generate` reads ----------------------------------------------
#
# run.json            the model's sizes, and how it was trained
# tokenizer.model     the corpus' sentencepiece model
# metrics.jsonl       the loss of every step, and the held-out loss
# checkpoints/        the weights, as `tensor3d.checkpoint` writes them, for any cube

_RUN, _CONFIG = "run.json", "model"
TOKENIZER, CHECKPOINTS = "tokenizer.model", "checkpoints"


def check_new(folder: Path, *, taken: bool) -> None:
    """Raises ValueError where the folder holds a run, or cannot hold one. One that was broken off holds nothing that
    anybody could use: the next one begins anew there.

    Args:
        taken: whether it is this process's. Nobody is told to remove what may be another one's, which is named.
    """
    check_folder(folder)
    if os.path.lexists(folder / _RUN) and (taken or check_unlocked(folder)) and not _is_broken_off(folder):
        raise ValueError(f"{folder} holds a run already. Choose another --output, or remove it.")
    check_no_model(folder)


def _is_broken_off(folder: Path) -> bool:
    """Whether it is one of ours that did not come to its end, where it saves."""
    try:
        read_config(folder)
    except ValueError:
        return False
    return checkpoint.latest(folder / CHECKPOINTS) is None


def write_begun(folder: Path, config: GptConfig, tokenizer: Path, facts: Mapping[str, Any]) -> None:
    """Writes what is known before the first step; also again, where somebody has removed it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / TOKENIZER, read_file(tokenizer))
    write_json(folder / _RUN, {_CONFIG: dataclasses.asdict(config), **facts})


def read_config(folder: Path) -> GptConfig:
    """The model of a run.

    Raises:
        ValueError: no run, or one whose run.json is damaged.
    """
    try:
        values = parsed_json(read_file(folder / _RUN))
        return GptConfig(**values[_CONFIG])
    except (FileNotFoundError, NotADirectoryError):
        kind = instead(folder)
        remedy = f"{kind} Name the --output of a training" if kind else " Train one first"
        raise ValueError(
            f"{folder.absolute()} is no run of tools.gpt: it has no {_RUN}.{remedy}: python -m tools.gpt train "
            f"--output {'DIR' if kind else folder}"
        ) from None
    except (ValueError, TypeError, KeyError) as problem:
        if not is_gpt_run(folder) and (kind := instead(folder)):
            raise ValueError(f"{folder.absolute()} is no run of tools.gpt.{kind}") from None
        raise ValueError(
            f"{folder / _RUN} is not what tools.gpt train writes: {what_is_wrong(problem)}. Train the model again."
        ) from None


def newest_weights(folder: Path) -> Path:
    """Raises ValueError where the run has no checkpoint."""
    found = checkpoint.latest(folder / CHECKPOINTS)
    if found is None:
        raise ValueError(f"{folder} has no checkpoint: its training did not come to its end. Train it again.")
    return found


# --- What is learnt ---------------------------------------------------------------------------------------------------

_CLIP = 1.0  # largest norm of the gradient
_WEIGHT_DECAY = 0.1
_BETAS = (0.9, 0.95)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackStep:
    """The packs of a step."""

    index: int
    """From 0."""
    packs: Sequence[Sequence[Text]]

    @property
    def sequences(self) -> int:
        return sum(map(len, self.packs))


class GptObjective:
    """The next token, all packs of a step at once."""

    sums = 1
    are_parts = False

    def __init__(self, model: Gpt, capacity: int) -> None:
        self._model, self._capacity = model, capacity

    def parts(self, batch: PackStep) -> Sequence[Sequence[Sequence[Text]]]:
        return [batch.packs]

    def loss(self, batch: PackStep, part: Sequence[Sequence[Text]]) -> tuple[Tensor, Tensor]:
        loss = self.of(part, count_targets(part))
        return loss, loss.detach().reshape(1)

    def of(self, packs: Sequence[Sequence[Text]], targets: int) -> Tensor:
        """The share of some packs in the mean over so many targets, in nats."""
        loss: Tensor = self._model(**vars(lay(packs, self._capacity, self._model.cube)), targets=targets)
        return loss


@dataclass(frozen=True, kw_only=True)
class GptMetrics:
    """A step, or the evaluation after it."""

    step: int
    """From 1."""
    loss: float
    """Nats a token."""

    @property
    def cost(self) -> float:
        return self.loss

    def record(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(kw_only=True)
class GptLog(RunLog[GptMetrics, GptMetrics]):
    """What a run tells, and the losses of its steps."""

    losses: list[float] = field(default_factory=list)

    def in_words(self, metrics: GptMetrics) -> str:
        self.losses.append(metrics.loss)
        return f"loss {metrics.loss:.3f}"


class GptTrainer(Trainer[PackStep, GptMetrics]):
    """A GPT on its way. Every rank makes one at the same time."""

    def __init__(self, command: TrainCommand, cube: Cube, corpus: Corpus) -> None:
        self._command, self._corpus = command, corpus
        cube.manual_seed(command.seed)
        self.model = Gpt(command.config, cube)
        self._objective = GptObjective(self.model, command.length)
        super().__init__(
            self.model,
            AdamW(decay_groups(self.model, _WEIGHT_DECAY), cube, lr=command.lr, betas=_BETAS),
            None,
            cube,
            self._objective,
            rate=command.learning_rate,
            clip=_CLIP,
            skips=False,
        )
        self.loss = self.held_out = math.nan
        """Of the last step, and of the documents that were not trained on; nats a token."""

    def batches(self) -> AbstractContextManager[Iterable[PackStep]]:
        command, corpus = self._command, self._corpus
        texts = [text for shard in corpus.train if shard for text in texts_of(shard, corpus.special, command.length)]
        packs = packs_of(texts, command.length, command.seed)
        steps = range(command.steps)
        return nullcontext(PackStep(index=step, packs=list(islice(packs, command.batch))) for step in steps)

    def metrics(self, taken: PendingStep[PackStep], numbers: StepScalars) -> GptMetrics:
        step, self.loss = taken.step.index + 1, numbers.loss
        if not math.isfinite(self.loss):
            raise FloatingPointError(
                f"the loss of step {step} is {self.loss}. Lower --lr, which is {self._command.lr}."
            )
        return GptMetrics(step=step, loss=self.loss)

    @torch.no_grad()
    def evaluate(self) -> GptMetrics:
        command, corpus = self._command, self._corpus
        packs = pack_texts(texts_of(corpus.held_out, corpus.special, command.length), command.length, command.batch)
        targets = count_targets(packs)
        self.model.eval()
        parts = (packs[start : start + command.batch] for start in range(0, len(packs), command.batch))
        self.held_out = sum(float(self._objective.of(part, targets)) for part in parts)
        self.model.train()
        if not math.isfinite(self.held_out):  # the last update is followed by no loss of a step
            raise FloatingPointError(
                f"the held-out loss after step {self.state.step} is {self.held_out}. Lower --lr, which is {command.lr}."
            )
        return GptMetrics(step=self.state.step, loss=self.held_out)

    def save(self, checkpoints: Checkpoints, *, wait: bool = False) -> None:
        checkpoints.save(self.state.step, self.model, self.optimizer, {"loss": self.loss}, wait=wait)


# --- The command ------------------------------------------------------------------------------------------------------

_SHOWN = 20  # steps at the end over which the loss that is told is averaged


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a GPT on packed text, split three ways. A lesson: it saves at its end alone, and does not resume."""

    output: Path = Path("runs/gpt")
    """Folder of the run."""
    cube: str = "1x1x1"
    """Sizes of the axes x, y and z, as XxYxZ."""
    data_parallel: int = 1
    """Copies of the cube."""
    steps: Annotated[int, AtLeast(1)] = 200
    """Updates of the weights."""
    batch: Annotated[int, AtLeast(1)] = 32
    """Packs of a step, on all ranks together; divides by data * x * z."""
    length: Annotated[int, AtLeast(2, ": a token and the next one")] = 128
    """Tokens of the longest text, and of a pack."""
    preset: str = "tiny"
    """Sizes of the model: tiny or small."""
    window: int | None = None
    """Tokens that a token sees, itself and those before it. Default: all."""
    kv_heads: int | None = None
    """Heads of keys and values, each of which serves as many heads of queries. Default: as many as the preset has."""
    tied: bool = True
    """Whether the projection to the vocabulary uses the embedding's weight."""
    lr: Annotated[float, Positive()] = 3e-3
    """Peak of the learning rate, reached after a tenth of the steps; then a cosine down to a tenth of it."""
    seed: Annotated[int, AtLeast(0)] = 0
    """Of weights and of the order of the texts."""
    source: str = "embedded"
    """"embedded": the documentation that comes with Python. Else a UTF-8 text file, or a folder of *.txt files."""
    language: Annotated[str, LANGUAGE] = "en"
    """ISO 639-1 code of the text: its rules say where a sentence ends."""
    vocab_size: int = 2048
    """Pieces of the tokenizer."""
    corpus: Path | None = None
    """Folder of the prepared corpus, made if missing. Default: runs/corpora/SOURCE-VOCABULARY, with a language that is
    not en."""

    @property
    def shape(self) -> CubeShape:
        return CubeShape.parse(self.cube, self.data_parallel)

    @property
    def config(self) -> GptConfig:
        """Raises ValueError for an unknown preset, or sizes that cannot be."""
        if self.preset not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}. Got {self.preset!r}.")
        return dataclasses.replace(
            PRESETS[self.preset],
            vocab=self.vocab_size,
            positions=self.length,
            window=self.window,
            kv_heads=self.kv_heads,
            tied=self.tied,
        )

    @property
    def learning_rate(self) -> LRSchedule:
        warmup = max(1, self.steps // 10)
        return LRSchedule(kind="cosine", lr=self.lr, steps=self.steps, warmup_steps=warmup, floor=0.1)

    def check(self) -> None:
        """Raises ValueError for what can be seen before any process is connected."""
        check_bounds(self)
        shape = self.shape
        self.config.check(shape)
        self.learning_rate.at(0)
        k = fit_packs_per_rank(self.batch, shape, None)
        check_rows(shape, k, self.length)
        check_new(self.output, taken=False)

    def idle_rules(self) -> Sequence[IdleRule]:
        reaches = self.window is None or self.window < self.length
        return (IdleRule(("window",), reaches, f"texts that are longer, and --length is {self.length}"),)

    def run(self) -> int:
        """Trains, on every rank. The exit status."""
        with lasting_streams(), cube_of(self.shape) as cube, run_folder(self.output, cube):
            corpus = _corpus(self, cube)
            _train(self, cube, corpus)
        return 0


def _corpus(command: TrainCommand, cube: Cube) -> Corpus:
    name = f"{Path(command.source).stem}-{command.vocab_size}"
    name += f"-{command.language}" if command.language != "en" else ""
    folder = command.corpus or Path("runs/corpora") / name
    run_on_rank0(
        cube,
        lambda: prepare(
            command.source,
            folder,
            vocab_size=command.vocab_size,
            language=command.language,
            progress=sys.stderr.isatty(),
        ),
        any_time=True,
    )
    corpus = run_on_all_ranks(cube, lambda: load_corpus(folder))
    check_same_on_all_ranks(cube, f"the corpus in {folder}", corpus.info.fingerprint)
    return corpus


def _write_begun(command: TrainCommand, corpus: Corpus) -> None:
    told = {name: value if isinstance(value, int | float) else str(value) for name, value in vars(command).items()}
    facts = {"command": told, "unigram_entropy": corpus.info.unigram_entropy, "corpus": corpus.info.fingerprint}
    write_begun(command.output, command.config, corpus.tokenizer, facts)


def _train(command: TrainCommand, cube: Cube, corpus: Corpus) -> None:
    def restore() -> None:
        _write_begun(command, corpus)

    def take() -> None:
        check_new(command.output, taken=True)
        if os.path.lexists(command.output / _RUN):  # broken off, maybe in its save
            remove(command.output / CHECKPOINTS)

    run_on_rank0(cube, take)
    log = GptLog(directory=command.output, steps=command.steps, shown=cube.rank == 0, restore=restore)
    # It saves at its end alone.
    schedule = LoopSchedule(
        steps=command.steps, evaluate_every=command.steps, checkpoint_every=command.steps, must_save=True
    )
    folder = command.output / CHECKPOINTS
    with ExitStack() as stack:
        try:
            run_on_rank0(cube, restore)
            run_on_all_ranks(cube, lambda: stack.enter_context(log))
        except (OSError, ValueError):
            # Of a run that could not even begin, as on a full disk, nothing is left that would keep the next one out.
            for name in (_RUN, TOKENIZER, JOURNAL) if cube.rank == 0 else ():
                remove(command.output / name)
            raise
        checkpoints = stack.enter_context(Checkpoints(folder, cube, keep_last=None, asynchronous=False))
        trainer = GptTrainer(command, cube, corpus)
        TrainLoop(trainer, log, checkpoints, schedule).to_the_end()
    if cube.rank == 0:
        print(_summary(log.losses, trainer.held_out, corpus, newest_weights(command.output), command))


def _summary(losses: list[float], held_out: float, corpus: Corpus, saved: Path, command: TrainCommand) -> str:
    last, entropy = losses[-_SHOWN:], corpus.info.unigram_entropy
    return "\n".join(
        [
            f"loss      {losses[0]:.3f} at the first step, {sum(last) / len(last):.3f} over the last {len(last)}, nats",
            f"held out  {held_out:.3f}; who knows how frequent each piece is, and no more, has {entropy:.3f}",
            f"weights   {saved}",
            f'next      python -m tools.gpt generate {shlex.quote(str(command.output))} --prompt "Return the"',
        ]
    )
