"""What a run trains on: from a prepared corpus and a recipe to the steps of one rank."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.bert.cost_model.electra import step_work
from tensor3d import Cube, CubeShape
from tensor3d.data import (
    BatchLayout,
    BatchRamp,
    ExchangeOptions,
    LengthBuckets,
    Loader,
    MaskingRules,
    PretrainingData,
    SampleSource,
    Schedule,
    ShardExchange,
    SpecialTokens,
)
from tensor3d.data.packed_batch import fit_packs_per_rank
from tensor3d.distributed.host_all_to_all import HostAllToAll
from tensor3d.distributed.object_collectives import check_same_on_all_ranks, run_on_all_ranks
from tensor3d.packing import PackingPlan, packed_betas, packs_per_step
from tools.corpus.training_corpus import TrainingCorpus
from tools.training.config import BatchConfig, TrainConfig

BINNED, PADDED = "binned", "padded"


class TrainData:
    """The training data of one rank. Every rank makes one at the same time; to be closed, best by a `with`.

    Args:
        source: where sequences come from.
        special: vocabulary and special ids of their tokenizer.
        plan: of the packs of an epoch, if it was made before.
        continuations: bool or uint8 (vocab_size,), for masking whole words; see `PretrainingData`.
        exchange: brings sequences that other data ranks read, if the source needs one.
        every: steps of which the sequences are exchanged together.

    Raises:
        ValueError: on every rank: limits that contradict one another, or ranks that would train on different packs.
    """

    def __init__(
        self,
        recipe: TrainConfig,
        cube: Cube,
        source: SampleSource,
        special: SpecialTokens,
        *,
        plan: PackingPlan | None = None,
        continuations: NDArray[np.generic] | None = None,
        exchange: ShardExchange | None = None,
        every: int = 1,
    ) -> None:
        self._recipe, self._cube = recipe, cube
        self.exchange, self._every = exchange, every
        self.data = pretraining_data(recipe, source, special, plan=plan, continuations=continuations)
        digest = run_on_all_ranks(cube, self._pack_first_epoch)
        check_same_on_all_ranks(cube, "the packing of epoch 0", digest)
        # Of epoch 0, which is not kept for ever.
        self._packing_factor = self.data.packing_factor
        self.global_batch = global_batch(recipe.batch, self._packing_factor)
        run_on_all_ranks(cube, lambda: check_steps(recipe, self.data, self.global_batch, cube.shape))

    @classmethod
    def of_corpus(
        cls, recipe: TrainConfig, cube: Cube, corpus: TrainingCorpus, options: ExchangeOptions | None = None
    ) -> TrainData:
        """The training sequences of a prepared corpus.

        Args:
            options: data ranks read their own shards only, and get the rest from one another. None: each reads all.

        Raises:
            ValueError: on every rank: shards that are missing or do not divide, and what the constructor refuses.
        """
        special, plan = corpus.special, run_on_all_ranks(cube, lambda: corpus.plan(recipe.data.packing))
        make = partial(cls, recipe, cube, special=special, plan=plan, continuations=corpus.continuations)
        if options is None:
            return make(run_on_all_ranks(cube, partial(training_source, corpus, recipe, None)))
        with ExitStack() as stack:
            everyone = stack.enter_context(HostAllToAll.along(cube, "data"))
            near = None
            if options.within is not None and options.within < everyone.size:
                near = stack.enter_context(HostAllToAll.along(cube, "data", within=options.within))
            source = run_on_all_ranks(cube, partial(training_source, corpus, recipe, everyone))
            exchange = ShardExchange(everyone, near, vocab_size=special.vocab_size)
            feed = make(source, exchange=exchange, every=options.every)
            stack.pop_all()  # the feed closes the peers now
        return feed

    @property
    def micro_batch_tokens(self) -> int:
        """Token slots of a micro-batch, over all planes."""
        shape, batch = self._cube.shape, self._recipe.batch
        packs_per_rank = fit_packs_per_rank(ramp(batch).unit(self.global_batch), shape, batch.packs_per_rank)
        layout = BatchLayout(shape=shape, rank=0, packs_per_rank=packs_per_rank, capacity=self.data.capacity)
        return layout.micro_batch * layout.capacity

    def loader(self, start_step: int = 0, end_step: int | None = None) -> Loader:
        """The steps of this rank. To be closed, best by a `with`."""
        batch = self._recipe.batch
        return Loader(
            self.data,
            global_batch=self.global_batch,
            shape=self._cube.shape,
            rank=self._cube.rank,
            packs_per_rank=batch.packs_per_rank,
            start_step=start_step,
            end_step=end_step,
            device=self._cube.device,
            work=step_work(self._recipe.model.config(self._recipe.data), self._recipe.generator)
            if batch.balance
            else None,
            exchange=self.exchange,
            every=self._every,
            with_read_rows=self._recipe.speed.read_rows_only,
            ramp=ramp(batch),
        )

    def _pack_first_epoch(self) -> str:
        """Its digest. Where this rank fails, peers that wait for it hear of it."""
        try:
            return self.data.epochs[0].digest
        except (ValueError, OSError) as error:
            if self.exchange is not None:
                self.exchange.abort(str(error))
            raise

    def betas(self) -> tuple[float, float]:
        """The decay rates of the optimiser, by the rule of the recipe."""
        optimizer = self._recipe.optimizer
        betas = (optimizer.beta1, optimizer.beta2)
        return packed_betas(betas, self._packing_factor) if self._recipe.batch.packing_rule == "betas" else betas

    def __enter__(self) -> TrainData:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self.exchange is not None:
            self.exchange.abort(f"{type(error).__name__}: {error}")
        self.close()

    def close(self) -> None:
        """Ends the connections between peers; a second call does nothing."""
        if self.exchange is not None:
            self.exchange.close()


def training_source(corpus: TrainingCorpus, recipe: TrainConfig, everyone: HostAllToAll | None) -> SampleSource:
    """The training sequences, all of them to be read here, or by exchange."""
    data = recipe.data
    if corpus.info.shards != data.shards:
        raise ValueError(
            f"the corpus has {corpus.info.shards} shards, the recipe says data.shards={data.shards}. Prepare it again, "
            "or change the recipe."
        )
    stored, wanted = corpus.stored_masking, data.masking(recipe.run.steps)
    if stored is not None and stored != replace(wanted, steps=1):
        raise ValueError(
            f"the samples' masks are stored: they were drawn with masked_share = {stored.share:g}, mask_replace = "
            f"{stored.mask_replace:g}, random_replace = {stored.random_replace:g} and masked_spans = {stored.spans}. "
            "Give [data] the same and no masked_share_end, or prepare samples with --masking dynamic."
        )
    return corpus.training(everyone=everyone, **_drawing(recipe))


def held_out_data(recipe: TrainConfig, corpus: TrainingCorpus) -> PretrainingData:
    """The held-out sequences, in packs like those of training, masked as in the last step."""
    source, masking = corpus.evaluation(**_drawing(recipe)), recipe.data.masking(recipe.run.steps).end
    return _packed(recipe, source, corpus.special, masking, continuations=corpus.continuations)


def pretraining_data(
    recipe: TrainConfig,
    source: SampleSource,
    special: SpecialTokens,
    *,
    plan: PackingPlan | None = None,
    continuations: NDArray[np.generic] | None = None,
) -> PretrainingData:
    """The packs that a recipe makes of the training sequences."""
    data = recipe.data
    bins = None
    if data.packing == BINNED:
        # One sequence a pack: the packing factor is 1.
        bins = LengthBuckets(width=data.bin_width, batch=global_batch(recipe.batch, 1.0))
    plans = None if data.plans is None else Path(data.plans)
    return _packed(
        recipe,
        source,
        special,
        data.masking(recipe.run.steps),
        groups=data.groups,
        bins=bins,
        plans=plans,
        plan=plan,
        continuations=continuations,
    )


def global_batch(batch: BatchConfig, packing_factor: float) -> int:
    """Packs of a step, by the rule of the recipe."""
    if batch.packing_rule == "sequences":
        return packs_per_step(batch.global_batch, packing_factor, batch.multiple_of)
    return batch.global_batch


def ramp(batch: BatchConfig) -> BatchRamp:
    """How the packs of a step rise to their number."""
    return BatchRamp(stages=batch.ramp_stages, steps=batch.ramp_steps)


def check_steps(recipe: TrainConfig, data: PretrainingData, packs: int, shape: CubeShape) -> None:
    """Raises ValueError where steps of so many packs cannot be laid on a cube, as the loader would."""
    rise = ramp(recipe.batch)
    per_rank = fit_packs_per_rank(rise.unit(packs), shape, recipe.batch.packs_per_rank)
    layout = BatchLayout(shape=shape, rank=0, packs_per_rank=per_rank, capacity=data.capacity)
    Schedule(data, layout, global_batch=packs, ramp=rise)


def _drawing(recipe: TrainConfig) -> dict[str, Any]:
    """How sequences are drawn, where they are not drawn yet."""
    data = recipe.data
    return {
        "max_length": data.max_length,
        "seed": recipe.run.seed,
        "short_probability": data.short_probability,
        "single": data.single,
    }


def _packed(
    recipe: TrainConfig, source: SampleSource, special: SpecialTokens, masking: MaskingRules, **ordered: Any
) -> PretrainingData:
    data = recipe.data
    return PretrainingData(
        source,
        special,
        capacity=data.capacity,
        max_length=data.max_length,
        max_sequences=data.max_sequences,
        masking=masking,
        masked_per_pack=data.masked_per_pack,
        seed=recipe.run.seed,
        method=PADDED if data.packing == BINNED else data.packing,
        with_draws=recipe.replaced_tokens is not None,
        **ordered,
    )
