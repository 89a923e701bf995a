"""The architectures of Hugging Face's library whose encoder is BERT's: what each calls the same tensors and settings.

Inside this package tensors have the names of the library's BERT (param_names.py) and settings those of its config.json;
an `Architecture` turns them into those of a folder of its own and back.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

_LAYER = re.compile(r"bert\.encoder\.layer\.(\d+)\.(.+)\.(weight|bias)")

TASKS = "bert.embeddings.task_type_embeddings.weight"
"""ERNIE's table, of which the library adds the first row to all tokens where `use_task_id` says so, as it would be
called in a BERT."""
DIFFERENCE = "bert.embeddings.word_embeddings._weight"
"""In DeBERTa's published files, as it would be called in a BERT."""
CLASSES = {
    frozenset({"pooler", "masked_lm", "next_sentence"}): "ForPreTraining",
    frozenset({"replaced_tokens"}): "ForPreTraining",
    frozenset({"masked_lm"}): "ForMaskedLM",
    frozenset({"pooler", "next_sentence"}): "ForNextSentencePrediction",
    frozenset({"pooler", "classifier"}): "ForSequenceClassification",
    frozenset({"classifier"}): "ForSequenceClassification",
    frozenset({"answers"}): "ForQuestionAnswering",
    frozenset({"tags"}): "ForTokenClassification",
    frozenset({"prediction_head", "classifier"}): "ForSequenceClassification",
    frozenset({"prediction_head", "answers"}): "ForQuestionAnswering",
    frozenset({"prediction_head", "tags"}): "ForTokenClassification",
    frozenset({"pooler"}): "Model",
    frozenset[str](): "Model",
}
"""By the heads that a class of the library has, what its name ends with."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture:
    """One of them. Where a table is empty, names are BERT's."""

    name: str
    """`model_type` of a config.json."""
    title: str
    """What people call it."""
    classes: str
    """What the names of the library's classes begin with."""
    prefix: str
    """What stands before the names of the encoder's tensors, where a head is in the file too."""
    bare: tuple[str, ...] = ()
    """What the names of more of its tensors begin with in a file of the encoder alone."""
    stack: str = "encoder.layer"
    """What stands before a layer's number."""
    in_layers: Mapping[str, str] = field(default_factory=dict)
    """Modules of a layer: BERT's names and these."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Tensors outside of layers."""
    of_texts: Mapping[str, str] = field(default_factory=dict)
    """Tensors of the head that classifies texts; where it is, a pooler beside it is not read."""
    again: Mapping[str, str] = field(default_factory=dict)
    """Names that some of its files have for tensors of BERT, beside those that are written: these and BERT's."""
    published: tuple[tuple[str, str], ...] = ()
    """Regular expressions and what they become: of names in files that its authors published before the library had it,
    one after another, into the library's. Those of a BERT, and of one architecture, they leave alone."""
    also: tuple[str, ...] = ()
    """Other `model_type`s of such files."""
    tasks: str | None = None
    """A setting that says whether the first row of `TASKS` is added to all tokens. It is added to their types here."""
    left_over: frozenset[str] = frozenset()
    """Tensors of such files, by BERT's names, of which the encoder needs none: they are told as not used."""
    rotary: bool = False
    """BERT's layers, with rotary positions instead of a table of them."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Its modules of a layer whose rows are those of several of BERT's, one after another."""
    second_bias: bool = False
    """A decoder of its own (`tie_word_embeddings = false`) has a bias beside that of the masked-LM head, and that one
    counts."""
    prediction_head: str | None = None
    """Its module before the decoder of the vocabulary, and before classifiers, which are all called `classifier`."""
    decoder_alone: bool = False
    """Its masked-LM head is the decoder of the vocabulary and nothing else."""
    settings: Mapping[str, str | None] = field(default_factory=dict)
    """Of config.json. None: it has no such setting, and the library looks at none. `embedding_size` is there where it
    has that one, and `answers_dropout`, which no BERT has, where the head that finds answers drops out what it
    reads."""
    aliases: tuple[str, ...] = ()
    """Of `settings`: BERT's names that the library takes for its own, too."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of settings, where BERT's are others: by BERT's names."""
    fixed: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Settings that change what the model computes: the value that they have here, and what another one means."""
    endings: Mapping[frozenset[str], str] = field(default_factory=dict)
    """Where the name of the class of some heads ends with something else than `CLASSES` says."""
    own_classes: Mapping[frozenset[str], str] = field(default_factory=dict)
    """Heads that no class of the library has, and the class for a file that holds them beside its own tensors."""
    heads: frozenset[frozenset[str]]
    """Which ones its classes have together."""

    @property
    def scores(self) -> bool:
        """Whether its classifiers of texts are a linear of a hidden state, which is not dropped out, and nothing
        else."""
        return frozenset({"classifier"}) in self.heads

    def class_of(self, heads: Collection[str]) -> str:
        """The library's class with these heads together."""
        found = frozenset(heads)
        return f"{self.classes}{self.own_classes.get(found) or self.endings.get(found) or CLASSES[found]}"

    def own_name(self, name: str, heads: Collection[str] = ()) -> str:
        """What it calls a tensor of BERT, in a model with these heads."""
        if "classifier" in heads and name in self.of_texts:
            return self.of_texts[name]
        if name in self.others:
            return self.others[name]
        if match := _LAYER.fullmatch(name):
            number, part, kind = match.groups()
            return f"{self.prefix}{self.stack}.{number}.{self.in_layers.get(part, part)}.{kind}"
        return self.prefix + name.removeprefix("bert.") if name.startswith("bert.") else name

    def bert_name(self, name: str) -> str:
        """The other way. A name that it does not have stays as it is."""
        if name in self._back:
            return self._back[name]
        if match := self._layer.fullmatch(name):
            number, part, kind = match.groups()
            return f"bert.encoder.layer.{number}.{self._parts.get(part, part)}.{kind}"
        return f"bert.{name.removeprefix(self.prefix)}" if name.startswith(self.prefix) else name

    def today(self, name: str) -> str:
        """The library's name for one of a file that may be older than its support."""
        for pattern, new in self.published:
            name = re.sub(pattern, new, name)
        return name

    def with_prefix(self, name: str) -> str:
        """The name in a file with heads of one in a file of the encoder alone."""
        of_encoder = ("embeddings.", "embeddings_project.", f"{self.stack}.", "pooler.", "final_norm.", "encoder.")
        return f"{self.prefix}{name}" if name.startswith((*of_encoder, *self.bare)) else name

    def held_in(self, name: str, *, masked_lm: bool, answers: bool) -> tuple[tuple[str, ...], bool]:
        """Names of BERT for what a tensor with such a name (of `bert_name`) holds, and whether each has its own part of
        the rows. All have all of a prediction head: classifiers begin with the one that stood before the decoder.

        Args:
            masked_lm: whether the decoder of the vocabulary is there.
            answers: whether `classifier` is the head that answers questions.
        """
        if (match := _LAYER.fullmatch(name)) and match[2] in self.fused:
            return tuple(f"bert.encoder.layer.{match[1]}.{each}.{match[3]}" for each in self.fused[match[2]]), True
        if self.prediction_head is None:
            return (name,), False
        if name.startswith("classifier.") and answers:
            return (name.replace("classifier", "qa_outputs"),), False
        if not name.startswith(f"{self.prediction_head}."):
            return (name,), False
        part = name.removeprefix(self.prediction_head)
        transform = f"cls.predictions.transform{part.replace('.norm', '.LayerNorm')}"
        return (f"prediction_head{part}", *([transform] if masked_lm else ())), False

    @cached_property
    def _back(self) -> dict[str, str]:
        back = {own: name for name, own in (*self.others.items(), *self.of_texts.items())}
        several = () if self.prediction_head is None else (f"{self.prediction_head}.", "classifier.")  # `held_in`
        return {own: name for own, name in back.items() if not own.startswith(several)} | dict(self.again)

    @cached_property
    def _parts(self) -> dict[str, str]:
        return {own: name for name, own in self.in_layers.items() if own not in self.fused}

    @cached_property
    def _layer(self) -> re.Pattern[str]:
        return re.compile(rf"{re.escape(f'{self.prefix}{self.stack}')}\.(\d+)\.(.+)\.(weight|bias)")


