"""The names of a BERT's tensors here and in Hugging Face's library, and the order of their rows; what other
architectures call them, architectures.py says.

    here                                     there
    bert.layers.0.attention.qkv.weight       bert.encoder.layer.0.attention.self.{query,key,value}.weight
    bert.layers.0.mlp.up.weight              bert.encoder.layer.0.intermediate.dense.weight
    bert.layers.0.mlp.gate_up.weight         bert.encoder.layer.0.intermediate.{gate,up}.weight, if a BERT had gates
    ...                                      ...

Rows of QKV are ordered (head, q/k/v, d) here, so that a cut over y takes whole heads, and (q/k/v, head, d) there; with
fewer heads of keys (head of keys, its heads of queries and k and v, d) here. Those of gates are (inner unit, gate/up)
here, and (gate/up, inner unit) there.

d head dimension
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from models.bert.config import BertConfig
from models.bert.cost_model.param_shapes import parameters
from models.bert.huggingface.architectures import ARCHITECTURES, Architecture

HEADS = ("pooler", "masked_lm", "next_sentence", "prediction_head", "classifier", "answers", "tags", "replaced_tokens")
"""What may stand on the encoder, `bert`: the first part of a parameter's name."""
LABELLED = ("classifier", "tags")
"""Those whose outputs have labels, of texts and of tokens. The library calls both `classifier`."""
TYPES = "bert.embeddings.types.weight"
TOKENS, EMBEDDING = "bert.embeddings.tokens.weight", "bert.embeddings.word_embeddings.weight"
DECODER_WEIGHT, DECODER_BIAS = "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"
MASKED_LM_BIAS = "cls.predictions.bias"

GENERATOR = "generator"
"""Of a run that learns replaced tokens: what stands before the names of its generator's own parameters, and where its
model.json has the generator's configuration."""

BUFFERS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")
"""Of older versions of the library; no weights."""

_FUSED = {
    "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "mlp.gate_up": ("intermediate.gate", "intermediate.up"),
}
_LAYER = re.compile(r"bert\.layers\.(\d+)\.(\w+(?:\.\w+)?)\.(weight|bias)")
_ANY_LAYER = re.compile(r"(?:bert\.)?(?:encoder\.layer|layers)\.(\d+)\.")
_PREFIXES = "|".join(re.escape(prefix) for prefix in {each.prefix for each in ARCHITECTURES.values()})
_ENCODER = re.compile(rf"(?:{_PREFIXES})(?!pooler\.)|embeddings\.|encoder\.|transformer\.|layers\.|final_norm\.")
_OF_LAYERS = {
    "attention.q_norm": "attention.self.q_norm",
    "attention.k_norm": "attention.self.k_norm",
    "attention.out": "attention.output.dense",
    "attention_out_norm": "attention.output.OutputNorm",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_norm": "output.LayerNorm",
    "mlp_out_norm": "output.OutputNorm",
}
_THEIR_LAYER = re.compile(r"bert\.encoder\.layer\.\d+\.(.+)\.(weight|bias)")
_FINAL_NORM = "bert.final_norm"
RELATIVE_BIAS = "bert.encoder.relative_attention_bias.weight"
"""MPNet's, as it would be called in a BERT."""
PROJECTION = "bert.embeddings_project"
"""ELECTRA's, as it would be called in a BERT."""
CONVOLUTION = "bert.encoder.conv.conv.weight"
"""DeBERTa's, as it would be called in a BERT: (N, H, k) there, and its last two dims are one here."""
_DISTANCES = "bert.encoder."
"""What stands before DeBERTa's table by distance and its norm."""
_OTHERS = {
    TOKENS: EMBEDDING,
    "bert.embeddings.positions.weight": "bert.embeddings.position_embeddings.weight",
    TYPES: "bert.embeddings.token_type_embeddings.weight",
    "bert.relative.table.weight": f"{_DISTANCES}rel_embeddings.weight",
    "bert.relative_bias.weight": RELATIVE_BIAS,
    "masked_lm.projection.weight": DECODER_WEIGHT,
    "masked_lm.projection.bias": MASKED_LM_BIAS,
} | {
    f"{ours}.{part}": f"{theirs}.{part}"
    for ours, theirs in (
        ("bert.embeddings.norm", "bert.embeddings.LayerNorm"),
        ("bert.embeddings.projection", PROJECTION),
        (_FINAL_NORM, _FINAL_NORM),
        ("bert.convolution.conv", CONVOLUTION.removesuffix(".weight")),
        ("bert.convolution.norm", "bert.encoder.conv.LayerNorm"),
        ("bert.relative.norm", f"{_DISTANCES}LayerNorm"),
        ("prediction_head.dense", "prediction_head.dense"),
        ("prediction_head.norm", "prediction_head.norm"),
        ("pooler.dense", "bert.pooler.dense"),
        ("masked_lm.dense", "cls.predictions.transform.dense"),
        ("masked_lm.norm", "cls.predictions.transform.LayerNorm"),
        ("next_sentence", "cls.seq_relationship"),
        ("classifier", "classifier"),
        ("answers", "qa_outputs"),
        ("tags", "classifier"),
        ("replaced_tokens.norm", "replaced_tokens.norm"),
        ("replaced_tokens.dense", "replaced_tokens.dense"),
        ("replaced_tokens.output", "replaced_tokens.output"),
    )
    for part in ("weight", "bias")
}
# One tensor of each head: where it is, the head is.
_MARKS = {
    "pooler": "bert.pooler.dense.weight",
    "masked_lm": "cls.predictions.transform.dense.weight",
    "next_sentence": "cls.seq_relationship.weight",
    "prediction_head": "prediction_head.dense.weight",
    "classifier": "classifier.weight",
    "answers": "qa_outputs.weight",
    "tags": "classifier.weight",
    "replaced_tokens": "replaced_tokens.output.weight",
}


