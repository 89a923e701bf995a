"""The sizes of a BERT and its encoder, and the presets of Devlin et al. 2018 and Turc et al. 2019."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from models.bert.families import FAMILIES, Encoder, Family, FamilyTraits, Norm, Pooling, having, told
from tensor3d import CubeShape
from tensor3d.attention.relative import LogBuckets
from tensor3d.layers.relative import check_rows
from tensor3d.ops.activations import Activation, check_activation_name

_MODERN_ONLY = ("kv_heads", "window", "global_every", "local_rotary_base", "attention_out_dropout")


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """One encoder. Sizes must also divide by the cube's axes; the layers check that.

    Raises:
        ValueError: a size below 1, heads that do not divide the hidden size, a probability outside of [0, 1), an option
            of the other encoder.
    """

    layers: int
    """Transformer layers."""
    hidden: int
    """Columns of a hidden state."""
    heads: int
    """Attention heads of a layer; divides hidden, unless head_dim is said."""
    head_dim: int | None = None
    """Of EmbeddingGemma and Qwen3: columns of a head. Default: hidden / heads."""
    causal: bool = False
    """Of Qwen3: a token sees itself and what came before it, as in the published models. It has no head of masked
    tokens then."""
    kv_heads: int | None = None
    """Of the modern encoder: heads of keys and values; divides heads (grouped-query attention, Ainslie et al. 2023,
    arXiv 2305.13245). Default: as many as heads."""
    inner: int | None = None
    """Columns inside the MLP. Default: 4 * hidden; of the modern encoder, whose MLP has three matrices instead of two,
    8/3 * hidden in whole 64s (Shazeer 2020, arXiv 2002.05202)."""
    embedding: int | None = None
    """Columns of the embeddings, projected to hidden: ELECTRA's. Default: hidden, and no projection."""
    vocab: int = 30522
    """Entries of the vocabulary."""
    positions: int = 512
    """The longest sequence: rows of the position table from `first_position` on. Rotary positions have no such table,
    and DeBERTa none either: it is the farthest distance there that has a bucket of its own."""
    position_buckets: int | None = None
    """Of DeBERTa: buckets of distances to each side, even (He et al. 2021, arXiv 2006.03654, §3.1). Default: 256, but
    at most half of positions."""
    conv_kernel: int | None = None
    """Of DeBERTa: tokens that a convolution beside the first layer looks at, odd and at least 3 (the two largest of the
    second version have one of 3). Default: there is no such convolution."""
    first_position: int = 0
    """Row of the position table for the first token of a sequence; those before it are not used. RoBERTa's is the id of
    padding and one more, MPNet's 2."""
    types: int = 2
    """Token types: first and second sentence. 1: every token has it, also of second sentences. MPNet, DistilBERT,
    ModernBERT, EuroBERT, EmbeddingGemma, Qwen3 and DeBERTa have 0; GTE may."""
    dropout: float = 0.1
    """Probability, of hidden states."""
    attention_dropout: float = 0.1
    """Probability, of attention weights."""
    attention_out_dropout: float | None = None
    """Of the modern encoder: probability, of what attention's output projection gives. Default: dropout."""
    activation: Activation = "gelu"
    """Inside the MLP and the masked-LM head. The modern encoder's is always "gelu", but EuroBERT's and Qwen3's, of the
    gate, which is "silu" or "gelu", as the gates of NomicBERT and GTE are, and EmbeddingGemma's, which is
    "gelu_tanh"."""
    norm: Norm = "post"
    """LayerNorm after each residual, as in BERT, or before each block. The modern encoder, XLM-RoBERTa-XL,
    RoBERTa-PreLayerNorm and Megatron-BERT are always "pre"."""
    eps: float = 1e-12
    """Added to LayerNorm's variances."""
    std: float = 0.02
    """Standard deviation of initial weights."""
    family: Family = "bert"
    """Whose heads stand on the encoder, and whose names it has in Hugging Face's library. "modernbert" has the modern
    one, "eurobert", "gemma3_text" (EmbeddingGemma) and "qwen3" too, with RMSNorm; "bert" may have either."""
    encoder: Encoder = "classic"
    """"classic": BERT's. "modern": rotary positions, GeGLU, LayerNorm before each block and no bias (model.py)."""
    window: int | None = None
    """Of the modern encoder: tokens of local layers see those less than this far away. Default: all layers see all."""
    global_every: int | None = None
    """Of the modern encoder with a window: layers 0, n, 2n, ... see whole sequences, of EmbeddingGemma n - 1, 2n - 1,
    ... Default: 3, of EmbeddingGemma 6."""
    rotary_base: float | None = None
    """Base of the rotary positions' wave lengths, of the modern encoder and of Jina's third embedding model, NomicBERT
    and GTE. Default: 10,000; of these three 20,000, 1,000 and 160,000."""
    rotary_factor: float = 1.0
    """Of the three: positions are divided by it, as for sequences that are longer than those learnt from."""
    next_sentence: bool = True
    """Pre-training has a pooler and a next-sentence head beside that of the masked tokens. Other models do not ask."""
    tied: bool = True
    """The masked-LM head's decoder is the embedding of tokens. Else it has a weight of its own, of the same shape, as
    EuroBERT's always has."""
    local_rotary_base: float | None = None
    """Of the modern encoder with a window: the same of local layers. Default: rotary_base."""
    pooling: Pooling = "cls"
    """What classifiers of texts look at, the state of [CLS] or the mean of all tokens'; of ModernBERT, EuroBERT,
    EmbeddingGemma and Qwen3. "last", of Qwen3: the state of the last token. "score", of EmbeddingGemma and Qwen3: that
    of the last one which is no padding, with a linear without a bias and nothing before it, as in the library. "late",
    of EuroBERT: the head looks at each token, and the mean of all is its answer."""
    pad_id: int | None = None
    """Of pooling "score": the id of padding, which some tokenizers have for the end of a text, too. Default: no token
    is passed over."""

    @property
    def traits(self) -> FamilyTraits:
        """Of its family."""
        return FAMILIES[self.family]

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "embedding", "vocab", "positions", "inner")
        for name in (*sizes, "window", "global_every", "position_buckets"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1. Got {value}.")
        self._check_family()
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"hidden must divide by heads={self.heads}. Got {self.hidden}.")
        for name in ("dropout", "attention_dropout", "attention_out_dropout"):
            probability = getattr(self, name)
            if probability is not None and not 0.0 <= probability < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1. Got {probability}.")
        for name in ("eps", "std"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite. Got {getattr(self, name)}.")
        check_activation_name(self.activation)
        if self.rotary_factor != 1.0 and self.traits.rotary_base is None:
            raise ValueError(
                f"rotary_factor belongs to family={told(having('rotary_base'))}. Got rotary_factor="
                f"{self.rotary_factor} with family={self.family!r}. Leave it out."
            )
        if not 0 < self.rotary_factor < math.inf:
            raise ValueError(f"rotary_factor must be above 0 and finite. Got {self.rotary_factor}.")
        if self.norm not in get_args(Norm):
            raise ValueError(f'norm must be "post" or "pre". Got {self.norm!r}.')
        if self.encoder not in get_args(Encoder):
            raise ValueError(f'encoder must be "classic" or "modern". Got {self.encoder!r}.')
        self._check_modern() if self.encoder == "modern" else self._check_classic()

    def _check_family(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}. Got {self.family!r}.")
        traits = self.traits
        if self.types and not traits.types:
            raise ValueError(f'family="{self.family}" has no token types. Got types={self.types}. Set types = 0.')
        if self.types < traits.least_types:
            without = told((name for name, each in FAMILIES.items() if not each.least_types), ", ")
            raise ValueError(f"types must be at least 1, but of the families {without}. Got {self.types}.")
        if self.pooling not in get_args(Pooling):
            raise ValueError(f"pooling must be one of {', '.join(get_args(Pooling))}. Got {self.pooling!r}.")
        if self.pooling not in traits.poolings:
            known = told((name for name, each in FAMILIES.items() if self.pooling in each.poolings), " and ")
            raise ValueError(
                f'pooling="{self.pooling}" belongs to family={known}. Got family={self.family!r}. Leave it out.'
            )
        if self.causal and not traits.may_be_causal:
            raise ValueError(
                f"causal belongs to family={told(having('may_be_causal'))}. Got causal=True with "
                f"family={self.family!r}. Leave it out."
            )
        if self.causal and self.pooling == "cls":
            raise ValueError(
                'causal=True needs pooling="last" or "mean", for the first token of a text sees no other. Got "cls".'
            )
        if self.pad_id is not None and (self.pooling != "score" or self.pad_id < 0):
            raise ValueError(
                f'pad_id must be at least 0, and belongs to pooling="score". Got pad_id={self.pad_id} with '
                f'pooling="{self.pooling}". Leave it out.'
            )
        lowest = int(traits.behind_padding)
        if self.first_position < lowest or (self.first_position and not lowest):
            raise ValueError(
                f"first_position must be {'at least 1, the id of padding and one more,' if lowest else 0} of "
                f"family={self.family!r}. Got {self.first_position}."
            )
        if traits.second_position and self.first_position != 2:
            raise ValueError(
                f'family="{self.family}" has first_position=2, for padding has the id 1 in each of them. Got '
                f"first_position={self.first_position}. Set first_position = 2."
            )
        for name, trait in (
            ("embedding", "narrow_embeddings"),
            ("head_dim", "head_dims"),
            ("position_buckets", "distances"),
            ("conv_kernel", "distances"),
        ):
            if getattr(self, name) is not None and not getattr(traits, trait):
                raise ValueError(
                    f"{name} belongs to family={told(having(trait))}. Got {name}={getattr(self, name)} with "
                    f"family={self.family!r}. Leave it out."
                )
        if self.conv_kernel is not None:
            self._check_convolution(self.conv_kernel)

    def _check_convolution(self, kernel: int) -> None:
        if kernel < 3 or kernel % 2 == 0:
            raise ValueError(f"conv_kernel must be odd and at least 3. Got {kernel}.")
        if self.layers < 2:
            raise ValueError(
                f"conv_kernel={kernel} needs at least 2 layers, for the convolution stands between the first and the "
                f"next. Got layers={self.layers}."
            )

    def _check_classic(self) -> None:
        _ = self.distance_buckets
        if "classic" not in self.traits.encoders:
            raise ValueError(
                f'family="{self.family}" has encoder="modern". Got encoder="classic". Set encoder = "modern".'
            )
        if self.norm not in self.traits.norms:
            where, remedy = ("before", 'Set norm = "pre"') if self.norm == "post" else ("after", "Leave it out")
            raise ValueError(
                f'family="{self.family}" has its norms {where} each block. Got norm={self.norm!r}. {remedy}.'
            )
        if self.has_rotary:
            self._check_rotary()
        elif self.rotary_base is not None:
            raise ValueError(
                f'rotary_base belongs to encoder="modern" and to family={told(having("rotary_base"))}. Got rotary_base='
                f"{self.rotary_base} with family={self.family!r}. Leave it out."
            )
        self._check_gate()
        for name in _MODERN_ONLY:
            if getattr(self, name) is not None:
                raise ValueError(
                    f'{name} belongs to encoder="modern". Got {name}={getattr(self, name)} with encoder="classic". '
                    "Leave it out, or choose the modern encoder."
                )

    def _check_modern(self) -> None:
        if "modern" not in self.traits.encoders:
            raise ValueError(
                f'family={self.family!r} has encoder="classic". Got encoder="modern". Leave one of them out.'
            )
        self._check_sharing()
        if self.traits.activations is not None:
            self._check_gate()
        elif self.activation != "gelu":
            raise ValueError(
                f'activation belongs to encoder="classic". Got {self.activation!r} with encoder="modern", whose gate '
                "is GELU. Leave it out."
            )
        if self.norm != "post":  # the default, which is to say that nothing was said
            raise ValueError(
                f'norm belongs to encoder="classic". Got norm={self.norm!r} with encoder="modern", which always has '
                "its norms before each block. Leave it out."
            )
        self._check_rotary()
        for name, what in (
            ("global_every", "says which layers have no window"),
            ("local_rotary_base", "is that of layers with a window"),
        ):
            if getattr(self, name) is not None and self.window is None:
                raise ValueError(
                    f"{name}={getattr(self, name)} {what}, but there is no window. Set window, or leave {name} out."
                )

        if self.kv_heads is not None and self.family == "modernbert":
            raise ValueError(
                f'family="modernbert" has as many heads of keys as of queries. Got kv_heads={self.kv_heads}. '
                "Leave it out."
            )
        if self.heads % self.key_heads:
            raise ValueError(f"kv_heads must divide heads={self.heads}. Got {self.kv_heads}.")

    def _check_rotary(self) -> None:
        if self.head_size % 2:
            raise ValueError(
                "rotary positions turn pairs, so hidden / heads must be even. Got "
                f"{self.hidden} / {self.heads} = {self.head_size}. Choose other heads."
                if self.head_dim is None
                else f"rotary positions turn pairs, so head_dim must be even. Got {self.head_dim}."
            )
        for name in ("rotary_base", "local_rotary_base"):
            base = getattr(self, name)
            if base is not None and not 0 < base < math.inf:
                raise ValueError(f"{name} must be above 0 and finite. Got {base}.")

    def _check_gate(self) -> None:
        known = self.traits.activations
        if known is not None and self.activation not in known:
            raise ValueError(
                f'family="{self.family}" has a gate of {" or ".join(known)}. Got activation={self.activation!r}.'
            )

    def _check_sharing(self) -> None:
        if self.tied and not self.traits.ties:
            raise ValueError(
                f'family="{self.family}" has a masked-LM head that is a decoder of its own and nothing else. Got '
                "tied=True. Set tied = false."
            )
        if self.window is not None and not self.traits.windows:
            raise ValueError(
                f'family="{self.family}" has no window: all layers see whole sequences. Got window={self.window}. '
                "Leave it out."
            )

    @property
    def key_heads(self) -> int:
        """Heads of keys, and of values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def qkv_size(self) -> int:
        """Columns of queries, keys and values together."""
        return (self.heads + 2 * self.key_heads) * self.head_size

    @property
    def mixed_size(self) -> int:
        """Columns of what attention's heads give together, which its output projection reads."""
        return self.heads * self.head_size

    @property
    def inner_size(self) -> int:
        if self.inner is not None:
            return self.inner
        return 4 * self.hidden if self.encoder == "classic" else -(-8 * self.hidden // (3 * 64)) * 64

    def has_type(self, number: int) -> bool:
        """Whether tokens may have this type. A model without types takes any, for it looks at none."""
        return self.types == 0 or number < self.types

    @property
    def out_dropout(self) -> float:
        """Of what attention's output projection gives."""
        if not self.traits.drops_attention:
            return 0.0
        return self.dropout if self.attention_out_dropout is None else self.attention_out_dropout

    @property
    def mlp_dropout(self) -> float:
        """Of what an MLP gives."""
        return self.dropout if self.traits.drops_mlp else 0.0

    @property
    def has_rotary(self) -> bool:
        """Whether attention turns queries and keys by their places, so that there is no table of positions."""
        return self.encoder == "modern" or self.traits.rotary_base is not None

    @property
    def has_gate(self) -> bool:
        """Whether the MLP is of three matrices, one of them a gate."""
        return self.encoder == "modern" or self.traits.gate

    @property
    def gate_dropout(self) -> float:
        """Of what an MLP's gate lets through, before its last product."""
        return self.dropout if self.traits.drops_gate else 0.0

    @property
    def distance_buckets(self) -> LogBuckets | None:
        """How DeBERTa's scores tell distances apart. None: of other families they have none."""
        if not self.traits.distances:
            return None
        span = min(256, self.positions // 4 * 2) if self.position_buckets is None else self.position_buckets
        try:
            return LogBuckets(span=span, farthest=self.positions)
        except ValueError as problem:
            raise ValueError(f"position_buckets={span} with positions={self.positions}: {problem}") from None

    @property
    def has_relative_positions(self) -> bool:
        """Whether attention's scores hang on distances."""
        return self.traits.relative_bias or self.distance_buckets is not None

    def has_attention_norm(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has a norm before or after its attention: not the first one of a modern
        encoder whose embeddings end with one."""
        return layer > 0 or self.encoder == "classic" or not self.traits.embedding_norm

    @property
    def embedding_size(self) -> int:
        return self.hidden if self.embedding is None else self.embedding

    @property
    def has_projection(self) -> bool:
        """Whether the embeddings are projected to hidden."""
        return self.embedding_size != self.hidden

    @property
    def product_beside_layers(self) -> int | None:
        """Columns that the one product of all tokens outside of layers reads, to give those of a hidden state: of
        ELECTRA's narrow embeddings, or of DeBERTa's convolution. None: there is no such product."""
        if self.conv_kernel is not None:
            return self.conv_kernel * self.hidden
        return self.embedding_size if self.has_projection else None

    @property
    def position_rows(self) -> int:
        """Rows of the position table; 0: there is none."""
        has_table = not self.has_rotary and self.distance_buckets is None
        return self.first_position + self.positions if has_table else 0

    @property
    def head_activation(self) -> Activation:
        """Inside the masked-LM head."""
        return self.traits.head_activation or self.activation

    @property
    def masked_lm_is_embedding(self) -> bool:
        """Whether the masked-LM head has no weight of its own at all."""
        return self.traits.decoder_alone and self.tied and not self.causal

    @property
    def before_classifier(self) -> str | None:
        """The head that a classifier of texts reads. None: it reads hidden states."""
        if self.pooling == "score":
            return None
        return "prediction_head" if self.traits.prediction_head else "pooler"

    @property
    def has_pooler_bias(self) -> bool:
        return self.head_bias if self.traits.pooler_bias is None else self.traits.pooler_bias

    @property
    def head_size(self) -> int:
        """Columns of a head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def layer_biases(self) -> tuple[bool, bool, bool, bool]:
        """Whether QKV, attention's output, the MLP's first product (with its gate) and its last one have a bias."""
        own = self.encoder == "classic" and self.traits.biases
        return own, own, own and not self.has_gate, own

    @property
    def norm_bias(self) -> bool:
        """Whether norms have one."""
        return self.encoder == "classic"

    @property
    def head_bias(self) -> bool:
        """Whether a head's linear before its last one has one. What gives logits always does."""
        return self.encoder == "classic"

    @property
    def pre_norm(self) -> bool:
        return self.encoder == "modern" or self.norm == "pre"

    def window_of(self, layer: int) -> int | None:
        """The attention window of a layer, counted from 0; None: it sees whole sequences."""
        place = layer + self.traits.last_is_global
        return None if place % self._every == 0 else self.window

    def rotary_base_of(self, layer: int) -> float:
        """The base of a layer's rotary positions, layers counted from 0."""
        default = 10_000.0 if self.traits.rotary_base is None else self.traits.rotary_base
        base = default if self.rotary_base is None else self.rotary_base
        return base if self.local_rotary_base is None or self.window_of(layer) is None else self.local_rotary_base

    @property
    def local_layers(self) -> int:
        """Layers whose attention has a window."""
        if self.window is None:
            return 0
        without = self.layers // self._every if self.traits.last_is_global else -(-self.layers // self._every)
        return self.layers - without

    @property
    def _every(self) -> int:
        return self.traits.global_every if self.global_every is None else self.global_every

    def check(self, shape: CubeShape) -> None:
        """Raises ValueError where the sizes do not divide on a cube: what the layers would say, before any process."""
        shape.check_block(heads=self.heads, hidden=self.hidden, inner=self.inner_size, kv_heads=self.kv_heads)
        if self.distance_buckets is not None:
            check_rows(self.distance_buckets, shape)
        for axis, size in (("y", shape.y), ("z", shape.z)):
            if self.embedding_size % size:
                raise ValueError(
                    f"embedding must divide by {axis}={size}. Got {self.embedding_size}. Choose another cube."
                )


def types_of(family: Family) -> int:
    """Token types of such a model, where nothing else is said."""
    return FAMILIES[family].types


def _preset(layers: int, hidden: int) -> BertConfig:
    return BertConfig(layers=layers, hidden=hidden, heads=hidden // 64)


PRESETS: dict[str, BertConfig] = {
    "tiny": _preset(2, 128),
    "mini": _preset(4, 256),
    "small": _preset(4, 512),
    "base": _preset(12, 768),
    "large": _preset(24, 1024),
}
