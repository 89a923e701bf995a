"""A recipe: everything that decides what a run computes, in one TOML file. The cube is no part of it."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from models.bert import PRESETS, BertConfig, ReplacedTokens
from models.bert.config import types_of
from models.bert.families import Family
from tensor3d.attention import Backend
from tensor3d.attention.flash_version import FlashVersion
from tensor3d.cost_model.step_cost import check_keep_budget
from tensor3d.data import MaskingRules
from tensor3d.data.masking import MASKED_SHARE
from tensor3d.distributed.data_shares import ShardOverData
from tensor3d.optim.grad_scaler import LARGEST, SMALLEST
from tools.common.bounds import LANGUAGE, AtLeast, Positive, Share, Within, check_bounds, check_whole
from tools.common.files import read_file

# Behind its name on a command line nothing means "state".
ShardOption = Annotated[
    ShardOverData,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=(0, 1),
        metavar="[state|gradients]",
        instance_from_str=lambda words: {"true": True, "false": False}.get("".join(words), "".join(words) or True),
        is_instance=lambda value: isinstance(value, bool) or value in ("state", "gradients"),
        str_from_instance=lambda value: [str(value).lower()],
        choices=("true", "false", "state", "gradients"),
    ),
]

# --- The sections of a recipe: one dataclass each, and a sentence under each key --------------------------------------


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where text comes from, and how it becomes packs."""

    source: str = "embedded"
    """"embedded", or a text file or a folder of *.txt files (UTF-8, a blank line between documents), or the folder of
    `tools.corpus samples`, which decides vocab_size, shards and held_out."""
    language: Annotated[str, LANGUAGE] = "en"
    """ISO 639-1 code of the text: its rules say where a sentence ends. Samples were cut into sentences before."""
    objective: Literal["masked-lm+next-sentence", "masked-lm", "replaced-tokens"] = "masked-lm+next-sentence"
    """What is learnt: masked tokens, and whether the second text of a pair follows the first (BERT); or masked tokens
    alone, without a pooler (RoBERTa, ModernBERT), of single texts where they are drawn here, or of any samples; or, of
    the same texts, which tokens a small generator has replaced (ELECTRA, Clark et al. 2020)."""
    vocab_size: Annotated[int, AtLeast(6)] = 2048
    """Pieces of the tokenizer."""
    held_out: Annotated[float, Share()] = 0.02
    """Share of the words kept for evaluation, in whole documents. 0: none, and no evaluation."""
    # Packing keeps some numbers for each slot: a capacity of 10^9 took all memory there was, without a word.
    capacity: Annotated[int, Within(5, 2**20)] = 128
    """Token slots of a pack."""
    max_length: Annotated[int, AtLeast(5)] = 128
    """Tokens of a sequence, at most."""
    max_sequences: Annotated[int, AtLeast(1)] = 8
    """Sequences of a pack, at most."""
    masked_share: Annotated[float, Positive(), Share()] = MASKED_SHARE
    """Share of the tokens that are guessed, at most 0.8. BERT's is 0.15; larger models learn more from 0.3 to 0.4
    (Wettig et al. 2023)."""
    masked_share_end: Annotated[float | None, Positive(), Share()] = None
    """That of the last step, to which the share goes in a straight line. All evaluations have this one. Default: it
    stays."""
    mask_replace: Annotated[float, AtLeast(0)] = 0.8
    """Share of the guessed tokens that become [MASK]."""
    random_replace: Annotated[float, AtLeast(0)] = 0.1
    """Share of the guessed tokens that become another token; the rest stays as it is."""
    masked_spans: bool = False
    """Runs of tokens are guessed together and replaced alike, of whole words where the samples know them; 3.8 long on
    average, 10 at most (SpanBERT, Joshi et al. 2020)."""
    masked_per_pack: Annotated[int | None, AtLeast(1)] = None
    """Tokens to guess in a pack, at most. Default: the largest masked share of a full pack and two more."""
    short_probability: Annotated[float, Share()] = 0.1
    """Share of pairs or texts that aim at a random shorter length."""
    packing: Literal["lp", "lpfhp", "spfhp", "nnlshp", "stream", "padded", "binned"] = "lp"
    """How sequences fill packs: by a planner, as they come ("stream"), or one sequence a pack, of full length
    ("padded") or of the length of its bin ("binned"); the last two are baselines."""
    bin_width: Annotated[int, AtLeast(1)] = 64
    """Tokens: how much longer than another one a sequence of the same bin may be."""
    plans: str | None = None
    """Folder for plan files: made by --prepare-only for the epochs of the run, then read instead of planning again."""
    shards: Annotated[int, AtLeast(1)] = 1
    """Parts that the training documents are cut into, pairs of each part drawn by itself; a multiple of the data ranks
    where each of these reads its own."""
    groups: Annotated[int, AtLeast(1)] = 1
    """Consecutive shards form a group, and a pack has sequences of one group only; then an exchange can stay inside a
    node."""

    @property
    def single(self) -> bool:
        """Sequences that are drawn here are single texts, and no label is learnt."""
        return self.objective != "masked-lm+next-sentence"

    def masking(self, steps: int) -> MaskingRules:
        """Of a run of so many steps. Raises ValueError for shares out of range."""
        try:
            return MaskingRules(
                share=self.masked_share,
                end_share=self.masked_share_end,
                steps=steps,
                mask_replace=self.mask_replace,
                random_replace=self.random_replace,
                spans=self.masked_spans,
            )
        except ValueError as problem:
            raise ValueError(f"data.masked_share and what belongs to it: {problem}") from None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A preset, and what is changed of it."""

    preset: Literal["tiny", "mini", "small", "base", "large"] = "tiny"
    """Layers, hidden size and heads of BERT's published sizes."""
    # Formulas and dry steps go through each: of 10^9 a dry run never came to an end.
    layers: Annotated[int | None, Within(1, 10_000)] = None
    """Transformer layers, instead of the preset's."""
    hidden: int | None = None
    """Columns of a hidden state, instead of the preset's."""
    heads: int | None = None
    """Attention heads, instead of the preset's."""
    kv_heads: int | None = None
    """Modern encoder alone: heads of keys and values, each of which serves heads / kv_heads heads of queries. Default:
    as many as heads."""
    head_dim: int | None = None
    """Of the families "gemma3_text" and "qwen3": columns of a head. Default: hidden / heads."""
    inner: int | None = None
    """Columns inside the MLP. Default: 4 * hidden; of the modern encoder 8/3 * hidden in whole 64s."""
    encoder: Literal["classic", "modern"] = "classic"
    """BERT's layers, or rotary positions, a gated MLP, norms before each block and no bias."""
    window: int | None = None
    """Modern encoder alone: tokens of local layers see those less than this far away. Default: all layers see all."""
    global_every: int | None = None
    """With a window: layers 0, n, 2n, ... see whole sequences, of EmbeddingGemma n - 1, 2n - 1, ... Default: 3, of
    EmbeddingGemma 6."""
    rotary_base: float | None = None
    """Base of the wave lengths of rotary positions, of the modern encoder, Jina's third, NomicBERT and GTE. Default:
    10,000; of these three 20,000, 1,000 and 160,000."""
    rotary_factor: Annotated[float, Positive()] = 1.0
    """Of Jina's third, NomicBERT and GTE: positions are divided by it, as for sequences longer than those learnt
    from."""
    local_rotary_base: float | None = None
    """With a window: the same of layers that have it. Default: rotary_base."""
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    """Classic encoder: inside the MLP and the masked-LM head. EuroBERT, Qwen3, NomicBERT, GTE: of the gate, "silu" or
    "gelu"; of EmbeddingGemma "gelu_tanh"."""
    eps: Annotated[float, Positive()] = 1e-12
    """Added to LayerNorm's variances."""
    norm: Literal["post", "pre"] = "post"
    """Classic encoder alone: LayerNorm after each residual, as in BERT, or before each block, as always in
    XLM-RoBERTa-XL, RoBERTa-PreLayerNorm and Megatron-BERT."""
    dropout: float = 0.1
    """Probability, of hidden states."""
    attention_dropout: float = 0.1
    """Probability, of attention weights."""
    attention_out_dropout: float | None = None
    """Modern encoder alone: probability, of what attention's output projection gives. Default: dropout."""
    std: Annotated[float, Positive()] = 0.02
    """Standard deviation of initial weights."""
    vocab_rows: int | None = None
    """Rows of the embedding of tokens, and logits of masked ones, where a model that the run begins with has more than
    its tokenizer has pieces. Default: data.vocab_size, which is also the least."""
    positions: int | None = None
    """Rows of the position table from `first_position` on; with rotary positions, which have none, the longest sequence
    that the model's folder will say it takes; of DeBERTa, which has none either, the farthest distance with a bucket of
    its own. Default: data.max_length, which is also the least."""
    position_buckets: int | None = None
    """Of DeBERTa: buckets of distances to each side, even. Default: 256, but at most half of positions."""
    conv_kernel: int | None = None
    """Of DeBERTa: tokens that a convolution beside the first layer looks at, odd and at least 3. Default: none."""
    family: Family = "bert"
    """Whose heads stand on the encoder, to go on with such a model of Hugging Face's library, or to become one.
    "modernbert", "eurobert", "gemma3_text" (EmbeddingGemma) and "qwen3" have the modern encoder, "bert" may have
    either."""
    first_position: int = 0
    """Of RoBERTa's relatives: row of the position table for the first token, the id of padding and one more; of MPNet
    always 2."""
    types: int | None = None
    """Token types; with 1, both texts of a pair have it. Default: 2; of MPNet, DistilBERT, ModernBERT, EuroBERT,
    EmbeddingGemma, Qwen3 and DeBERTa 0, of Jina's third and GTE 1."""
    pooling: Literal["cls", "mean", "last", "score", "late"] = "cls"
    """Of ModernBERT, EuroBERT, EmbeddingGemma and Qwen3: what classifiers of texts will look at, the state of [CLS] or
    the mean of all tokens'; "last", of Qwen3: the state of the last one; "score", of EmbeddingGemma and Qwen3: that of
    the last one which is no padding, with one linear and nothing before it, as in the library; "late", of EuroBERT:
    each token, and the answer is the mean of theirs."""
    embedding: int | None = None
    """Of ELECTRA: columns of the embeddings, projected to hidden. Default: hidden, and no projection."""
    tied: bool = True
    """The masked-LM head's decoder is the embedding of tokens; false, as of EuroBERT, gives it a weight of its own."""
    generator_size: float | None = None
    """Of the objective "replaced-tokens": the generator's hidden size, inner size and heads, as a share of the model's
    own. Default: 0.25; a DeBERTa's is as large."""
    generator_heads: int | None = None
    """Attention heads of the generator, which divide by the cube's y. Default: its share, and at least 1."""
    generator_layers: int | None = None
    """Layers of the generator. Default: as many as the model's; of a DeBERTa half of them, and at least 1."""
    discriminator_weight: float | None = None
    """By which the loss of the discriminator, the model itself, is multiplied beside the generator's. Default: 50."""
    recompute: Literal["none", "layer", "attention"] = "none"
    """What the backward pass computes again instead of keeping it: whole layers (their input alone is kept), or
    attention alone. The gradients are the same bits."""
    reshard_after_forward: bool = True
    """Gather inputs and weights again in the backward pass; false keeps them: less traffic, more memory."""
    keep_budget: Annotated[int, AtLeast(0)] = 0
    """MiB of each rank for gathered inputs and weights that stay for the backward pass of a micro-batch, and are not
    gathered again: each product's are looked at alone, and those come first that spare most for a byte. 0: none stay,
    or, with reshard_after_forward = false, all of them."""

    @property
    def keep_bytes(self) -> int:
        """`keep_budget` in bytes."""
        return self.keep_budget * 2**20

    @property
    def has_dropout(self) -> bool:
        """Whether training draws anything for it."""
        return any(p for p in (self.dropout, self.attention_dropout, self.attention_out_dropout))

    def config(self, data: DataConfig) -> BertConfig:
        """The model's sizes, with the vocabulary and the longest sequence of the data.

        Raises:
            ValueError: sizes that do not fit together, an option of the other encoder.
        """
        sizes = ("layers", "hidden", "heads", "inner", "embedding", "position_buckets", "conv_kernel")
        modern = ("kv_heads", "head_dim", "window", "global_every", "rotary_base", "local_rotary_base")
        changed = {name: getattr(self, name) for name in (*sizes, *modern, "attention_out_dropout")}
        return dataclasses.replace(
            PRESETS[self.preset],
            **{name: value for name, value in changed.items() if value is not None},
            vocab=data.vocab_size if self.vocab_rows is None else self.vocab_rows,
            positions=data.max_length if self.positions is None else self.positions,
            family=self.family,
            first_position=self.first_position,
            types=types_of(self.family) if self.types is None else self.types,
            pooling=self.pooling,
            rotary_factor=self.rotary_factor,
            encoder=self.encoder,
            activation=self.activation,
            eps=self.eps,
            norm=self.norm,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            std=self.std,
            tied=self.tied,
            next_sentence=not data.single,
        )

    def replaced_tokens(self, data: DataConfig) -> ReplacedTokens | None:
        """What the objective "replaced-tokens" needs beside the sizes; None: another one is learnt.

        Raises:
            ValueError: its settings with another objective, a family that has no head for it, or sizes that do not fit.
        """
        given = {
            name: value
            for name, value in (
                ("generator_size", self.generator_size),
                ("generator_heads", self.generator_heads),
                ("generator_layers", self.generator_layers),
                ("discriminator_weight", self.discriminator_weight),
            )
            if value is not None
        }
        if data.objective != "replaced-tokens":
            if given:
                name, value = next(iter(given.items()))
                raise ValueError(
                    f"model.{name}={value} belongs to data.objective = 'replaced-tokens'. Got {data.objective!r}. "
                    "Leave it out, or set the objective."
                )
            return None
        if "discriminator_weight" in given:
            given["weight"] = given.pop("discriminator_weight")
        try:
            settings = ReplacedTokens(**given)  # type: ignore[arg-type]
            settings.generator(self.config(data))
        except ValueError as problem:
            raise ValueError(f"data.objective = {data.objective!r}: {problem}") from None
        return settings


@dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """How the work is done. What is learnt is the same, but for rounding and dropout's draws; a run may be resumed
    with other values."""

    overlap: bool = True
    """Collectives travel under products. Without it each is waited for where it is issued."""
    weight_group_bytes: Annotated[int | None, AtLeast(0)] = None
    """A layer's weights travel over x in one gather, and their gradients in one sum, where at most so many bytes
    of them are gathered; 0: never. Not told: 64 MiB where y and z are 1, else never."""
    compile: Annotated[bool, tyro.conf.arg(aliases=["--compile"])] = False
    """Compile chains of small operators between products; the first steps are slower for it."""
    attention: Backend = "auto"
    """Which kernels attention uses (docs/attention.md). Those that cannot serve the model on the device are refused
    before the run starts."""
    flash_attention: FlashVersion | None = None
    """In the place of PyTorch's own FlashAttention-2, for attention that is varlen: FA3 (Hopper) or FA4 (Hopper,
    Blackwell), where its package is installed. Neither drops attention weights. Tried before the run starts."""
    read_rows_only: bool = False
    """The last layer computes only the rows that heads read: masked places and [CLS]."""
    keep_buckets: Literal["auto", "yes", "no"] = "auto"
    """The memory of gradients that are summed over `data` stays from step to step. auto: on CPUs, where new memory
    takes time, unless `optimizer.shard_over_data` is set."""
    shadow_weights: bool = False
    """Where `precision.compute` is not fp32, products take copies of weights and biases that are converted once after
    an update, in place of converting at each use: fewer operators, for 2 bytes an element. The same bits. Not with
    `speed.cuda_graph`, in which conversions are captured."""
    symmetric_memory: bool = False
    """Of the collectives over y and z around a product, the larger one goes in one operator with it, by PyTorch's
    symmetric memory. For GPUs of one node along y and z, not with `precision.fp8`; elsewhere it is refused. Never run
    on several GPUs yet."""
    cuda_graph: bool = False
    """Replay forward and backward of a micro-batch as one CUDA graph: for one GPU that waits for its host. Needs
    attention that is varlen (bf16 or fp16), and a last layer of all rows. Their times are told as one, as forward."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which optimiser, and its learning rate over the run: a linear rise, then a schedule down."""

    kind: Literal["adamw", "lamb", "stable_adamw"] = "adamw"
    """AdamW (Loshchilov & Hutter 2019); LAMB (You et al. 2020), for global batches of many thousand sequences; or AdamW
    with shorter steps behind spikes of the gradient (StableAdamW, Wortsman et al. 2023)."""
    lr: Annotated[float, Positive()] = 1e-3
    """Peak learning rate."""
    warmup: Annotated[float, Share()] = 0.1
    """Share of the steps in which the learning rate rises."""
    schedule: Literal["linear", "polynomial", "cosine", "wsd", "constant"] = "linear"
    """After the rise: straight to 0; (1 - share of the steps done) to the power `power`; half a cosine; constant and
    then down in the last share `decay` of the steps (warm-up, stable, decay); or constant."""
    power: Annotated[float, Positive()] = 1.0
    """Exponent of the polynomial schedule."""
    decay: Annotated[float, Positive(), Share(all=True)] = 0.1
    """Share of the steps in which the schedule "wsd" goes down."""
    decay_shape: Literal["linear", "sqrt"] = "linear"
    """How "wsd" goes down: straight, or by 1 - the root of the share of the way down (Hägele et al. 2024)."""
    floor: Annotated[float, Share()] = 0.0
    """Where the schedules cosine, polynomial and wsd end, as a share of the peak."""
    beta1: Annotated[float, Share()] = 0.9
    """Decay of the mean of gradients."""
    beta2: Annotated[float, Share()] = 0.999
    """Decay of the mean of squared gradients."""
    eps: Annotated[float, Positive()] = 1e-6
    """Added to the root of the mean of squares."""
    weight_decay: Annotated[float, AtLeast(0)] = 0.01
    """Of matrices; vectors (biases, LayerNorm) have none."""
    clip: Annotated[float, Positive()] = 1.0
    """Largest norm of the gradient."""
    shard_over_data: ShardOption = False
    """Shard the moments over the data axis (true or "state", ZeRO stage 1): each copy of the cube keeps and steps a
    share of its blocks, and gathers the other weights after each step. "gradients": and sums of gradients too (stage
    2). Checkpoints do not depend on it."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """In which types a step computes. Weights and the optimiser's moments are fp32 always."""

    compute: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of products and of what travels for them. LayerNorm's statistics, softmax and loss stay fp32; fp16 comes
    with a dynamic loss scale, and is very slow on CPUs."""
    reduce: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type in which gradients travel to be summed; fp16 beside compute = "fp16" alone, whose loss scale it needs."""
    fp8: Literal["off", "rowwise", "tensorwise", "delayed"] = "off"
    """Linear layers multiply in FP8, beside compute = "bf16" alone: with a scale for each row and column, and gradients
    of weights in bf16, or with one for each matrix; "delayed": one from its magnitudes in passes before, which
    checkpoints hold (docs/algorithm.md). On GPUs from Ada and Hopper on by their kernels, elsewhere emulated, which is
    slower than bf16. Kept memory is the same, and so is traffic but for a few numbers a pass where it is delayed."""
    fp8_history: Annotated[int, AtLeast(1)] = 16
    """How many passes, one a step; fp8 = "delayed" alone. More: a spike holds the scale up longer; fewer: more is cut
    off."""
    tf32: bool = True
    """Let GPUs that have TF32 use it for fp32 products."""
    loss_scale: Annotated[float, Within(SMALLEST, LARGEST)] = 65536.0
    """Loss scale at the start, from 2^-24 to 2^24; fp16 alone."""
    growth_interval: Annotated[int, AtLeast(1)] = 2000
    """Steps without overflow after which the loss scale doubles; fp16 alone."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How many packs make a step."""

    global_batch: Annotated[int, AtLeast(1)] = 16
    """Packs of one step, over all ranks. The same packs on any cube."""
    packs_per_rank: Annotated[int | None, AtLeast(1)] = None
    """Packs a rank takes at once; accumulation follows. Default: all of its share."""
    balance: bool = True
    """Deal a step's packs to the ranks so that all have equal work; the step has the same packs without it."""
    packing_rule: Literal["none", "sequences", "betas"] = "none"
    """What is done about a pack holding several sequences. "sequences": global_batch counts sequences, and a step takes
    global_batch / packing factor packs; "betas": beta1 and beta2 to the power of the packing factor (for LAMB)."""
    multiple_of: Annotated[int, AtLeast(1)] = 8
    """Packs of a step are rounded to a multiple of this, by the rule "sequences"."""
    ramp_stages: Annotated[int, AtLeast(1)] = 1
    """Sizes through which the batch rises to all of its packs: with 6 from a sixth of them on, by sixths, for as many
    steps each. 1: it has all from the start."""
    ramp_steps: Annotated[int, AtLeast(0)] = 0
    """Steps before it has all, if there are several sizes."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long, and what is kept."""

    steps: Annotated[int, AtLeast(1)] = 300
    """Steps of the optimiser."""
    seed: Annotated[int, AtLeast(0)] = 0
    """Decides weights, packs, masks and dropout."""
    log_every: Annotated[int, AtLeast(1)] = 1
    """Steps between two points in TensorBoard."""
    evaluate_every: Annotated[int, AtLeast(0)] = 100
    """Steps between evaluations on the held-out documents; also at the end. 0: never."""
    evaluate_every_samples: Annotated[int, AtLeast(0)] = 0
    """Sequences between evaluations, instead of steps: evaluate_every must then be 0. 0: evaluate_every counts."""
    target_accuracy: Annotated[float, Share()] = 0.0
    """Masked-LM accuracy on the held-out documents at which the run stops and reports the time to it. 0: none."""
    patience: Annotated[int, AtLeast(0)] = 0
    """Evaluations without a lower held-out loss after which the run stops. 0: never."""
    checkpoint_every: Annotated[int, AtLeast(0)] = 100
    """Steps between checkpoints; also at the end. 0: never."""
    checkpoint_keep: Annotated[int, AtLeast(1)] = 3
    """Newest checkpoints that stay; older ones are deleted."""
    checkpoint_keep_every: Annotated[int, AtLeast(0)] = 0
    """Checkpoints of steps that divide by this stay for good. 0: none."""
    asynchronous: bool = True
    """Write checkpoints in the background while the training goes on."""
    hang_after: Annotated[float, Positive()] = 600.0
    """Seconds without progress after which the run ends and names the rank that the others wait for."""
    stop_within: Annotated[float, Positive()] = 25.0
    """Seconds from a signal to the end of the step after which the run saves and leaves: longer than two steps.
    torchrun kills after 30 seconds, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says more."""
    loss_spike: Annotated[float, AtLeast(0)] = 10.0
    """A loss so many usual deviations above the usual one is reported as a spike. 0: none is."""
    mllog: bool = False
    """Also write lines in the form of MLPerf's logs, ":::MLLOG {...}"."""
    peak_tflops: Annotated[float, AtLeast(0)] = 0.0
    """Peak of one device in the compute type, in 10^12 FLOP/s, for MFU. 0: as known of the device, or no MFU."""