BEFORE_CLASSIFIER = (_MARKS["pooler"], _MARKS["prediction_head"])
"""One of them stands before a classifier of texts."""


def library_names(name: str) -> tuple[str, ...]:
    """The library's tensors of a parameter: one, or query, key and value, or gate and up.

    Raises:
        ValueError: the library's BERT has no such tensor.
    """
    if name in _OTHERS:
        return (_OTHERS[name],)
    if match := _LAYER.fullmatch(name):
        layer, part, kind = match.groups()
        if part in _FUSED:
            return tuple(f"bert.encoder.layer.{layer}.{each}.{kind}" for each in _FUSED[part])
        if part in _OF_LAYERS:
            return (f"bert.encoder.layer.{layer}.{_OF_LAYERS[part]}.{kind}",)
    head = part_of(name)
    if head is not None:
        told = ", ".join(each for each in _OTHERS if part_of(each) == head)
        raise ValueError(
            f"{name} has no counterpart in Hugging Face's BERT, whose {head} is {told or 'unknown'}. Give the module "
            "another name if it is not that."
        )
    raise ValueError(
        f"{name} has no counterpart in Hugging Face's BERT, whose encoder is the classic one with norms after its "
        'blocks. Use encoder="classic" and norm="post".'
    )


def is_known(name: str, config: BertConfig) -> bool:
    """Whether the library has, or had, a tensor of this name in the encoder of such a model."""
    if name.startswith(PROJECTION):
        return config.has_projection
    if name == RELATIVE_BIAS:
        return config.traits.relative_bias
    if config.encoder == "modern" and name.endswith(".bias"):
        return False
    if name.startswith(f"{_FINAL_NORM}."):
        return config.pre_norm
    if name.startswith("bert.embeddings.LayerNorm."):
        return config.traits.embedding_norm
    if name.startswith((f"{_DISTANCES}rel_embeddings.", f"{_DISTANCES}LayerNorm.")):
        return config.distance_buckets is not None
    if name.startswith("bert.encoder.conv."):
        return config.conv_kernel is not None
    if match := _THEIR_LAYER.fullmatch(name):
        biases = _in_layers(config)
        return match[1] in biases and (match[2] == "weight" or biases[match[1]])
    return name in _OTHERS.values() or name in BUFFERS


def _in_layers(config: BertConfig) -> dict[str, bool]:
    """The library's modules of a layer, and whether each has a bias."""
    up = ("mlp.gate_up",) if config.has_gate else ("mlp.up",)
    products = zip(("attention.qkv", "attention.out", *up, "mlp.down"), config.layer_biases, strict=True)
    of_heads = ("attention.q_norm", "attention.k_norm") if config.traits.qk_norm else ()
    of_outputs = ("attention_out_norm", "mlp_out_norm") if config.traits.out_norms else ()
    norms = dict.fromkeys(("attention_norm", "mlp_norm", *of_heads, *of_outputs), config.norm_bias)
    own = {**dict(products), **norms}
    return {theirs: bias for part, bias in own.items() for theirs in _FUSED.get(part, (_OF_LAYERS.get(part, ""),))}


def part_of(name: str) -> str | None:
    """What stands on the encoder that a parameter of a model with `bert` inside belongs to: one of `HEADS`, or a module
    of that model's own; None: the encoder itself."""
    first = name.partition(".")[0]
    return None if first == "bert" else first


def parts_of(model: nn.Module, config: BertConfig) -> set[str]:
    """What stands on the encoder of a model with `bert` inside: also a masked-LM head without a weight of its own."""
    parts = {part for name, _ in model.named_parameters() if (part := part_of(name)) is not None}
    return parts | ({"masked_lm"} if config.masked_lm_is_embedding and hasattr(model, "masked_lm") else set())