def _both(names: Mapping[str, str]) -> dict[str, str]:
    """Of modules their weight and their bias."""
    return {f"{name}.{part}": f"{own}.{part}" for name, own in names.items() for part in ("weight", "bias")}


def _sets(*heads: str) -> frozenset[frozenset[str]]:
    return frozenset(frozenset(each.split()) for each in heads)


_FINE_TUNED = ("pooler classifier", "answers", "tags")
_OF_TEXTS = _both({"bert.pooler.dense": "classifier.dense", "classifier": "classifier.out_proj"})
_FUSED = {
    "attn.Wqkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "mlp.Wi": ("intermediate.gate", "intermediate.up"),
}
_PROJECTIONS = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.o_proj",
}
_POST_ROTARY = {
    **_PROJECTIONS,
    "attention.output.LayerNorm": "post_attention_layernorm",
    "output.LayerNorm": "post_mlp_layernorm",
}
"""Of layers with rotary positions and BERT's norms."""
_GATED = {
    "intermediate.gate": "mlp.gate_proj",
    "intermediate.up": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
}
_OF_DECODERS = {
    "bert.embeddings.word_embeddings.weight": "model.embed_tokens.weight",
    "bert.final_norm.weight": "model.norm.weight",
    "cls.predictions.decoder.weight": "lm_head.weight",
}
"""Outside of the layers of what is called a decoder in the library."""
_SCORED = {f"classifier.{part}": f"score.{part}" for part in ("weight", "bias")}
_DECODER_LAYERS = {**_PROJECTIONS, **_GATED, "attention.output.LayerNorm": "input_layernorm"}
_NORMS_OF_HEADS = {
    "attention.self.q_norm": "self_attn.q_norm",
    "attention.self.k_norm": "self_attn.k_norm",
}
_DECODER: dict[str, Any] = {
    "prefix": "model.",
    "bare": ("embed_tokens.", "norm."),
    "stack": "layers",
    "others": _OF_DECODERS,
    "decoder_alone": True,
}
_DECODER_SETTINGS = {
    "layer_norm_eps": "rms_norm_eps",
    "hidden_dropout_prob": None,
    "attention_probs_dropout_prob": "attention_dropout",
    "type_vocab_size": None,
}
_DECODER_FIXED: dict[str, tuple[Any, str]] = {
    "attention_bias": (False, "the modern encoder has biases where logits come out alone"),
    "rope_scaling": (None, "rotary positions are not scaled here"),
}
_PUBLISHED = {"self_attn.Wqkv": _FUSED["attn.Wqkv"]}
"""Fused in files that came before the library's support, and never written."""
_NAMES_OF_AUTHORS = (
    (r"\bencoder\.layers\.", "layers."),
    (r"\bemb_ln\.", "embeddings.LayerNorm."),
    (r"(layers\.\d+)\.norm1\.", r"\1.post_attention_layernorm."),
    (r"(layers\.\d+)\.norm2\.", r"\1.post_mlp_layernorm."),
)
"""Of Jina's and NomicBERT's, whose code has one root."""
_OF_CLASSES = ("pooler classifier", "tags", "masked_lm", "")
_SEES_ALL: dict[str, tuple[Any, str]] = {
    "is_decoder": (False, "a decoder sees no later tokens"),
    "add_cross_attention": (False, "there is no second input to attend to"),
}
_ROBERTA: dict[str, Any] = {
    "prefix": "roberta.",
    "others": {
        **_both(
            {
                "cls.predictions.transform.dense": "lm_head.dense",
                "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
                "cls.predictions.decoder": "lm_head.decoder",
            }
        ),
        "cls.predictions.bias": "lm_head.bias",
    },
    "of_texts": _OF_TEXTS,
    "second_bias": True,
    "defaults": {"pad_token_id": 1},
    "heads": _sets(*_FINE_TUNED, "masked_lm", "pooler", ""),
}