# --- From a TOML table to frozen dataclasses, with every key and type checked -----------------------------------------

T = TypeVar("T")
_OLD_NAME, _NEW_NAME = "keep_gathered", "reshard_after_forward"
"""In recipes, checkpoints and command lines of before, and today's name of the opposite."""


def with_new_names(arguments: Sequence[str]) -> list[str]:
    """A command line whose options have the names of today."""
    new = {
        "--model.keep-gathered": "--model.no-reshard-after-forward",
        "--model.no-keep-gathered": "--model.reshard-after-forward",
        "--optimizer.no-shard-over-data": "--optimizer.shard-over-data=false",
    }
    return [new.get(argument.replace("_", "-"), argument) for argument in arguments]


def from_table(kind: type[T], table: Any, where: str = "") -> T:
    """A dataclass of type `kind`; what the table does not name has its default.

    Args:
        where: the key of the table in its file, for messages.

    Raises:
        ValueError: an unknown key or a value of the wrong type, named with its key; what `kind` itself refuses.
    """
    if not isinstance(table, dict):
        raise ValueError(f"{where} must be a table. Got {table!r}.")
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    values = {}
    for name, value in table.items():
        key = f"{where}.{name}" if where else name
        if name == _OLD_NAME and _NEW_NAME in known and _NEW_NAME not in table:
            values[_NEW_NAME] = not _checked(value, bool, key)
            continue
        if name not in known:
            raise ValueError(f"unknown key {key}. Known here: {', '.join(known)}.")
        wanted = hints[name]
        section = isinstance(wanted, type) and is_dataclass(wanted)
        values[name] = from_table(wanted, value, key) if section else _checked(value, wanted, key)
    return kind(**values)


