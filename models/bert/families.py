"""BERT and its relatives: in what each differs, a row each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from tensor3d.ops.activations import Activation

Encoder = Literal["classic", "modern"]
Norm = Literal["post", "pre"]
Pooling = Literal["cls", "mean", "last", "score", "late"]
Family = Literal[
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "xlm-roberta-xl",
    "roberta-prelayernorm",
    "data2vec-text",
    "megatron-bert",
    "ernie",
    "mpnet",
    "distilbert",
    "electra",
    "modernbert",
    "eurobert",
    "gemma3_text",
    "qwen3",
    "deberta-v2",
    "jina_embeddings_v3",
    "nomic_bert",
    "gte",
]
"""As Hugging Face's library calls them (`model_type`)."""


@dataclass(frozen=True, kw_only=True)
class FamilyTraits:
    """What a family has in common. Defaults are BERT's, of the classic encoder."""

    encoders: tuple[Encoder, ...] = ("classic",)
    """Which it may have."""
    norms: tuple[Norm, ...] = ("post", "pre")
    """Where those of a classic encoder may stand."""
    types: int = 2
    """Token types where nothing else is said."""
    least_types: int = 1
    """0 with no `types`: there are none."""
    behind_padding: bool = False
    """Whether positions begin behind the id of padding, in a table with rows for that."""
    second_position: bool = False
    """Whether they begin at 2, whatever padding is."""
    rotary_base: float | None = None
    """Of a classic encoder with rotary positions and no table of them: the base where nothing else is said."""
    relative_bias: bool = False
    """Whether scores of attention have a bias by distance, one of each head for all layers (MPNet: Song et al. 2020,
    arXiv 2004.09297; T5's buckets)."""
    distances: bool = False
    """Whether scores hang on vectors by distance, and there is no table of positions (DeBERTa: He et al. 2021, arXiv
    2006.03654, §3.1)."""
    disentangles_embeddings: bool = False
    """Whether a generator beside the model, where it learns replaced tokens, has embeddings of its own, and the model's
    table of tokens is what it differs by from the generator's: gradient-disentangled sharing (DeBERTaV3: He et al.
    2021, arXiv 2111.09543, §3.3)."""
    gate: bool = False
    """Whether the MLP of a classic encoder has one."""
    activations: tuple[Activation, ...] | None = None
    """Of the gate. None: as of the encoder."""
    biases: bool = True
    """Whether the products of a classic layer have them."""
    embedding_norm: bool = True
    """Whether the embeddings end with a norm."""
    narrow_embeddings: bool = False
    """Whether they may be narrower than hidden states."""
    rms_norm: bool = False
    """Whether norms are RMSNorm."""
    zero_centered_norms: bool = False
    """Whether 1 and their weight is what they multiply by."""
    qk_norm: bool = False
    """Whether queries and keys of each head have norms, before they are turned."""
    out_norms: bool = False
    """Whether what attention and an MLP give has a norm, beside that of what they read."""
    scaled_embeddings: bool = False
    """Whether those of tokens are multiplied by the root of the hidden size (Vaswani et al. 2017, arXiv 1706.03762,
    §3.4)."""
    head_dims: bool = False
    """Whether the columns of a head need not be hidden / heads."""
    may_be_causal: bool = False
    """Whether there are models of it in which a token sees itself and what came before it alone."""
    windows: bool = True
    """Whether layers of the modern encoder may have a window."""
    global_every: int = 3
    """With a window, how many layers there are to one that has none, where nothing else is said."""
    last_is_global: bool = False
    """Whether of each so many layers the last one has none, and not the first."""
    drops_attention: bool = True
    """Whether what attention gives is dropped out."""
    drops_mlp: bool = True
    """Whether what an MLP gives is."""
    drops_gate: bool = False
    """Whether what a gate lets through is."""
    next_sentence: bool = False
    """Whether the library has a head for next sentences."""
    decoder_alone: bool = False
    """Whether the masked-LM head is a projection without anything before it, and without a bias."""
    ties: bool = True
    """Whether its weight may be the embedding of tokens."""
    head_activation: Activation | None = None
    """Inside the masked-LM head. None: as inside the MLP."""
    pooler: Literal["tanh", "relu", "gelu"] = "tanh"
    """The pooler's activation."""
    pooler_bias: bool | None = None
    """Whether it has a bias. None: as heads of the encoder have."""
    poolings: tuple[Pooling, ...] = ("cls",)
    """What classifiers of texts may look at."""
    prediction_head: bool = False
    """Whether heads of fine-tuning read dense, GELU and LayerNorm, those of tokens too, and no pooler."""
    drops_before_pooler: bool = False
    """Whether the head that classifies texts drops out [CLS] too, and not its pooled vector alone."""
    drops_before_answers: bool = False
    """Whether the head that finds answers drops out what it reads, as those of classes do."""