def in_generator(name: str, config: BertConfig) -> str:
    """What a checkpoint of such a run calls a parameter of the generator, which has here the name as of a masked
    language model of its own: embeddings are the discriminator's, but for their projection, or its own."""
    if config.traits.disentangles_embeddings:
        return f"{GENERATOR}.{name}"
    if name.startswith(("bert.embeddings.projection.", "bert.layers.")):
        return f"{GENERATOR}.{name.removeprefix('bert.').removeprefix('embeddings.')}"
    return f"{GENERATOR}.{name}" if name.startswith("masked_lm.") else name


def layers_among(names: Iterable[str]) -> int:
    """Layers of which a file has tensors, under the names of the library or those here."""
    numbers = (match.group(1) for name in names if (match := _ANY_LAYER.match(name)) is not None)
    return max((int(number) + 1 for number in numbers), default=0)


def of_encoder(name: str) -> bool:
    """Whether a tensor is the encoder's, under any name that it has in the folders of `open_weights`."""
    return _ENCODER.match(name) is not None


def heads_among(
    names: Collection[str], architecture: Architecture, config: BertConfig, said: Collection[str]
) -> tuple[str, ...]:
    """Those of which a file with these tensors, under the library's names, has the weights.

    Args:
        said: the library's classes that the model was saved from: they alone say whether it has a masked-LM head that
            is the embedding. An encoder that sees no later tokens has none: its decoder tells the next token.
    """
    marks = {**_MARKS, "masked_lm": DECODER_WEIGHT} if architecture.decoder_alone else _MARKS
    if config.masked_lm_is_embedding and architecture.class_of(("masked_lm",)) in said:
        marks = {**marks, "masked_lm": EMBEDDING}
    found = (head for head in HEADS if marks[head] in names)
    return tuple(head for head in found if head != "masked_lm" or not config.causal)


def canonical(name: str, architecture: Architecture, *, is_bare: bool) -> str:
    """BERT's name of today for one found in a file: LayerNorm's gamma and beta are of 2018's code.

    Args:
        is_bare: whether the file has no prefix before "embeddings.".
    """
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(f"LayerNorm{old}"):
            name = name.removesuffix(old) + new
    return architecture.bert_name(architecture.with_prefix(name) if is_bare else name)


def prefix_among(names: Iterable[str]) -> str | None:
    """What stands before the names of the encoder's tensors in a file. None: it has no embedding of tokens."""
    own = (each.own_name(EMBEDDING).removeprefix(each.prefix) for each in ARCHITECTURES.values())
    marks = tuple(dict.fromkeys(own))
    return next((name.removesuffix(mark) for name in names for mark in marks if name.endswith(mark)), None)


def encoder_shapes(config: BertConfig, layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the encoder's tensors that a configuration asks for, by the names here: to be compared with the files
    before a model of those sizes is made.

    Args:
        layers: of which the files have tensors; a configuration may name any number.
    """
    found = parameters(replace(config, layers=max(1, layers)))
    return {each.name: each.shape for each in found if each.name.startswith("bert.")}


# --- The order of rows of what is one product here: some rows of each part in turn ------------------------------------


def widths(parts: int, config: BertConfig) -> tuple[int, ...]:
    """Rows of each part in a turn: of QKV those of the heads of queries that share one of keys, of this one and of its
    values; of gate and up one."""
    if parts != len(_FUSED["attention.qkv"]):
        return (1,) * parts
    d = config.head_size
    return config.heads // config.key_heads * d, d, d


def part_sizes(rows: int, parts: int, config: BertConfig) -> tuple[int, ...]:
    """Rows of each of the library's tensors of a parameter with so many rows."""
    of_turn = widths(parts, config)
    return tuple(rows // sum(of_turn) * each for each in of_turn) if parts > 1 else (rows,)


def rows_of_part(rows: slice, of_turn: tuple[int, ...], part: int) -> tuple[slice, Tensor]:
    """Of rows as they are here, those of one part: of QKV those of q (part 0), k (1) or v (2).

    Args:
        of_turn: as of `widths`.

    Returns:
        Which rows of the library's tensor they are, and their numbers within `rows`; both ascend.
    """
    own, turn, first = torch.arange(rows.start, rows.stop), sum(of_turn), sum(of_turn[:part])
    within = own % turn - first
    places = torch.nonzero((within >= 0) & (within < of_turn[part])).squeeze(1)
    if not len(places):
        return slice(0, 0), places
    there = own[places] // turn * of_turn[part] + within[places]
    return slice(int(there[0]), int(there[-1]) + 1), places


def parted(whole: Tensor, parts: int, config: BertConfig) -> tuple[Tensor, ...]:
    """Rows as the library has them: query, key and value, or gate and up, or the whole."""
    if parts == 1:
        return (whole,)
    of_turn = widths(parts, config)
    return tuple(part.flatten(0, 1) for part in whole.unflatten(0, (-1, sum(of_turn))).split(of_turn, 1))