def _checked(value: Any, wanted: Any, key: str) -> Any:
    """`value`, as float where a whole number stands for one. ValueError where it is not of the type `wanted`."""
    check_whole(value, key)
    choices = get_args(wanted) if get_origin(wanted) in (typing.Union, types.UnionType) else (wanted,)
    for choice in choices:
        if get_origin(choice) is Literal:
            if value in get_args(choice):
                return value
        elif get_origin(choice) is tuple:  # tuple[T, ...] is TOML's array
            if type(value) is list:
                return tuple(_checked(item, get_args(choice)[0], f"{key}[{i}]") for i, item in enumerate(value))
        elif choice is float and type(value) is int:
            return float(value)
        elif type(value) is choice:
            return value
    names = " or ".join(_name(c) for c in choices if c is not type(None))
    raise ValueError(f"{key} must be of type {names}. Got {value!r}.")


def _name(choice: Any) -> str:
    if get_origin(choice) is Literal:
        return str(get_args(choice))
    if get_origin(choice) is tuple:
        return f"array of {_name(get_args(choice)[0])}"
    name: str = choice.__name__
    return name


# --- A recipe ---------------------------------------------------------------------------------------------------------

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The whole recipe, resolved.

    Raises:
        ValueError: a number out of its range.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        check_bounds(self)
        _check_data(self.data, self.model)
        check_kept(self.model.keep_budget, self.model.reshard_after_forward)
        check_fp8(self.precision)
        check_reduce(self.precision)
        self.data.masking(self.run.steps)  # checks the shares
        check_schedule(self.optimizer)
        _check_ramp(self)
        _check_evaluations(self)
        self.model.config(self.data)  # checks the sizes
        _check_replaced(self)

    @property
    def replaced_tokens(self) -> ReplacedTokens | None:
        """Of the objective of that name; None: another one is learnt."""
        return self.model.replaced_tokens(self.data)

    @property
    def generator(self) -> BertConfig | None:
        """What fills masked places for the objective "replaced-tokens"; None: another one is learnt."""
        settings = self.replaced_tokens
        return None if settings is None else settings.generator(self.model.config(self.data))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


