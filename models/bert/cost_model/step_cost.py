"""A BERT and its global batch as the planner asks for them: exact bytes and calls, FLOPs, and estimates of the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import get_args

from models.bert.config import BertConfig
from models.bert.cost_model.comm_volume import STEP_NUMBERS, end_of_step_traffic, micro_batch_traffic, scaled_weights
from models.bert.cost_model.flops import attention_flops, model_flops
from models.bert.cost_model.kept_operands import keepable_bytes, kept_products, layer_products, smaller_budgets
from models.bert.cost_model.memory import Device, MicroBatchShape, least_memory
from models.bert.cost_model.param_shapes import OptimizerName, ParamMemory, held
from models.bert.cost_model.small_operators import small_operators
from tensor3d.cost_model.comm_volume import Bytes, CommModel, Kept, Side, weights_together
from tensor3d.cost_model.product_operators import (
    BLOCK_OPERATORS,
    Work,
    conversions,
    delayed_scales,
    end_to_end,
    lookup_conversion,
    rounding,
    shadow_copies,
    suits_fp8,
    together,
)
from tensor3d.cost_model.step_cost import Fp8, Memory, Product, StepCost, StepOptions
from tensor3d.data.masking import MASKED_SHARE, MaskingRules
from tensor3d.distributed.cube_shape import CubeShape
from tensor3d.distributed.data_shares import ShardOverData
from tensor3d.packing import attended

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of an element of each compute type."""

# Of clipping and a step of an optimiser (`count_update` of tools.bench.operators): bytes that are read and written of
# each gradient and of each element that is stepped: by AdamW, which LAMB's vectors are, by LAMB, by StableAdamW, and by
# the regions of either.
_CLIPPED, _ADAMW, _LAMB, _STABLE, _IN_REGIONS = 12, 28, 64, 104, 40
_GATHERED_BYTES = 16  # of an element's weight: packed, received, read and copied to its place
# Operators of both, which take all parameters at once, eager and beside regions, of which each block has two; and of
# each parameter's gradient.
_UPDATE_OPERATORS: Mapping[OptimizerName, tuple[int, int]] = MappingProxyType(
    {"adamw": (14, 14), "lamb": (30, 40), "stable_adamw": (59, 57)}
)
_OPERATORS_OF_A_GRADIENT = 2


