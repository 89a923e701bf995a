"""The sections of a recipe: one dataclass each, and a sentence under each key."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from models.bert import PRESETS, BertConfig
from tensor3d.attention import Backend


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """Where text comes from, and how it becomes packs."""

    source: str = "embedded"
    """"embedded", or a text file or a folder of *.txt files (UTF-8, a blank line between documents), or the folder of
    `tools.corpus samples`, which decides vocab_size, shards and held_out."""
    vocab_size: int = 2048
    """Pieces of the tokenizer."""
    held_out: float = 0.02
    """Share of the words kept for evaluation, in whole documents. 0: none, and no evaluation."""
    capacity: int = 128
    """Token slots of a pack."""
    max_length: int = 128
    """Tokens of a sequence, at most."""
    max_sequences: int = 8
    """Sequences of a pack, at most."""
    masked_per_pack: int | None = None
    """Tokens to guess in a pack, at most. Default: 15 % of a full pack and two more."""
    short_probability: float = 0.1
    """Share of pairs that aim at a random shorter length."""
    packing: Literal["lp", "lpfhp", "spfhp", "nnlshp", "stream", "padded", "binned"] = "lp"
    """How sequences fill packs: by a planner, as they come ("stream"), or one sequence a pack, of full length
    ("padded") or of the length of its bin ("binned"); the last two are baselines."""
    bin_width: int = 64
    """Tokens: how much longer than another one a sequence of the same bin may be."""
    plans: str | None = None
    """Folder for plan files: made by --prepare-only for the epochs of the run, then read instead of planning again."""
    shards: int = 1
    """Parts that the training documents are cut into, pairs of each part drawn by itself; a multiple of the data ranks
    where each of these reads its own."""
    groups: int = 1
    """Consecutive shards form a group, and a pack has sequences of one group only; then an exchange can stay inside a
    node."""


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """A preset, and what is changed of it."""

    preset: Literal["tiny", "mini", "small", "base", "large"] = "tiny"
    """Layers, hidden size and heads of BERT's published sizes."""
    layers: int | None = None
    """Transformer layers, instead of the preset's."""
    hidden: int | None = None
    """Columns of a hidden state, instead of the preset's."""
    heads: int | None = None
    """Attention heads, instead of the preset's."""
    inner: int | None = None
    """Columns inside the MLP. Default: 4 * hidden; of the modern encoder 8/3 * hidden in whole 64s."""
    encoder: Literal["classic", "modern"] = "classic"
    """BERT's layers, or rotary positions, GeGLU, LayerNorm before each block and no bias."""
    window: int | None = None
    """Modern encoder alone: tokens of local layers see those less than this far away. Default: all layers see all."""
    global_every: int | None = None
    """With a window: layers 0, n, 2n, ... see whole sequences. Default: 3."""
    rotary_base: float | None = None
    """Modern encoder alone: base of the wave lengths of rotary positions. Default: 10,000."""
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    """Classic encoder alone: inside the MLP and the masked-LM head."""
    eps: float = 1e-12
    """Added to LayerNorm's variances."""
    norm: Literal["post", "pre"] = "post"
    """Classic encoder alone: LayerNorm after each residual, as in BERT, or before each block."""
    dropout: float = 0.1
    """Probability, of hidden states."""
    attention_dropout: float = 0.1
    """Probability, of attention weights."""
    std: float = 0.02
    """Standard deviation of initial weights."""
    positions: int | None = None
    """Classic encoder alone: rows of the position table. Default: data.max_length, which is also the least."""
    recompute: Literal["none", "layer", "attention"] = "none"
    """What the backward pass computes again instead of keeping it: whole layers (their input alone is kept), or
    attention alone. The gradients are the same bits."""
    keep_gathered: bool = False
    """Keep gathered inputs and weights for the backward pass instead of gathering them again: less traffic, more
    memory."""

    def config(self, data: DataRecipe) -> BertConfig:
        """The model's sizes, with the vocabulary and the longest sequence of the data.

        Raises:
            ValueError: sizes that do not fit together, an option of the other encoder.
        """
        if self.encoder == "modern" and self.positions is not None:
            raise ValueError(
                f'model.positions={self.positions} are rows of a table that encoder="modern" does not have. Leave it '
                "out."
            )
        names = ("layers", "hidden", "heads", "inner", "window", "global_every", "rotary_base")
        changed = {name: getattr(self, name) for name in names}
        return dataclasses.replace(
            PRESETS[self.preset],
            **{name: value for name, value in changed.items() if value is not None},
            vocab=data.vocab_size,
            positions=data.max_length if self.positions is None else self.positions,
            encoder=self.encoder,
            activation=self.activation,
            eps=self.eps,
            norm=self.norm,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            std=self.std,
        )