MOST_OF_PACK = {"max_sequences": DataConfig.max_sequences, "masked_per_pack": 0}
"""Keys of the section `data` that are at most the tokens of a pack, or this."""


def most_of_pack(name: str, capacity: int) -> int:
    """The largest value of one of these keys."""
    return max(capacity, MOST_OF_PACK[name])


def _check_data(data: DataConfig, model: ModelConfig) -> None:
    if data.max_length > data.capacity:
        raise ValueError(
            f"data.max_length={data.max_length} is longer than a pack of data.capacity={data.capacity}. "
            "Raise the capacity or lower max_length."
        )
    # Each has slots in every pack: of a number that no pack can hold they took all memory there was, without a word.
    for name in MOST_OF_PACK:
        count = getattr(data, name)
        if count is not None and count > most_of_pack(name, data.capacity):
            raise ValueError(
                f"data.{name}={count} is more than the data.capacity={data.capacity} tokens that a pack can hold. "
                f"Lower it to {most_of_pack(name, data.capacity)}, with which packs are the same, also of a run that "
                "goes on."
            )
    if model.positions is not None and model.positions < data.max_length:
        lack = "is less than" if model.config(data).has_rotary else "has no rows for"
        raise ValueError(
            f"model.positions={model.positions} {lack} sequences of data.max_length={data.max_length} tokens. Raise "
            "positions or lower max_length."
        )
    if data.shards % data.groups or (data.packing == "binned" and data.groups > 1):
        raise ValueError(
            f"data.groups={data.groups} must divide data.shards={data.shards}, and be 1 when binned. (On samples, set "
            "data.shards to theirs.)"
        )