_BERT: dict[str, Any] = {
    "second_bias": True,
    "heads": _sets(*_FINE_TUNED, "pooler masked_lm next_sentence", "masked_lm", "pooler next_sentence", "pooler", ""),
}
BERT = Architecture(name="bert", title="BERT", classes="Bert", prefix="bert.", **_BERT)
ARCHITECTURES = {
    each.name: each
    for each in (
        BERT,
        Architecture(name="roberta", title="RoBERTa", classes="Roberta", **_ROBERTA),
        Architecture(name="xlm-roberta", title="XLM-RoBERTa", classes="XLMRoberta", **_ROBERTA),
        Architecture(name="camembert", title="CamemBERT", classes="Camembert", **_ROBERTA),
        Architecture(
            name="xlm-roberta-xl",
            title="XLM-RoBERTa-XL",
            classes="XLMRobertaXL",
            in_layers={
                "attention.output.LayerNorm": "attention.self_attn_layer_norm",
                "output.LayerNorm": "LayerNorm",
            },
            **_ROBERTA | {"others": _ROBERTA["others"] | _both({"bert.final_norm": "roberta.encoder.LayerNorm"})},
        ),
        Architecture(
            name="roberta-prelayernorm",
            title="RoBERTa-PreLayerNorm",
            classes="RobertaPreLayerNorm",
            bare=("LayerNorm.",),
            in_layers={
                "attention.output.LayerNorm": "attention.LayerNorm",
                "output.LayerNorm": "intermediate.LayerNorm",
            },
            **_ROBERTA
            | {
                "prefix": "roberta_prelayernorm.",
                "others": _ROBERTA["others"] | _both({"bert.final_norm": "roberta_prelayernorm.LayerNorm"}),
            },
        ),
        Architecture(
            name="data2vec-text",
            title="data2vec",
            classes="Data2VecText",
            **_ROBERTA | {"prefix": "data2vec_text."},
        ),
        Architecture(
            name="megatron-bert",
            title="Megatron-BERT",
            classes="MegatronBert",
            prefix="bert.",
            in_layers={"attention.output.LayerNorm": "attention.ln", "output.LayerNorm": "ln"},
            others=_both({"bert.final_norm": "bert.encoder.ln"}),
            settings={"classifier_dropout": None},
            **_BERT,
        ),
        Architecture(
            name="ernie",
            title="ERNIE",
            classes="Ernie",
            prefix="ernie.",
            tasks="use_task_id",
            **_BERT,
        ),
        Architecture(
            name="mpnet",
            title="MPNet",
            classes="MPNet",
            in_layers={
                "attention.self.query": "attention.attn.q",
                "attention.self.key": "attention.attn.k",
                "attention.self.value": "attention.attn.v",
                "attention.output.dense": "attention.attn.o",
                "attention.output.LayerNorm": "attention.LayerNorm",
            },
            settings={"type_vocab_size": None, "classifier_dropout": None},
            fixed={
                "pad_token_id": (1, "the library numbers positions behind the id 1, whatever is said"),
                "relative_attention_num_buckets": (32, "the library takes 32, whatever is said"),
            },
            **_ROBERTA | {"prefix": "mpnet."},
        ),
        Architecture(
            name="distilbert",
            title="DistilBERT",
            classes="DistilBert",
            prefix="distilbert.",
            stack="transformer.layer",
            in_layers={
                "attention.self.query": "attention.q_lin",
                "attention.self.key": "attention.k_lin",
                "attention.self.value": "attention.v_lin",
                "attention.output.dense": "attention.out_lin",
                "attention.output.LayerNorm": "sa_layer_norm",
                "intermediate.dense": "ffn.lin1",
                "output.dense": "ffn.lin2",
                "output.LayerNorm": "output_layer_norm",
            },
            others={
                **_both(
                    {
                        "bert.pooler.dense": "pre_classifier",
                        "cls.predictions.transform.dense": "vocab_transform",
                        "cls.predictions.transform.LayerNorm": "vocab_layer_norm",
                    }
                ),
                "cls.predictions.decoder.weight": "vocab_projector.weight",
                "cls.predictions.bias": "vocab_projector.bias",
            },
            settings={
                "hidden_size": "dim",
                "num_hidden_layers": "n_layers",
                "num_attention_heads": "n_heads",
                "intermediate_size": "hidden_dim",
                "hidden_dropout_prob": "dropout",
                "attention_probs_dropout_prob": "attention_dropout",
                "hidden_act": "activation",
                "classifier_dropout": "seq_classif_dropout",
                "answers_dropout": "qa_dropout",
                "type_vocab_size": None,
                "layer_norm_eps": None,
            },
            aliases=("hidden_size", "num_hidden_layers", "num_attention_heads"),
            defaults={"classifier_dropout": 0.2, "answers_dropout": 0.1},
            heads=_sets(*_FINE_TUNED, "masked_lm", ""),
        ),
        Architecture(
            name="electra",
            title="ELECTRA",
            classes="Electra",
            prefix="electra.",
            others={
                **_both(
                    {
                        "cls.predictions.transform.dense": "generator_predictions.dense",
                        "cls.predictions.transform.LayerNorm": "generator_predictions.LayerNorm",
                        "replaced_tokens.dense": "discriminator_predictions.dense",
                        "replaced_tokens.output": "discriminator_predictions.dense_prediction",
                    }
                ),
                "cls.predictions.decoder.weight": "generator_lm_head.weight",
                "cls.predictions.bias": "generator_lm_head.bias",
            },
            of_texts=_OF_TEXTS,
            settings={"embedding_size": "embedding_size"},
            heads=_sets(*_FINE_TUNED, "replaced_tokens", "masked_lm", ""),
        ),
        Architecture(
            name="modernbert",
            title="ModernBERT",
            classes="ModernBert",
            prefix="model.",
            stack="layers",
            in_layers={
                **dict.fromkeys(_FUSED["attn.Wqkv"], "attn.Wqkv"),
                **dict.fromkeys(_FUSED["mlp.Wi"], "mlp.Wi"),
                "attention.output.dense": "attn.Wo",
                "attention.output.LayerNorm": "attn_norm",
                "output.dense": "mlp.Wo",
                "output.LayerNorm": "mlp_norm",
            },
            fused=_FUSED,
            prediction_head="head",
            others={
                "bert.embeddings.word_embeddings.weight": "model.embeddings.tok_embeddings.weight",
                "bert.embeddings.LayerNorm.weight": "model.embeddings.norm.weight",
                "cls.predictions.transform.dense.weight": "head.dense.weight",
                "cls.predictions.transform.LayerNorm.weight": "head.norm.weight",
                "prediction_head.dense.weight": "head.dense.weight",
                "prediction_head.norm.weight": "head.norm.weight",
                "cls.predictions.decoder.weight": "decoder.weight",
                "cls.predictions.bias": "decoder.bias",
                "qa_outputs.weight": "classifier.weight",
                "qa_outputs.bias": "classifier.bias",
            },
            settings={
                "hidden_act": "hidden_activation",
                "layer_norm_eps": "norm_eps",
                "hidden_dropout_prob": None,
                "attention_probs_dropout_prob": "attention_dropout",
                "answers_dropout": "classifier_dropout",
                "type_vocab_size": None,
            },
            defaults={"layer_norm_eps": 1e-5, "classifier_dropout": 0.0, "answers_dropout": 0.0},
            fixed={
                **dict.fromkeys(
                    ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"),
                    (False, "the modern encoder has biases where logits come out alone"),
                ),
                "decoder_bias": (True, "logits of the vocabulary have a bias here"),
                "hidden_activation": ("gelu", "the modern encoder's gate is GELU"),
                "classifier_activation": ("gelu", "the prediction head's is GELU here"),
                "embedding_dropout": (0, "dropout of the embeddings comes with that of the MLPs' outputs here"),
                "mlp_dropout": (0, "there is no dropout between an MLP's gate and its output projection here"),
                "rope_scaling": (None, "rotary positions are not scaled here"),
            },
            heads=_sets(*(f"prediction_head {each}" for each in ("classifier", "answers", "tags")), "masked_lm", ""),
        ),
        Architecture(
            name="eurobert",
            title="EuroBERT",
            classes="EuroBert",
            in_layers={**_DECODER_LAYERS, "output.LayerNorm": "post_attention_layernorm"},
            of_texts=_both({"bert.pooler.dense": "dense"}),
            settings=_DECODER_SETTINGS,
            defaults={"layer_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu"},
            fixed={
                **_DECODER_FIXED,
                "mlp_bias": (False, "the modern encoder has biases where logits come out alone"),
                "is_decoder": (False, "a decoder sees no later tokens"),
                "is_causal": (False, "a decoder sees no later tokens"),
                "hidden_dropout": (0, "the library drops attention's probabilities alone"),
                "sliding_window": (None, "all layers see whole sequences here"),
            },
            heads=_sets("pooler classifier", "tags", "masked_lm", ""),
            **_DECODER,
        ),
        Architecture(
            name="gemma3_text",
            title="EmbeddingGemma",
            classes="Gemma3",
            in_layers={
                **_DECODER_LAYERS,
                **_NORMS_OF_HEADS,
                "attention.output.OutputNorm": "post_attention_layernorm",
                "output.LayerNorm": "pre_feedforward_layernorm",
                "output.OutputNorm": "post_feedforward_layernorm",
            },
            settings={**_DECODER_SETTINGS, "hidden_act": "hidden_activation", "classifier_dropout": None},
            defaults={"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"},
            fixed={
                **_DECODER_FIXED,
                "attn_logit_softcapping": (None, "scores of attention have no cap here"),
                "final_logit_softcapping": (None, "logits have no cap here"),
            },
            endings={
                frozenset({"masked_lm"}): "ForCausalLM",
                frozenset({"classifier"}): "TextForSequenceClassification",
                frozenset(): "TextModel",
            },
            heads=_sets("classifier", "masked_lm", ""),
            **_DECODER | {"others": _OF_DECODERS | _SCORED},
        ),
        Architecture(
            name="qwen3",
            title="Qwen3",
            classes="Qwen3",
            in_layers={**_DECODER_LAYERS, **_NORMS_OF_HEADS, "output.LayerNorm": "post_attention_layernorm"},
            settings=_DECODER_SETTINGS,
            defaults={
                **{"layer_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False},
                "classifier_dropout": 0.1,
            },
            fixed={**_DECODER_FIXED, "use_sliding_window": (False, "all layers see whole sequences here")},
            endings={frozenset({"masked_lm"}): "ForCausalLM"},
            heads=_sets("classifier", "tags", "masked_lm", ""),
            **_DECODER | {"others": _OF_DECODERS | _SCORED},
        ),
        Architecture(
            name="deberta-v2",
            title="DeBERTa",
            classes="DebertaV2",
            prefix="deberta.",
            in_layers={
                "attention.self.query": "attention.self.query_proj",
                "attention.self.key": "attention.self.key_proj",
                "attention.self.value": "attention.self.value_proj",
            },
            others=_both(
                {
                    "bert.pooler.dense": "pooler.dense",
                    # As its authors' files of the third version have them.
                    "replaced_tokens.norm": "mask_predictions.LayerNorm",
                    "replaced_tokens.dense": "mask_predictions.dense",
                    "replaced_tokens.output": "mask_predictions.classifier",
                }
            ),
            again={
                **{
                    f"mask_predictions.classifer.{kind}": f"replaced_tokens.output.{kind}"
                    for kind in ("weight", "bias")
                },
                "lm_predictions.lm_head.bias": "cls.predictions.bias",
                **{
                    f"lm_predictions.lm_head.{part}.{kind}": f"cls.predictions.transform.{part}.{kind}"
                    for part in ("dense", "LayerNorm")
                    for kind in ("weight", "bias")
                },
            },
            # What the embeddings differ by from those of the generator that learnt beside the model (He et al. 2021,
            # arXiv 2111.09543, §3.3); the others are the sums.
            left_over=frozenset({DIFFERENCE, "bert.embeddings.position_embeddings._weight"}),
            second_bias=True,
            settings={"classifier_dropout": "cls_dropout", "type_vocab_size": None},
            defaults={"layer_norm_eps": 1e-7, "classifier_dropout": None},
            fixed={
                "type_vocab_size": (0, "tokens have no types here"),
                "pooler_dropout": (0, "[CLS] is dropped out behind the pooler alone here"),
                "pooler_hidden_act": ("gelu", "the pooler's is GELU here"),
            },
            own_classes={
                frozenset({"replaced_tokens"}): "Model",
                frozenset({"masked_lm", "replaced_tokens"}): "ForMaskedLM",
            },
            heads=_sets(*_FINE_TUNED, "masked_lm", "masked_lm replaced_tokens", "replaced_tokens", ""),
        ),
        Architecture(
            name="jina_embeddings_v3",
            title="Jina's third embedding model",
            classes="JinaEmbeddingsV3",
            stack="layers",
            in_layers={**_POST_ROTARY, "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2"},
            fused=_PUBLISHED,
            rotary=True,
            fixed={**_SEES_ALL, "position_embedding_type": ("rotary", "positions are rotary here")},
            published=(
                *_NAMES_OF_AUTHORS,
                (r"(layers\.\d+)\.mixer\.Wqkv\.", r"\1.self_attn.Wqkv."),
                (r"(layers\.\d+)\.mixer\.out_proj\.", r"\1.self_attn.o_proj."),
            ),
            **_ROBERTA | {"defaults": {"pad_token_id": 1, "layer_norm_eps": 1e-5}},
        ),
        Architecture(
            name="nomic_bert",
            title="NomicBERT",
            classes="NomicBert",
            prefix="nomic_bert.",
            stack="layers",
            in_layers={**_POST_ROTARY, **_GATED},
            fused=_PUBLISHED,
            others=_both({"cls.predictions.transform.LayerNorm": "cls.predictions.transform.layer_norm"}),
            second_bias=True,
            rotary=True,
            defaults={"hidden_act": "silu"},
            fixed={
                **_SEES_ALL,
                "prenorm": (False, "there are LayerNorms after its blocks"),
                "parallel_block": (False, "attention and MLP come one after the other here"),
                "use_rms_norm": (False, "there are LayerNorms here"),
                "causal": (False, "all tokens see one another here"),
                "qkv_proj_bias": (False, "its products have no biases here"),
                "mlp_fc1_bias": (False, "its products have no biases here"),
                "mlp_fc2_bias": (False, "its products have no biases here"),
                "rotary_emb_fraction": (1.0, "all columns of a head are turned here"),
                "rotary_emb_interleaved": (False, "rotary positions turn the first half with the second here"),
                "rotary_emb_scale_base": (None, "queries and keys are turned and not scaled here"),
                "rotary_scaling_factor": (None, "positions beyond max_trained_positions are turned as all are here"),
                "num_experts": (0, "MLPs have no experts here"),
                "position_embedding_type": ("rope", "positions are rotary here"),
            },
            published=(
                (r"^bert\.", "nomic_bert."),
                *_NAMES_OF_AUTHORS,
                (r"(layers\.\d+)\.attn\.Wqkv\.", r"\1.self_attn.Wqkv."),
                (r"(layers\.\d+)\.attn\.out_proj\.", r"\1.self_attn.o_proj."),
                (r"(layers\.\d+)\.mlp\.fc11\.", r"\1.mlp.up_proj."),
                (r"(layers\.\d+)\.mlp\.fc12\.", r"\1.mlp.gate_proj."),
                (r"(layers\.\d+)\.mlp\.fc2\.", r"\1.mlp.down_proj."),
            ),
            heads=_sets(*_OF_CLASSES),
        ),
        Architecture(
            name="gte",
            title="GTE",
            classes="Gte",
            prefix="gte.",
            stack="layers",
            in_layers={**_POST_ROTARY, **_GATED},
            fused={**_PUBLISHED, "mlp.up_gate_proj": ("intermediate.up", "intermediate.gate")},
            others={
                **_both(
                    {
                        "cls.predictions.transform.dense": "lm_head.dense",
                        "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
                    }
                ),
                "cls.predictions.decoder.weight": "lm_head.decoder.weight",
                "cls.predictions.bias": "lm_head.decoder.bias",
            },
            rotary=True,
            defaults={"pad_token_id": 1},
            fixed={
                **_SEES_ALL,
                "position_embedding_type": ("rope", "positions are rotary here"),
                "layer_norm_type": ("layer_norm", "there are LayerNorms here"),
                "logn_attention_scale": (False, "scores do not hang on how long a text is here"),
            },
            also=("new",),
            published=(
                (r"^new\.", "gte."),
                (r"\bencoder\.layer\.", "layers."),
                (r"(layers\.\d+)\.attention\.qkv_proj\.", r"\1.self_attn.Wqkv."),
                (r"(layers\.\d+)\.attention\.", r"\1.self_attn."),
                (r"(layers\.\d+)\.attn_ln\.", r"\1.post_attention_layernorm."),
                (r"(layers\.\d+)\.mlp_ln\.", r"\1.post_mlp_layernorm."),
                (r"\blm_head\.norm\.", "lm_head.layer_norm."),
            ),
            heads=_sets(*_OF_CLASSES),
        ),
    )
}
"""By `model_type`."""
_REASONS = {
    "albert": "its layers share one set of weights",
    "deberta": "it is the first version, whose layers have weights of their own for positions",
    "xlnet": "its attention has relative positions",
    "big_bird": "its attention is sparse",
    "longformer": "its attention is sparse",
}


def architecture_of(settings: Mapping[str, Any], where: Path) -> Architecture:
    """Whose a config.json is: by its `model_type`; files of 2019 have none, and there the classes of `architectures`
    say it, or nothing does and it is BERT.

    Args:
        where: the file, for messages.

    Raises:
        ValueError: an architecture that is not there, or a `model_type` and `architectures` of two of them.
    """
    kind, names = settings.get("model_type"), architectures_from(settings, where)
    known = ", ".join(f"{each.title} ({name})" for name, each in ARCHITECTURES.items())
    kind = next((name for name, each in ARCHITECTURES.items() if kind in each.also), kind)
    if kind == "xlm-roberta" and settings.get("position_embedding_type") == "rotary":
        return ARCHITECTURES["jina_embeddings_v3"]  # as its authors' own code calls it
    if kind is not None and (not isinstance(kind, str) or kind not in ARCHITECTURES):
        reason = _REASONS.get(str(kind))
        raise ValueError(
            f"{where} is of another model: model_type {kind!r}{f', and {reason}' if reason else ''}. The models that "
            f"can be read are {known}."
        )
    said = {_class_of(name) for name in names}
    if kind is None:
        if len(said) > 1 or None in said:
            raise ValueError(
                f"{where} is of another model: architectures {list(names)!r}. The models that can be read are {known}."
            )
        return said.pop() or BERT if said else BERT
    if others := [name for name in names if _class_of(name) not in (None, ARCHITECTURES[kind])]:
        raise ValueError(
            f"{where} says model_type {kind!r} and architectures {list(names)!r}, of which {others[0]} is another "
            "model's class. Correct the one that is wrong."
        )
    return ARCHITECTURES[kind]


def architectures_from(settings: Mapping[str, Any], where: Path) -> tuple[str, ...]:
    """The library's classes that the folder was saved from; none where it does not say."""
    names = settings.get("architectures")
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: architectures must be a list of names of classes. Got {names!r}.")
    return tuple(names)


def _class_of(name: str) -> Architecture | None:
    """Whose a class of the library is."""
    begun = (each for each in ARCHITECTURES.values() if name.startswith(each.classes))
    return max(begun, key=lambda each: len(each.classes), default=None)  # XLMRobertaXL... is no XLMRoberta