_ROBERTA = FamilyTraits(behind_padding=True, head_activation="gelu", drops_before_pooler=True)
_GATES: tuple[Activation, ...] = ("silu", "gelu")
# A decoder's layers of today, as of Llama 3.
_DECODER = FamilyTraits(
    encoders=("modern",),
    types=0,
    least_types=0,
    activations=_GATES,
    embedding_norm=False,
    rms_norm=True,
    windows=False,
    decoder_alone=True,
    poolings=("cls", "mean"),
)

FAMILIES: Mapping[str, FamilyTraits] = MappingProxyType(
    {
        "bert": FamilyTraits(encoders=("classic", "modern"), next_sentence=True),
        "roberta": _ROBERTA,
        "xlm-roberta": _ROBERTA,
        "camembert": _ROBERTA,
        "xlm-roberta-xl": replace(_ROBERTA, norms=("pre",), embedding_norm=False, drops_mlp=False),
        "roberta-prelayernorm": replace(_ROBERTA, norms=("pre",)),
        "data2vec-text": _ROBERTA,
        "megatron-bert": FamilyTraits(norms=("pre",), embedding_norm=False, next_sentence=True),
        "ernie": FamilyTraits(next_sentence=True),
        "mpnet": replace(_ROBERTA, second_position=True, relative_bias=True, types=0, least_types=0),
        "distilbert": FamilyTraits(
            types=0, least_types=0, drops_attention=False, pooler="relu", drops_before_answers=True
        ),
        "electra": FamilyTraits(
            narrow_embeddings=True, head_activation="gelu", pooler="gelu", drops_before_pooler=True
        ),
        "modernbert": FamilyTraits(
            encoders=("modern",),
            types=0,
            least_types=0,
            poolings=("cls", "mean"),
            prediction_head=True,
            drops_before_answers=True,
        ),
        "eurobert": replace(_DECODER, ties=False, pooler="gelu", pooler_bias=True, poolings=("cls", "mean", "late")),
        "gemma3_text": replace(
            _DECODER,
            activations=("gelu_tanh",),
            scaled_embeddings=True,
            zero_centered_norms=True,
            qk_norm=True,
            out_norms=True,
            head_dims=True,
            windows=True,
            global_every=6,
            last_is_global=True,
            poolings=("cls", "mean", "score"),
        ),
        "qwen3": replace(
            _DECODER, qk_norm=True, head_dims=True, may_be_causal=True, poolings=("cls", "mean", "last", "score")
        ),
        "deberta-v2": FamilyTraits(
            norms=("post",), types=0, least_types=0, distances=True, disentangles_embeddings=True, pooler="gelu"
        ),
        "jina_embeddings_v3": FamilyTraits(
            norms=("post",), rotary_base=20_000.0, types=1, head_activation="gelu", drops_before_pooler=True
        ),
        "nomic_bert": FamilyTraits(norms=("post",), rotary_base=1_000.0, gate=True, activations=_GATES, biases=False),
        "gte": FamilyTraits(
            norms=("post",),
            rotary_base=160_000.0,
            types=1,
            least_types=0,
            gate=True,
            activations=_GATES,
            drops_gate=True,
            head_activation="gelu",
        ),
    }
)
"""By name, of all of `Family`."""


def having(trait: str) -> Iterator[str]:
    """The families of which this is true."""
    return (name for name, traits in FAMILIES.items() if getattr(traits, trait))


def told(families: Iterable[str], between: str = " or ") -> str:
    """Their names for a message."""
    return between.join(f'"{each}"' for each in families)