def check_kept(keep_budget: int, reshard_after_forward: bool) -> None:
    """Raises ValueError for a budget where everything stays."""
    try:
        check_keep_budget(keep_budget, reshard_after_forward)
    except ValueError as problem:
        raise ValueError(f"model.{problem}") from None


def check_fp8(precision: PrecisionConfig) -> None:
    """Raises ValueError for FP8 beside another type than bf16, and for a history of scales that have none."""
    if precision.fp8 != "off" and precision.compute != "bf16":
        raise ValueError(
            f"precision.fp8 = {precision.fp8!r} needs precision.compute = 'bf16', the type of what its kernels return. "
            f"Got {precision.compute!r}."
        )
    if precision.fp8 != "delayed" and precision.fp8_history != PrecisionConfig.fp8_history:
        raise ValueError(
            f"precision.fp8_history = {precision.fp8_history} is of precision.fp8 = 'delayed' alone. Got fp8 = "
            f"{precision.fp8!r}. Set that, or leave fp8_history out."
        )


def check_reduce(precision: PrecisionConfig) -> None:
    """Raises ValueError for sums in fp16 without the loss scale that fp16 comes with."""
    if precision.reduce == "fp16" and precision.compute != "fp16":
        raise ValueError(
            "precision.reduce = 'fp16' needs precision.compute = 'fp16', and with it the loss scale: a gradient below "
            f"6e-8 is 0 in fp16, and one above 65,504 infinite. Got {precision.compute!r}. Take reduce = 'bf16'."
        )


