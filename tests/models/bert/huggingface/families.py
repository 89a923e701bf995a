"""Small models of BERT's relatives by chance, the texts that they read, and what they compute of these on a cube.

Nothing here needs the library: ranks import it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.bert import (
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    EncodedText,
    TextBatch,
    collate_texts,
)
from models.bert.huggingface import export_huggingface, open_weights
from models.bert.tasks import class_logits, span_logits, tag_logits
from tensor3d import Cube, gather
from tests.default_type import default_type
from tests.models.bert.huggingface.subject import gradient_errors, gradients, same, saved, values
from tests.models.toy import Shape
from tests.ranks import run_ranks
from tests.single_device_reference import error, ranks_of

FAMILIES = ("Roberta", "XLMRoberta", "Camembert", "DistilBert", "Electra", "ModernBert", "XLMRobertaXL")
ALIKE = ("RobertaPreLayerNorm", "Data2VecText", "MegatronBert", "Ernie")
"""BERT's and RoBERTa's nearest relatives."""
EUROBERT = "EuroBert"
"""Which the library has from version 5.3 on."""
GEMMA = "Gemma3"
QWEN = "Qwen3"
"""Here the one with a head of masked tokens sees all of a text, and the others what came before alone."""
DEBERTA = "DebertaV2"
MPNET = "MPNet"
ROTARY = ("JinaEmbeddingsV3", "NomicBert", "Gte")
"""BERT's layers with rotary positions, which older versions of the library do not have."""
LEAST = {"ModernBert": 2 + 6, EUROBERT: 2 + 6, GEMMA: 2 + 13, QWEN: 2 + 11, "NomicBert": 4 + 11, "Gte": 3 + 16}
"""Tensors of the embeddings and of a layer, of those that have fewer than BERT."""
OURS: dict[str, Any] = {
    "ForMaskedLM": BertForPreTraining,
    "ForSequenceClassification": BertForSequenceClassification,
    "ForTokenClassification": BertForTokenClassification,
    "ForQuestionAnswering": BertForQuestionAnswering,
    "Model": BertModel,
}
HEADS = {
    "ForMaskedLM": ("masked_lm",),
    "ForSequenceClassification": ("pooler", "classifier"),
    "ForTokenClassification": ("tags",),
    "ForQuestionAnswering": ("answers",),
    "Model": (),
}
DECODERS = ("decoder.weight", "generator_lm_head.weight", "vocab_projector.weight", "lm_head.weight")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
LENGTHS = (24, 1, 4, 13, 2, 21, 9, 24, 3, 7, 17, 5)
LABELS = 3


def library_class(family: str, kind: str) -> str:
    """What the library calls it."""
    of_gemma = {"Model": "TextModel", "ForSequenceClassification": "TextForSequenceClassification"}
    endings = {GEMMA: {"ForMaskedLM": "ForCausalLM", **of_gemma}, QWEN: {"ForMaskedLM": "ForCausalLM"}}
    return f"{family}{endings.get(family, {}).get(kind, kind)}"


def heads_of(family: str, kind: str) -> tuple[str, ...]:
    """Those of a class of the library."""
    if family in (GEMMA, QWEN):
        return HEADS[kind][-1:]
    if family != "ModernBert" or kind in ("ForMaskedLM", "Model"):
        return HEADS[kind]
    return ("prediction_head", HEADS[kind][-1])


