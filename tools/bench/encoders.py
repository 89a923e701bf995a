"""`bench encoders`: what BERT's, RoBERTa's and ModernBERT's small recipes learn of the same tokens."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

from models.bert.cost_model.param_shapes import parameters
from tensor3d import Cube, CubeShape
from tools.bench.harness.benchmark import ONE_PROCESS, Report, listed, seeds_of
from tools.bench.harness.figures import Column, as_json, table
from tools.bench.harness.step_trial import RecipeBenchmark, Training, check_cube, prepare_here
from tools.bench.shard_exchange import corpus_feed
from tools.common.bounds import Positive, Share
from tools.common.log import progress
from tools.corpus.training_corpus import open_corpus
from tools.training.config import TrainConfig, read_config
from tools.training.data import held_out_data
from tools.training.pretraining import held_out_means

ROOT = Path(__file__).parents[2]
BERT, ROBERTA, MODERNBERT = "bert", "roberta", "modernbert"
_RECIPES = {
    ROBERTA: ROOT / "launch/recipes/roberta-tiny.toml",
    MODERNBERT: ROOT / "launch/recipes/modernbert-tiny-phase1.toml",
}
ENCODERS = (BERT, *_RECIPES)
_DECAY = 0.2  # of a run that is all phases in one: share of the steps in which ModernBERT's learning rate goes down


@dataclass(frozen=True, kw_only=True)
class EncodersCommand(RecipeBenchmark):
    """Train the small recipes of BERT (masked tokens alone), RoBERTa and ModernBERT on the same texts, tokenizer and
    tokens, at the recipe's sizes and from several seeds; compare the masked-LM loss on held-out texts, with one
    masked share for all."""

    encoders: str = ",".join(ENCODERS)
    """Some of bert (the recipe's own model and optimiser), roberta (of roberta-tiny.toml) and modernbert (of
    modernbert-tiny-phase1.toml, its learning rate going down in the last fifth of the steps)."""
    seeds: str = "0,1,2"
    """At least two, with commas: of weights, packs and masks."""
    evaluated_share: Annotated[float, Positive(), Share()] = 0.15
    """Share of the held-out tokens that are guessed, whatever the training guesses."""
    corpus: Path | None = None
    """Folder of the prepared corpus, made if missing. Default: as pre-training chooses it."""

    launcher: ClassVar[str | None] = ONE_PROCESS

    def plan(self) -> tuple[list[str], list[int]]:
        """Encoders and seeds."""
        seeds = seeds_of(self.seeds)
        if not self.settings.data.held_out:
            raise ValueError("data.held_out is 0, and the loss is that of held-out texts. Give it a share.")
        encoders = listed("--encoders", self.encoders, ENCODERS)
        for encoder in encoders:
            check_cube(self.as_training(as_recipe(self.settings, encoder)), CubeShape())
        return encoders, seeds

    def measure(self, plan: tuple[list[str], list[int]]) -> Report:
        encoders, seeds = plan
        recipes = {encoder: as_recipe(self.settings, encoder) for encoder in encoders}
        training = self.as_training(recipes[encoders[0]], corpus=self.corpus)
        prepare_here(training)
        found: dict[str, list[Run]] = {encoder: [] for encoder in encoders}
        with progress(total=len(encoders) * len(seeds) * self.settings.run.steps, unit="step") as bar:
            for seed, encoder in itertools.product(seeds, encoders):
                bar.set_postfix_str(f"{encoder}, seed {seed}")
                recipe = _with(recipes[encoder], "run", seed=seed)
                found[encoder].append(train_one(recipe, training.corpus, self.evaluated_share, bar.update))
        results = [figures(encoder, recipes[encoder], runs) for encoder, runs in found.items()]
        lines = [
            f"{self.recipe}: {self.settings.run.steps} steps from seeds {self.seeds}; held-out masked-LM loss in nats, "
            f"{self.evaluated_share:g} of the tokens masked",
            *table(results),
        ]
        content = {
            "seeds": seeds,
            "evaluated_share": self.evaluated_share,
            "trained": {encoder: recipe.to_dict() for encoder, recipe in recipes.items()},
            "results": as_json(results),
        }
        return Report(lines=lines, content=content)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training."""

    loss: float
    """Masked-LM loss on the held-out texts, nats."""
    tokens: float
    """That it was trained on."""


@dataclass(frozen=True, kw_only=True)
class EncoderLoss:
    """The runs of one encoder."""

    encoder: Annotated[str, Column("encoder")]
    parameters: Annotated[int, Column("weights", ",")]
    masked_share: Annotated[float, Column("masked in training", "g")]
    tokens: Annotated[float, Column("tokens", ",.0f")]
    """Of one training, on average."""
    mean: Annotated[float, Column("held-out loss", ".3f")]
    """Over the seeds."""
    deviation: Annotated[float, Column("deviation", ".3f")]
    """Standard deviation over the seeds, of a sample."""
    losses: tuple[float, ...]
    """By seed."""


def as_recipe(common: TrainConfig, encoder: str) -> TrainConfig:
    """The recipe of an encoder on the texts, batches and steps of `common`, of its layers, columns and heads."""
    common = _with(common, "data", objective="masked-lm", masked_share_end=None, masked_per_pack=None)
    if encoder == BERT:
        return common
    own = read_config(_RECIPES[encoder])
    sizes = {name: getattr(common.model, name) for name in ("preset", "layers", "hidden", "heads")}
    sizes |= {name: getattr(common.model, name) for name in ("dropout", "attention_dropout")}
    optimizer = own.optimizer
    if optimizer.schedule == "constant":
        optimizer = dataclasses.replace(optimizer, schedule="wsd", decay=_DECAY, decay_shape="sqrt")
    recipe = _with(common, "data", masked_share=own.data.masked_share)
    model = dataclasses.replace(own.model, **sizes, std=common.model.std, positions=None)
    return dataclasses.replace(recipe, model=model, optimizer=optimizer)


def train_one(recipe: TrainConfig, corpus: Path, share: float, moved: Callable[[int], object]) -> Run:
    """One training on this process, and its loss on the held-out texts of which `share` is masked.

    Args:
        moved: is told of each step.
    """
    cube = Cube.single()
    training = Training(cube, recipe, partial(corpus_feed, corpus=corpus, options=None))
    try:
        tokens = 0.0
        for _ in range(recipe.run.steps):
            (step,) = training.turn(1)
            tokens += step.tokens_per_second * step.seconds
            moved(1)
        held_out = held_out_data(_with(recipe, "data", masked_share=share), open_corpus(corpus))
        packs = min(recipe.batch.packs_per_rank or recipe.batch.global_batch, recipe.batch.global_batch)
        means = held_out_means(training.trainer.model, held_out, cube, packs, lambda batch: True)
    finally:
        training.close()
    assert means is not None, "nobody breaks it off"
    return Run(loss=means["masked_lm_loss"], tokens=tokens)


def figures(encoder: str, recipe: TrainConfig, runs: Sequence[Run]) -> EncoderLoss:
    losses = tuple(run.loss for run in runs)
    return EncoderLoss(
        encoder=encoder,
        parameters=sum(each.elements for each in parameters(recipe.model.config(recipe.data))),
        masked_share=recipe.data.masked_share,
        tokens=statistics.fmean(run.tokens for run in runs),
        mean=statistics.fmean(losses),
        deviation=statistics.stdev(losses),
        losses=losses,
    )


def _with(recipe: TrainConfig, section: str, **changes: object) -> TrainConfig:
    """The recipe with other values in one section."""
    return dataclasses.replace(recipe, **{section: dataclasses.replace(getattr(recipe, section), **changes)})