def _check_replaced(recipe: TrainConfig) -> None:
    if recipe.replaced_tokens is None:
        return
    for name, reason in (
        ("read_rows_only", "a discriminator reads all rows"),
        ("cuda_graph", "what a generator draws is no part of a captured pass"),
    ):
        if getattr(recipe.speed, name):
            raise ValueError(
                f"speed.{name} and data.objective = 'replaced-tokens' exclude each other: {reason}. Set speed.{name} = "
                "false."
            )


def check_schedule(optimizer: OptimizerConfig) -> None:
    """Raises ValueError for a rise and a way down that are longer than the run."""
    if optimizer.schedule == "wsd" and optimizer.warmup + optimizer.decay > 1:
        raise ValueError(
            f"optimizer.warmup={optimizer.warmup} and optimizer.decay={optimizer.decay} are more than all steps "
            "together. Lower one."
        )


def _check_ramp(recipe: TrainConfig) -> None:
    batch = recipe.batch
    if (batch.ramp_stages > 1) != (batch.ramp_steps > 0):
        raise ValueError(
            f"batch.ramp_stages={batch.ramp_stages} and batch.ramp_steps={batch.ramp_steps} belong together: sizes of "
            "the batch, and steps until it has the last one. Give both, or neither."
        )
    if batch.ramp_stages > 1 and recipe.data.packing == "binned":
        raise ValueError(
            f"data.packing = 'binned' orders sequences for steps of one size, and batch.ramp_stages is "
            f"{batch.ramp_stages}. Take another packing, or no ramp."
        )