def drawn(family: str, kind: str, shape: Shape, number: int) -> dict[str, Any]:
    """Settings of a model that can be cut on this cube, with a vocabulary that divides by no axis. Of odd numbers the
    decoder has a weight of its own."""
    random = np.random.default_rng(
        [*shape, number, (*FAMILIES, "Bert", EUROBERT, DEBERTA, MPNET, *ROTARY, *ALIKE, GEMMA, QWEN).index(family)]
    )
    x, y, z, _ = shape
    heads, pad = y * int(random.integers(1, 4)), int(random.integers(0, 3))
    settings = {
        "hidden_act": str(random.choice(["gelu", "gelu_new", "relu", "silu"])),
        "hidden_size": heads * z * int(random.integers(3, 12)),
        "num_attention_heads": heads,
        "intermediate_size": y * int(random.integers(5, 40)),
        "num_hidden_layers": int(random.integers(1, 3)),
        "vocab_size": int(random.integers(10, 50)) * 2 * x * y * z + 1,
        "max_position_embeddings": max(LENGTHS) + int(random.integers(3, 9)),
        "pad_token_id": pad,
        "num_labels": 2 if kind == "ForQuestionAnswering" else LABELS,
        "tie_word_embeddings": number % 2 == 0,
    }
    if family == "ModernBert":
        return settings | {
            "hidden_act": "gelu",
            "hidden_size": settings["hidden_size"]
            + heads * z * (settings["hidden_size"] // heads % 2),  # heads of pairs
            "num_hidden_layers": int(random.integers(1, 7)),
            "layer_norm_eps": 1e-5,
            "local_attention": int(random.integers(2, 20)),
            "global_attn_every_n_layers": int(random.integers(1, 4)),
            "classifier_pooling": ("cls", "mean")[number % 2],
            **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
        }
    if family == EUROBERT:
        groups = (2, 3, 1)[number % 3]
        heads, width = groups * heads, 2 * z * int(random.integers(2, 6))
        return {
            **{name: value for name, value in settings.items() if name != "tie_word_embeddings"},
            "hidden_act": ("silu", "gelu")[number % 2],
            "hidden_size": heads * width,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // groups,
            "classifier_pooling": ("late", "bos", "mean")[number % 3],
            "rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0},
            **dict.fromkeys(("bos_token_id", "eos_token_id", "mask_token_id"), 3),
        }
    if family == GEMMA:
        groups, width = (2, 3, 1)[number % 3], 2 * int(random.integers(2, 6))
        return settings | {
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": groups * settings["hidden_size"],
            "num_hidden_layers": int(random.integers(1, 5)),
            "num_attention_heads": groups * heads,
            "num_key_value_heads": heads,
            **dict.fromkeys(("head_dim", "query_pre_attn_scalar"), width),
            "sliding_window": int(random.integers(2, 20)),
            "sliding_window_pattern": int(random.integers(1, 4)),
            "use_bidirectional_attention": True,
            **dict.fromkeys(("bos_token_id", "eos_token_id"), 3),
        }
    if family == QWEN:
        groups, width = (2, 3, 1)[number % 3], 2 * int(random.integers(2, 6))
        return settings | {
            "hidden_act": "silu",
            "hidden_size": groups * settings["hidden_size"],
            "num_attention_heads": groups * heads,
            "num_key_value_heads": heads,
            "head_dim": width,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            **({"is_causal": False} if kind == "ForMaskedLM" else {}),
        }
    if family == DEBERTA:
        if kind in ("ForSequenceClassification", "Model"):
            settings |= {"conv_kernel_size": 3 + 2 * (number % 2), "conv_act": "gelu", "num_hidden_layers": 2}
        return settings | {
            **{"relative_attention": True, "position_biased_input": False, "share_att_key": True},
            **{"norm_rel_ebd": "layer_norm", "pos_att_type": "p2c|c2p", "max_relative_positions": -1},
            **{"position_buckets": 2 * x * y * z, "layer_norm_eps": 1e-7, "type_vocab_size": 0},
        }
    if family in ROTARY:
        waves: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0 + 100 * number}
        if number % 3 == 1:
            waves |= {"rope_type": "linear", "factor": 1.5}
        if family != "JinaEmbeddingsV3":
            settings["hidden_act"] = ("silu", "gelu")[number % 2]
        return settings | {
            "hidden_size": settings["hidden_size"]
            + heads * z * (settings["hidden_size"] // heads % 2),  # heads of pairs
            "type_vocab_size": {"JinaEmbeddingsV3": 1, "NomicBert": 2, "Gte": number % 3 % 2}[family],
            "layer_norm_eps": 1e-5,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "rope_parameters": waves,
        }
    if family == MPNET:
        return settings | {"pad_token_id": 1, "layer_norm_eps": 1e-5}
    if family == "Ernie":
        settings |= {"use_task_id": number % 3 == 1, "task_type_vocab_size": 3}
    if family != "DistilBert":
        settings |= {
            "type_vocab_size": 2 if family in ("Electra", "MegatronBert", "Ernie") else 1,
            "layer_norm_eps": 1e-5,
        }
    if family == "Electra":
        settings |= {"embedding_size": y * z * int(random.integers(2, 9)), "type_vocab_size": 2}
    return settings


def texts_for(settings: dict[str, Any]) -> list[EncodedText]:
    """Of very different lengths, the longest as long as can be; no id is that of padding."""
    random, vocab = np.random.default_rng(7), settings["vocab_size"]
    texts = []
    for n in LENGTHS:
        masked = np.sort(random.choice(n, max(1, n // 6), replace=False))
        types = np.arange(n) * settings.get("type_vocab_size", 1) // n
        ids, hidden = random.integers(3, vocab, n), random.integers(0, vocab, len(masked))
        texts.append(EncodedText(ids=ids, types=types, masked=masked, hidden=hidden))
    texts[0].ids[-1] = vocab - 1
    return texts


def labels_for() -> tuple[Tensor, list[Any], Tensor, Tensor]:
    """Of texts, of tokens, and both ends of a span."""
    random = np.random.default_rng(8)
    of_texts = torch.from_numpy(random.integers(0, LABELS, len(LENGTHS)))
    of_tokens = [np.where(random.random(n) < 0.3, -100, random.integers(0, LABELS, n)) for n in LENGTHS]
    starts, ends = (torch.tensor([int(random.integers(0, n)) for n in LENGTHS]) for _ in range(2))
    return of_texts, of_tokens, starts, ends


def direction(hidden: Tensor) -> Tensor:
    """For a loss of an encoder without heads, of which nothing cancels out."""
    return torch.randn(hidden.shape, dtype=torch.float32, generator=torch.Generator().manual_seed(9)).to(hidden.dtype)


def loss_of(model: Any, kind: str, laid: TextBatch, texts: list[EncodedText], cube: Cube) -> Tensor:
    of_texts, of_tokens, starts, ends = labels_for()
    if kind == "ForMaskedLM":
        targets = sum(len(text.masked) for text in texts)
        for parameter in model.next_sentence.parameters():  # its loss is then log 2, and says nothing to the encoder
            parameter.data.zero_()
        loss: Tensor = model(laid.batch, targets, len(texts)).loss - math.log(2)
    elif kind == "ForSequenceClassification":
        loss = model(laid.batch, laid.spread(of_texts, -100), len(texts))
    elif kind == "ForTokenClassification":
        targets = sum(int((tags >= 0).sum()) for tags in of_tokens)
        loss = model(laid.batch, laid.spread_tokens(of_tokens, -100), targets)
    elif kind == "ForQuestionAnswering":
        loss = model(laid, laid.spread(starts, -100), laid.spread(ends, -100), len(texts))
    else:
        last = of_tokens_of(laid, gather(model(laid.batch), cube, "z"))
        loss = (last * direction(last)).square().mean()
    return loss


def of_tokens_of(laid: TextBatch, rows: Tensor) -> Tensor:
    """Of one row a slot of the cube, those of the texts' tokens, text by text."""
    return torch.cat([rows[first : first + n] for first, n in zip(laid.starts.tolist(), LENGTHS, strict=True)])


def cube_step(model: Any, kind: str, texts: list[EncodedText], cube: Cube) -> dict[str, Tensor]:
    """The same of packed rows on the cube."""
    states: list[Tensor] = []
    bert = model if kind == "Model" else model.bert
    hooks = [
        module.register_forward_hook(lambda _, __, h: states.append(h.detach()))
        for module in (bert.embeddings, *bert.layers)
    ]
    if bert.final_norm is not None:  # the library's last hidden states are behind it
        hooks.append(bert.final_norm.register_forward_hook(lambda _, __, h: states.__setitem__(-1, h.detach())))
    if bert.convolution is not None:  # so are those of its first layer
        hooks.append(bert.convolution.register_forward_hook(lambda _, __, h: states.__setitem__(1, h.detach())))
    laid = collate_texts(texts, cube)
    loss = loss_of(model, kind, laid, texts, cube)
    for hook in hooks:
        hook.remove()
    loss.backward()
    found = {f"layer {i}": of_tokens_of(laid, gather(h, cube, "z")) for i, h in enumerate(states)}
    if kind == "ForSequenceClassification":
        found["logits"] = class_logits(model, texts)
    elif kind == "ForTokenClassification":
        found["logits"] = torch.cat(tag_logits(model, texts))
    elif kind == "ForQuestionAnswering":
        found["logits"] = torch.cat(span_logits(model, texts))
    return {**found, "loss": loss.detach()}


def parity(folder: Path, shape: Shape, cases: list[tuple[str, str]], dtype: torch.dtype) -> dict[str, float]:
    """Errors by model and tensor; each folder has what the library found, in `wanted`."""
    cube, errors = Cube(*shape) if ranks_of(shape) > 1 else Cube.single(), {}
    cube.manual_seed(0)
    for number, (family, kind) in enumerate(cases):
        name = library_class(family, kind)
        wanted, theirs = torch.load(folder / name / "wanted")
        with default_type(dtype):  # made in this type: converting a DTensor takes half a minute a model
            ours = OURS[kind].from_pretrained(folder / name, cube).eval()
        got = cube_step(ours, kind, texts_for(drawn(family, kind, shape, number)), cube)
        assert got.keys() == wanted.keys() - ({"logits"} if kind == "ForMaskedLM" else set())
        found = {key: error(value, wanted[key], key) for key, value in got.items()}
        mine = gradients(ours, cube, heads=heads_of(family, kind))
        if kind == "ForMaskedLM":
            # Of two biases the one that the library adds.
            mine = {key if key in theirs else key.replace("bias", "decoder.bias"): each for key, each in mine.items()}
            mine = {key: value for key, value in mine.items() if key in theirs}
            assert any(key.endswith(DECODERS) for key in mine) == (number % 2 == 1 or family == EUROBERT)
        if tasks := [key for key in theirs if key.endswith("task_type_embeddings.weight")]:
            # Its first row has been added to every type, one of which every token has.
            of_types = mine[tasks[0].replace("task_type", "token_type")].sum(0)
            found["tasks"] = error(of_types, theirs.pop(tasks[0])[0], "tasks")
        assert mine.keys() == theirs.keys()
        assert len(mine) >= LEAST.get(family, 4 + 16)
        found |= gradient_errors(mine, theirs)
        errors |= {f"{name}: {key}": value for key, value in found.items()}
    return errors


def check_bits_on_a_cube(folder: Path, family: str, shape: Shape) -> None:
    """A classifier of the library is the same on a cube as on one device, and what the cube writes has its bits."""
    kind = "ForSequenceClassification"
    saved(folder / "there", library_class(family, kind), **drawn(family, kind, shape, 0))
    run_ranks(ranks_of(shape), _there_and_back, folder, shape)
    there, back = (load_file(folder / name / "model.safetensors") for name in ("there", "back"))
    assert same(back, there)


def _there_and_back(folder: Path, shape: Shape) -> None:
    cube = Cube(*shape)
    weights = open_weights(folder / "there")
    cube.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(folder / "there", cube)
    alone = BertForSequenceClassification.from_pretrained(folder / "there", Cube.single())
    assert same(values(model, cube), values(alone))
    told = {"settings": weights.settings, "labels": weights.labels, "problem": weights.problem}
    export_huggingface(model, cube, folder / "back", **told)