@dataclass(frozen=True, kw_only=True)
class SpeedRecipe:
    """How the work is done. What is learnt is the same, but for rounding and dropout's draws; a run may be resumed
    with other values."""

    overlap: bool = True
    """Collectives travel under products. Without it each is waited for where it is issued."""
    compile: Annotated[bool, tyro.conf.arg(aliases=["--compile"])] = False
    """Compile chains of small operators between products; the first steps are slower for it."""
    attention: Backend = "auto"
    """Which kernels attention uses (docs/attention.md). Those that cannot serve the model on the device are refused
    before the run starts."""
    read_rows_only: bool = False
    """The last layer computes only the rows that heads read: masked places and [CLS]."""


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe:
    """Which optimiser, and its learning rate over the run: a linear rise, then a schedule down."""

    kind: Literal["adamw", "lamb"] = "adamw"
    """AdamW (Loshchilov & Hutter 2019), or LAMB (You et al. 2020), for global batches of many thousand sequences."""
    lr: float = 1e-3
    """Peak learning rate."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises."""
    schedule: Literal["linear", "polynomial", "cosine", "wsd", "constant"] = "linear"
    """After the rise: straight to 0; (1 - share of the steps done) to the power `power`; half a cosine; constant and
    then down in the last share `decay` of the steps (warm-up, stable, decay); or constant."""
    power: float = 1.0
    """Exponent of the polynomial schedule."""
    decay: float = 0.1
    """Share of the steps in which the schedule "wsd" goes down."""
    floor: float = 0.0
    """Where the schedules cosine, polynomial and wsd end, as a share of the peak."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.999
    """Decay of the mean of squared gradients."""
    eps: float = 1e-6
    """Added to the root of the mean of squares."""
    weight_decay: float = 0.01
    """Of matrices; vectors (biases, LayerNorm) have none."""
    clip: float = 1.0
    """Largest norm of the gradient."""


@dataclass(frozen=True, kw_only=True)
class PrecisionRecipe:
    """In which types a step computes. Weights and the optimiser's moments are fp32 always."""

    compute: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of products and of what travels for them. LayerNorm's statistics, softmax and loss stay fp32; fp16 comes
    with a dynamic loss scale, and is very slow on CPUs."""
    reduce: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type in which gradients travel to be summed."""
    tf32: bool = True
    """Let GPUs that have TF32 use it for fp32 products."""
    loss_scale: float = 65536.0
    """Loss scale at the start; fp16 alone."""
    growth_interval: int = 2000
    """Steps without overflow after which the loss scale doubles; fp16 alone."""


@dataclass(frozen=True, kw_only=True)
class BatchRecipe:
    """How many packs make a step."""

    global_batch: int = 16
    """Packs of one step, over all ranks. The same packs on any cube."""
    packs_per_rank: int | None = None
    """Packs a rank takes at once; accumulation follows. Default: all of its share."""
    balance: bool = True
    """Deal a step's packs to the ranks so that all have equal work; the step has the same packs without it."""
    packing_rule: Literal["none", "sequences", "betas"] = "none"
    """What is done about a pack holding several sequences. "sequences": global_batch counts sequences, and a step takes
    global_batch / packing factor packs; "betas": beta1 and beta2 to the power of the packing factor (for LAMB)."""
    multiple_of: int = 8
    """Packs of a step are rounded to a multiple of this, by the rule "sequences"."""


@dataclass(frozen=True, kw_only=True)
class RunRecipe:
    """How long, and what is kept."""

    steps: int = 300
    """Steps of the optimiser."""
    seed: int = 0
    """Decides weights, packs, masks and dropout."""
    log_every: int = 1
    """Steps between two points in TensorBoard."""
    evaluate_every: int = 100
    """Steps between evaluations on the held-out documents; also at the end. 0: never."""
    evaluate_every_samples: int = 0
    """Sequences between evaluations, instead of steps: evaluate_every must then be 0. 0: evaluate_every counts."""
    target_accuracy: float = 0.0
    """Masked-LM accuracy on the held-out documents at which the run stops and reports the time to it. 0: none."""
    patience: int = 0
    """Evaluations without a lower held-out loss after which the run stops. 0: never."""
    checkpoint_every: int = 100
    """Steps between checkpoints; also at the end. 0: never."""
    checkpoint_keep: int = 3
    """Newest checkpoints that stay; older ones are deleted."""
    checkpoint_keep_every: int = 0
    """Checkpoints of steps that divide by this stay for good. 0: none."""
    asynchronous: bool = True
    """Write checkpoints in the background while the training goes on."""
    hang_after: float = 600.0
    """Seconds without progress after which the run ends and names the rank that the others wait for."""
    stop_within: float = 25.0
    """Seconds from a signal to the end of the step after which the run saves and leaves: longer than two steps.
    torchrun kills after 30 seconds, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says more."""
    loss_spike: float = 10.0
    """A loss so many usual deviations above the usual one is reported as a spike. 0: none is."""
    mllog: bool = False
    """Also write lines in the form of MLPerf's logs, ":::MLLOG {...}"."""
    peak_tflops: float = 0.0
    """Peak of one device in the compute type, in 10^12 FLOP/s, for MFU. 0: as known of the device, or no MFU."""