def _check_evaluations(recipe: TrainConfig) -> None:
    run = recipe.run
    if run.evaluate_every and run.evaluate_every_samples:
        raise ValueError(
            f"run.evaluate_every={run.evaluate_every} counts steps and run.evaluate_every_samples="
            f"{run.evaluate_every_samples} counts sequences. Set one of them to 0."
        )
    evaluates = (run.evaluate_every or run.evaluate_every_samples) and recipe.data.held_out > 0
    for name in ("target_accuracy", "patience"):
        if getattr(run, name) and not evaluates:
            raise ValueError(
                f"run.{name}={getattr(run, name)} needs evaluations. Set run.evaluate_every or "
                "run.evaluate_every_samples, and data.held_out, above 0."
            )


def read_config(path: Path) -> TrainConfig:
    """Reads a recipe of pre-training. See `read_recipe`."""
    return read_recipe(TrainConfig, path)


def read_recipe(kind: type[T], path: Path, *, shipped: str = "launch/recipes") -> T:
    """Reads a TOML recipe; what it does not name has its default.

    Args:
        shipped: folder of recipes of this kind, for messages.

    Raises:
        ValueError: a missing file, invalid TOML, an unknown key, a value of the wrong type or out of range; the message
            names the file and the key.
    """
    try:
        text = read_file(path)
    except FileNotFoundError:
        raise ValueError(f"recipe {path.absolute()} does not exist. Shipped ones lie in {shipped}.") from None
    try:
        table = tomllib.loads(text.decode("utf-8-sig"))  # editors of Windows begin with a byte order mark
    except RecursionError:
        raise ValueError(f"recipe {path} is not valid TOML: it is nested too deeply.") from None
    except ValueError as problem:  # TOMLDecodeError, UnicodeDecodeError, or Python's own for a number of 5,000 digits
        raise ValueError(f"recipe {path} is not valid TOML: {problem}.") from None
    try:
        return from_table(kind, table)
    except ValueError as problem:
        raise ValueError(f"recipe {path}: {problem}") from None