_MOST_SEQUENCES = 2**22
"""Of a step: each is gone through. BERT was trained with 2^16 at most (You et al. 2020)."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The global batch of a step, in packs of full-length sequences.

    Raises:
        ValueError: a number below 1, a share out of range, sequences longer than a pack, more than 2^22 sequences.
    """

    packs: int
    capacity: int = 512
    """Token slots of a pack."""
    length: int | None = None
    """Tokens of a sequence. Default: capacity."""
    masked_per_pack: int | None = None
    """Slots for masked positions. Default: the masked share of the capacity."""
    masked_share: float = MASKED_SHARE
    """Of the tokens."""

    def __post_init__(self) -> None:
        for name in ("packs", "capacity", "length", "masked_per_pack"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1. Got {value}.")
        MaskingRules(share=self.masked_share)
        if self.length is not None and self.length > self.capacity:
            raise ValueError(f"a pack of {self.capacity} slots holds no sequence of {self.length} tokens.")
        sequences = self.packs * -(-self.capacity // (self.length or self.capacity))
        if sequences > _MOST_SEQUENCES:
            raise ValueError(
                f"a step has at most {_MOST_SEQUENCES:,} sequences. Got {sequences:,} in {self.packs:,} packs. Choose "
                "fewer packs, or longer sequences."
            )

    @property
    def tokens(self) -> int:
        return self.packs * self.capacity

    @property
    def masked(self) -> int:
        """Of a pack."""
        return self.masked_per_pack or max(1, math.ceil(self.masked_share * self.capacity))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the sequences of a pack; the last one may be shorter."""
        length = self.length or self.capacity
        whole, tail = divmod(self.capacity, length)
        return (length,) * whole + ((tail,) if tail else ())

    def load(self, shape: CubeShape, micro_batches: int) -> MicroBatchShape:
        """What a micro-batch gives a rank.

        Raises:
            ValueError: packs that do not divide.
        """
        ranks = shape.planes * shape.z * micro_batches
        if self.packs % ranks:
            raise ValueError(
                f"{self.packs} packs must divide by data={shape.data}, x={shape.x}, z={shape.z} and {micro_batches} "
                "micro-batches together. Choose another batch."
            )
        k = self.packs // ranks
        packs, multiple = k * shape.z, math.lcm(shape.y, shape.z)
        masked, first = packs * self.masked, packs * len(self.lengths)
        return MicroBatchShape(
            rows=packs * self.capacity,
            masked=-(-masked // multiple) * multiple,
            first=-(-first // multiple) * multiple,
            lengths=self.lengths * k,
        )


@dataclass(frozen=True, kw_only=True)
class BertCosts:
    """`tensor3d.cost_model.step_cost.PlannedModel` for pre-training of a BERT."""

    config: BertConfig
    batch: Batch
    causal: bool = False
    """Whether attention computes what came before each token alone, though `config`, which has a masked-LM head, does
    not say so. It changes FLOPs, and neither bytes nor calls. Default: as `config` has it."""
    compute: str = "bf16"
    """Type of activations and products: "fp32", "bf16" or "fp16"."""
    reduce: str = "fp32"
    """Type in which gradients travel."""
    fp8: Fp8 | None = None
    """How linear layers multiply in FP8, beside bf16 alone."""
    fp8_history: int = 16
    """Passes that delayed scales remember."""
    optimizer: OptimizerName = "lamb"
    shard_over_data: ShardOverData = False
    """Whether the optimiser's state is, and whether gradients are."""
    shadow_weights: bool = False
    compile: bool = False
    """Both as of `ExecutionPolicy`."""
    device: Device = "cuda"
    norm: int = STEP_NUMBERS
    """Numbers that travel with the gradient norm, itself one; 0: not clipped. In pre-training the ranks that want to
    stop and those whose loss is not finite come along."""
    _wires: dict[CubeShape, tuple[CommModel, CommModel]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    _loads: dict[tuple[int, ...], MicroBatchShape] = field(init=False, default_factory=dict, repr=False, compare=False)
    _memories: dict[tuple[CubeShape, StepOptions], Memory] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name in ("compute", "reduce"):
            if getattr(self, name) not in BYTES:
                raise ValueError(f"{name} must be one of {', '.join(BYTES)}. Got {getattr(self, name)!r}.")
        if self.fp8 is not None and (self.fp8 not in get_args(Fp8) or self.compute != "bf16"):
            raise ValueError(
                f"fp8 must be one of {', '.join(get_args(Fp8))}, beside compute='bf16'. Got {self.fp8!r} and "
                f"compute={self.compute!r}."
            )
        longest = max(self.batch.lengths)
        if not self.config.has_rotary and longest > self.config.positions:
            raise ValueError(
                f"sequences of {longest} tokens need positions of at least that. Got {self.config.positions}."
            )

    def refuse(self, shape: CubeShape) -> str | None:
        try:
            self.config.check(shape)
        except ValueError as problem:
            return str(problem)
        ranks = shape.planes * shape.z
        if self.batch.packs % ranks:
            return f"{self.batch.packs:,} packs do not divide by data * x * z = {ranks:,}"
        if not self.micro_batches(shape):
            return f"the {shape.z} packs of a plane do not divide by y={shape.y}"
        return None

    def micro_batches(self, shape: CubeShape) -> list[int]:
        """Divisors of the packs of a rank that leave micro-batches whose rows divide by y."""
        each = self.batch.packs // (shape.planes * shape.z)
        small = [n for n in range(1, math.isqrt(each) + 1) if each % n == 0]
        every = sorted({*small, *(each // n for n in small)})
        return [n for n in every if each // n * shape.z * self.batch.capacity % shape.y == 0]

    def keepable(self, shape: CubeShape, choice: StepOptions) -> int:
        rows = self._load(shape, choice).rows
        return keepable_bytes(self.config, shape, rows, BYTES[self.compute], choice.recompute)

    def smaller_budgets(self, shape: CubeShape, choice: StepOptions) -> list[range]:
        rows = self._load(shape, choice).rows
        element = BYTES[self.compute]
        return smaller_budgets(self.config, shape, rows, element, choice.recompute, choice.keep_budget)

    def memory(self, shape: CubeShape, choice: StepOptions) -> Memory:
        if choice.keep_budget:  # a search asks for dozens, and again for one
            return self._memory(shape, choice)
        if (shape, choice) not in self._memories:  # it asks whether it fits, then for its cost
            self._memories[shape, choice] = self._memory(shape, choice)
        return self._memories[shape, choice]

    def _memory(self, shape: CubeShape, choice: StepOptions) -> Memory:
        return least_memory(
            self.config,
            self._wire(shape),
            self._load(shape, choice),
            choice,
            optimizer=self.optimizer,
            device=self.device,
            shard_over_data=self.shard_over_data,
            shadow_weights=self.shadow_weights,
            compile=self.compile,
            scaled=scaled_weights(self.config, shape, self.fp8),
            fp8_history=self.fp8_history,
        )

    def cost(self, shape: CubeShape, choice: StepOptions) -> StepCost:
        config, (wire, calls), load = self.config, self._wires_of(shape), self._load(shape, choice)
        here = held(config, shape)
        again = 4 / 3 if choice.recompute != "none" else 1.0  # a forward pass more beside three
        micro, once = self._traffic(wire, load, choice, here)
        micro_calls, once_calls = self._traffic(calls, load, choice, here)
        products = self._products(wire, load, choice)
        small = small_operators(config, wire, load, compiled=self.compile, again=choice.recompute == "layer")
        around = together([small, self._around(products, wire, load)])
        around_once = delayed_scales(scaled_weights(config, shape, self.fp8))
        if self.shadow_weights:
            around_once = together([around_once, shadow_copies(wire, here.multiplied)])
        update = self._update(here, shape)
        return StepCost(
            wire=wire,
            choice=choice,
            products=products,
            micro=micro,
            micro_calls=micro_calls,
            once=once,
            once_calls=once_calls,
            attention_flops=again * self._attention(load) / shape.y,
            touched=around.touched,
            operators=around.operators,
            once_touched=update.touched + around_once.touched,
            once_operators=_OPERATORS_OF_A_GRADIENT * here.tensors + update.operators + around_once.operators,
            tokens=self.batch.tokens,
            model_flops=self.model_flops(),
            memory=self.memory(shape, choice),
        )

    def model_flops(self) -> int:
        """Of a step, over all ranks."""
        lengths, packs = self.batch.lengths, self.batch.packs
        near = sum(int(attended(length, self.config.window)) for length in lengths)
        return model_flops(
            self._attending,
            self.batch.tokens,
            packs * sum(length**2 for length in lengths),
            packs * self.batch.masked,
            packs * len(lengths),
            packs * near,
        )

    def _wire(self, shape: CubeShape) -> CommModel:
        return self._wires_of(shape)[0]

    def _wires_of(self, shape: CubeShape) -> tuple[CommModel, CommModel]:
        """By bytes and by calls. A search asks for them with every choice of a box, and they find out where a rank is
        but once."""
        if shape not in self._wires:
            wire = CommModel(shape=shape, compute=BYTES[self.compute], gradient=BYTES[self.reduce])
            self._wires[shape] = wire, replace(wire, unit="calls")
        return self._wires[shape]

    def _load(self, shape: CubeShape, choice: StepOptions) -> MicroBatchShape:
        key = (shape.planes, shape.y, shape.z, choice.micro_batches)
        if key not in self._loads:
            self._loads[key] = self.batch.load(shape, choice.micro_batches)
        return self._loads[key]

    def _traffic(
        self, wire: CommModel, load: MicroBatchShape, choice: StepOptions, here: ParamMemory
    ) -> tuple[Bytes, Bytes]:
        """Of a micro-batch, and of what comes once a step."""
        rows = (load.rows, load.masked, load.first)
        micro = micro_batch_traffic(
            self.config,
            wire,
            *rows,
            reshard_after_forward=choice.reshard_after_forward,
            keep_budget=choice.keep_budget,
            recompute=choice.recompute,
            reduce_loss=False,
        )
        return micro, end_of_step_traffic(
            self.config,
            wire,
            norm=self.norm,
            summed=here.summed(self.optimizer),
            scaled=scaled_weights(self.config, wire.shape, self.fp8),
            shard_over_data=self.shard_over_data,
        )

    def _products(self, wire: CommModel, load: MicroBatchShape, choice: StepOptions) -> tuple[Product, ...]:
        config, hidden, columns = self.config, self.config.hidden, self.config.embedding_size
        kept = kept_products(
            config,
            wire.shape,
            load.rows,
            BYTES[self.compute],
            reshard_after_forward=choice.reshard_after_forward,
            budget=choice.keep_budget,
            recompute=choice.recompute,
        )
        again, sizes = choice.recompute == "layer", layer_products(config)
        block = weights_together(wire, sizes)
        layers = [
            Product(
                rows=load.rows,
                k=k,
                n=n,
                face=face,
                times=number,
                kept=of_them,
                repeated=again,
                bias=bias,
                together=block,
                hands_on=face == "z" and not config.pre_norm,  # QKV and up
            )
            for (k, n, face), count, bias in zip(sizes, kept.layers, config.layer_biases, strict=True)
            for of_them, number in count.runs(config.layers)
        ]

        if config.distance_buckets is not None:
            rows = config.distance_buckets.rows // wire.size("x")
            layers.append(Product(rows=rows, k=hidden, n=3 * hidden, times=config.layers, repeated=again))

        def head(rows: int, k: int, n: int, of_it: Kept, bias: bool = True, together: bool = False) -> Product:
            # Over an x of 1 no weight of a head stays.
            stays: Kept = of_it if wire.size("x") > 1 else of_it in (True, "input") and "input"
            return Product(rows=rows, k=k, n=n, kept=stays, bias=bias, together=together)

        first: list[tuple[int, int, Side]] = [(hidden, hidden, "z")] if config.next_sentence else []
        dense: list[tuple[int, int, Side]] = [] if config.traits.decoder_alone else [(hidden, columns, "z")]
        block = weights_together(wire, [*dense, *first])
        # Never in FP8: a loss reads what it returns.
        vocabulary = head(load.masked, columns, config.vocab, "weight", not config.traits.decoder_alone)
        heads = [
            *(head(load.masked, k, n, kept.dense, config.head_bias, block) for k, n, _ in dense),
            *(head(load.first, k, n, kept.pooler, config.has_pooler_bias, block) for k, n, _ in first),
        ]
        beside = config.product_beside_layers
        entry = [] if beside is None else [Product(rows=load.rows, k=beside, n=hidden, kept=kept.projection)]
        linear = (*layers, *entry, *heads)
        if self.fp8 is not None:
            linear = tuple(
                replace(each, fp8=self.fp8) if suits_fp8(wire.shape, each.k, each.n, each.face) else each
                for each in linear
            )
        return (*linear, vocabulary)

    def _around(self, products: tuple[Product, ...], wire: CommModel, load: MicroBatchShape) -> Work:
        """Of a micro-batch, beside the products, exactly: weights that travel together, conversions of weights and
        biases, and rounding to FP8."""
        config = self.config
        converted = [] if self.shadow_weights else [conversions(each, wire) for each in products]
        if not (self.shadow_weights and config.tied):
            converted.append(lookup_conversion(wire, load.rows, config.vocab, config.embedding_size))
        rounded = (rounding(each, wire, compiled=self.compile) for each in products)
        blocks = config.layers * weights_together(wire, layer_products(config))
        travelling = [Work(operators=BLOCK_OPERATORS * blocks), *(end_to_end(each, wire) for each in products)]
        return together([*converted, *rounded, *travelling])

    def _attention(self, load: MicroBatchShape) -> float:
        """FLOPs of a micro-batch over all members of y."""
        pack = self.batch.lengths
        near = sum(int(attended(length, self.config.window)) for length in pack) if self.config.local_layers else 0
        one = attention_flops(self._attending, sum(pack), sum(length**2 for length in pack), near)
        return float(one) * (len(load.lengths) // len(pack))

    @property
    def _attending(self) -> BertConfig:
        """The model by which pairs that attend are counted."""
        return replace(self.config, causal=True, pooling="last") if self.causal else self.config

    def _update(self, here: ParamMemory, shape: CubeShape) -> Work:
        """Of clipping and the optimiser's step, once a step."""
        stepped, shards = here.stepped(self.shard_over_data), self.shard_over_data
        matrices = here.adapted_share if shards else here.adapted
        compiled = self.compile and self.optimizer != "adamw"
        blocks, inside = here.in_regions(shards) if compiled else (0, 0)
        of_matrix, of_vector = {"adamw": (_ADAMW, _ADAMW), "lamb": (_LAMB, _ADAMW), "stable_adamw": (_STABLE, _STABLE)}[
            self.optimizer
        ]
        touched = _CLIPPED * here.gradients(shape, shards) + _IN_REGIONS * inside
        touched += of_matrix * (matrices - inside) + of_vector * (stepped - matrices)
        if stepped < here.total:
            touched += _GATHERED_BYTES * here.total
        return Work(operators=_UPDATE_OPERATORS[self.optimizer][compiled] + 2 * blocks, touched=touched)
