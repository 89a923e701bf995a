"""BERT's relatives beside the library's: hidden states, heads, losses, gradients and tensors, of small models by
chance."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from models.bert import EncodedText, export_huggingface, open_weights
from tensor3d import Cube
from tests.models.bert.huggingface.families import (
    ALIKE,
    DEBERTA,
    EUROBERT,
    FAMILIES,
    GEMMA,
    LENGTHS,
    MPNET,
    OURS,
    QWEN,
    ROTARY,
    direction,
    drawn,
    heads_of,
    labels_for,
    library_class,
    parity,
    texts_for,
)
from tests.models.bert.huggingface.subject import gradient_errors, same, saved, tensors_of, tied_keys
from tests.models.toy import Shape
from tests.ranks import run_ranks
from tests.single_device_reference import error, ranks_of, worst

transformers = pytest.importorskip("transformers")

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """ModernBERT's rotary positions without the library's rounding of queries and keys to fp32."""

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos.unsqueeze(unsqueeze_dim) + torch.cat([-second, first], -1) * sin.unsqueeze(unsqueeze_dim)

    return turn(q), turn(k)


def normed(norm: Any, h: Tensor) -> Tensor:
    """EuroBERT's RMSNorm without the library's rounding of hidden states to fp32."""
    result: Tensor = norm.weight * h * (h.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    return result


def normed_around_one(norm: Any, h: Tensor) -> Tensor:
    """The same of Gemma's."""
    result: Tensor = (1 + norm.weight) * h * (h.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return result


def root(query_layer: Tensor, scale_factor: int) -> Tensor:
    """DeBERTa's scale without the library's rounding to fp32."""
    return torch.tensor(query_layer.shape[-1] * scale_factor, dtype=torch.float64).sqrt()


def library_step(model: Any, kind: str, settings: dict[str, Any], texts: list[EncodedText]) -> dict[str, Tensor]:
    """Hidden states of all tokens, the logits, and the loss, of the batch padded with `pad_token_id`."""
    count, longest = len(texts), max(LENGTHS)
    ids, mask = torch.full((count, longest), settings["pad_token_id"]), torch.zeros(count, longest, dtype=torch.int64)
    types, labels = torch.zeros_like(ids), torch.full((count, longest), -100)
    of_texts, of_tokens, starts, ends = labels_for()
    for row, text in enumerate(texts):
        n = len(text.ids)
        ids[row, :n], mask[row, :n] = torch.from_numpy(text.ids), 1
        types[row, :n] = torch.from_numpy(text.types)
        if kind == "ForMaskedLM":
            labels[row, text.masked] = torch.from_numpy(text.hidden)
        elif kind == "ForTokenClassification":
            labels[row, :n] = torch.from_numpy(of_tokens[row])
    given = {"input_ids": ids, "attention_mask": mask}
    if settings.get("type_vocab_size", 1) > 1:
        given["token_type_ids"] = types
    normed: list[Tensor] = []
    for norm in (each for name, each in model.named_modules() if name.rpartition(".")[2] == "final_norm"):
        norm.register_forward_hook(lambda _, __, result: normed.append(result))
    output, real = model(**given, output_hidden_states=True), mask.bool()
    # The last states are those after ModernBERT's last norm, which transformers 5.0 does not return.
    states = [h[real] for h in (*output.hidden_states[:-1], normed[-1] if normed else output.hidden_states[-1])]
    found = {f"layer {number}": h for number, h in enumerate(states)}
    if kind == "Model":
        found["loss"] = (states[-1] * direction(states[-1])).square().mean()
    elif kind == "ForQuestionAnswering":
        sides = ((output.start_logits, starts), (output.end_logits, ends))
        found["logits"] = torch.stack([logits[real] for logits, _ in sides], 1)
        found["loss"] = sum(
            F.cross_entropy(logits.masked_fill(~real, -torch.inf), places) / 2 for logits, places in sides
        )
    else:
        found["logits"] = output.logits if kind == "ForSequenceClassification" else output.logits[real]
        flat = (output.logits, of_texts) if labels.eq(-100).all() else (output.logits.flatten(0, 1), labels.flatten())
        found["loss"] = F.cross_entropy(*flat)
    found["loss"].backward()
    return found


def library_results(model: Any, kind: str, settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What `library_step` gives, and the gradients by the names of a model with a head."""
    model.zero_grad()
    found = library_step(model, kind, settings, texts_for(settings))
    prefix = f"{model.base_model_prefix}." if kind == "Model" else ""  # which a bare model's names are without
    tied = tied_keys(model)
    every = {key: each.grad for key, each in model.named_parameters(remove_duplicate=False) if key not in tied}
    gradients = {f"{prefix}{key}": gradient.clone() for key, gradient in every.items() if gradient is not None}
    return {key: value.detach() for key, value in found.items()}, gradients


NEAR = [
    ("MegatronBert", "ForMaskedLM"),
    ("Ernie", "ForSequenceClassification"),
    ("RobertaPreLayerNorm", "Model"),
    ("Data2VecText", "ForQuestionAnswering"),
]
"""By its place, this ERNIE adds the first of its tasks."""
EVERY = [(family, kind) for family in FAMILIES for kind in OURS]
FEW = [("Roberta", "ForMaskedLM"), ("DistilBert", "ForSequenceClassification"), ("Electra", "ForMaskedLM")]
MODERN = [("ModernBert", kind) for kind in OURS]
RELATIVE = [(MPNET, kind) for kind in OURS]
"""With a bias of scores by distance."""
HAS_EUROBERT = hasattr(transformers, "EuroBertConfig")
WITH_EUROBERT = pytest.mark.skipif(not HAS_EUROBERT, reason="this version of transformers has no EuroBERT")
EUROPEAN = [
    (EUROBERT, kind) for kind in ("ForSequenceClassification", "ForTokenClassification", "Model", "ForMaskedLM")
]
"""The place of the first says what its classifier looks at."""
AROUND_ONE = [(GEMMA, kind) for kind in ("ForMaskedLM", "Model")]
"""In the other order the decoder has a weight of its own."""
SEES_ALL = 'getattr(config, "is_causal"' in inspect.getsource(transformers.masking_utils.create_causal_mask)
"""Whether this version of the library obeys the setting by which a decoder sees both sides."""
BEFORE_ALONE = [(QWEN, "Model"), *[(QWEN, "ForMaskedLM")] * SEES_ALL]
SCORED = [(QWEN, "ForSequenceClassification"), (GEMMA, "ForSequenceClassification"), (QWEN, "ForTokenClassification")]
DISENTANGLED = [(DEBERTA, kind) for kind in OURS]
TURNED = [
    (family, kind)
    for kind in ("ForSequenceClassification", "ForTokenClassification", "Model", "ForMaskedLM")
    for family in ROTARY
    if hasattr(transformers, f"{family}Config")
] + [("JinaEmbeddingsV3", "ForQuestionAnswering")] * hasattr(transformers, "JinaEmbeddingsV3Config")
"""Of which a version of the library may have none."""
WITH_TURNED = pytest.mark.skipif(not TURNED, reason="this version of transformers has none of them")
OTHERS = [
    ("XLMRoberta", "ForSequenceClassification"),
    ("DistilBert", "ForQuestionAnswering"),
    ("Camembert", "Model"),
    ("XLMRobertaXL", "ForMaskedLM"),
    ("XLMRobertaXL", "ForSequenceClassification"),
]


@pytest.mark.parametrize(
    ("shape", "dtype", "cases"),
    [
        ((1, 1, 1, 1), torch.float64, [*FEW, *OTHERS]),
        ((1, 2, 2, 1), torch.float64, [("Bert", "ForMaskedLM"), FEW[2]]),
        pytest.param((1, 2, 2, 1), torch.float64, [FEW[0], MODERN[0], OTHERS[-1]], marks=pytest.mark.slow),
        ((1, 1, 1, 1), torch.float64, NEAR),
        *(
            pytest.param(shape, dtype, cases, marks=pytest.mark.slow)
            for shape, dtype, cases in (
                ((1, 2, 2, 1), torch.float64, NEAR[:2]),
                ((2, 2, 2, 1), torch.float64, NEAR),
                ((1, 2, 1, 2), torch.float32, NEAR[::-1]),
                ((1, 1, 1, 1), torch.float64, [(family, kind) for family in ALIKE for kind in OURS]),
            )
        ),
        ((1, 1, 1, 1), torch.float64, MODERN),
        ((1, 2, 2, 1), torch.float64, MODERN[1:2]),
        ((1, 1, 1, 1), torch.float64, RELATIVE),
        pytest.param((1, 2, 2, 1), torch.float64, RELATIVE[:2], marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 1), torch.float32, RELATIVE[1:] + RELATIVE[:1], marks=pytest.mark.slow),
        pytest.param((2, 2, 2, 1), torch.float64, RELATIVE[1:4], marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 1), torch.float64, EUROPEAN, marks=WITH_EUROBERT),
        pytest.param((1, 1, 1, 1), torch.float64, EUROPEAN[-2:] + EUROPEAN[:1], marks=WITH_EUROBERT),
        pytest.param((1, 2, 2, 1), torch.float64, [EUROPEAN[0], EUROPEAN[-1]], marks=WITH_EUROBERT),
        *(
            pytest.param(shape, dtype, EUROPEAN[first:] + EUROPEAN[:first], marks=(WITH_EUROBERT, pytest.mark.slow))
            for shape, dtype in (((1, 1, 1, 1), torch.float32), ((2, 2, 2, 1), torch.float64))
            for first in (2, 3)
        ),
        pytest.param((1, 1, 1, 1), torch.float64, TURNED[-4:], marks=WITH_TURNED),
        pytest.param((1, 1, 1, 1), torch.float64, TURNED, marks=(WITH_TURNED, pytest.mark.slow)),
        pytest.param((1, 2, 2, 1), torch.float64, TURNED[1:4], marks=WITH_TURNED),
        pytest.param((2, 2, 2, 1), torch.float64, TURNED[:4], marks=(WITH_TURNED, pytest.mark.slow)),
        pytest.param((1, 1, 1, 1), torch.float32, TURNED[:3], marks=(WITH_TURNED, pytest.mark.slow)),
        ((1, 1, 1, 1), torch.float64, AROUND_ONE[::-1]),
        ((1, 2, 2, 1), torch.float64, AROUND_ONE),
        pytest.param((2, 2, 2, 1), torch.float64, AROUND_ONE, marks=pytest.mark.slow),
        pytest.param((1, 2, 1, 2), torch.float32, AROUND_ONE[::-1], marks=pytest.mark.slow),
        ((1, 1, 1, 1), torch.float64, BEFORE_ALONE),
        ((1, 2, 2, 1), torch.float64, BEFORE_ALONE[::-1]),
        pytest.param((2, 2, 2, 1), torch.float64, BEFORE_ALONE, marks=pytest.mark.slow),
        pytest.param((1, 2, 1, 2), torch.float32, BEFORE_ALONE[::-1], marks=pytest.mark.slow),
        ((1, 1, 1, 1), torch.float64, SCORED),
        ((1, 2, 2, 1), torch.float64, SCORED[:1]),
        pytest.param((2, 2, 2, 1), torch.float64, SCORED, marks=pytest.mark.slow),
        pytest.param((1, 2, 1, 2), torch.float32, SCORED, marks=pytest.mark.slow),
        ((1, 1, 1, 1), torch.float64, DISENTANGLED),
        ((1, 2, 2, 1), torch.float64, DISENTANGLED[:2]),
        pytest.param((2, 2, 2, 1), torch.float64, DISENTANGLED, marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 1), torch.float32, EVERY, marks=pytest.mark.slow),
        *(
            pytest.param(shape, dtype, cases, marks=pytest.mark.slow)
            for cases in ([*FEW, *OTHERS], MODERN)
            for shape in ((2, 2, 2, 1), (1, 2, 1, 2))
            for dtype in TOLERANCE
        ),
        *(  # three of each, which an order of their own tells apart
            pytest.param(
                shape,
                dtype,
                EVERY[first:] + EVERY[:first],
                marks=pytest.mark.long(reason="24 of them, of 35 models each"),
            )
            for shape in ((1, 1, 1, 1), (2, 2, 2, 1), (1, 2, 4, 1), (1, 2, 1, 2))
            for dtype in TOLERANCE
            for first in (0, 12, 24)
        ),
    ],
    ids=lambda value: str(len(value)) if isinstance(value, list) else str(value),
)
@pytest.mark.filterwarnings("ignore:.*not in the folder, so as initialised")
def test_models_by_chance_compute_what_the_librarys_do(
    tmp_path: Path,
    shape: Shape,
    dtype: torch.dtype,
    cases: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ours are at most so much further from the library's in fp64 than its own are in fp32: where a gradient is a sum
    of which most cancels out, those differ from one another by up to 5e-5."""
    monkeypatch.setattr("transformers.models.modernbert.modeling_modernbert.apply_rotary_pos_emb", turned)
    if HAS_EUROBERT:
        monkeypatch.setattr("transformers.models.eurobert.modeling_eurobert.EuroBertRMSNorm.forward", normed)
    monkeypatch.setattr("transformers.models.gemma3.modeling_gemma3.Gemma3RMSNorm.forward", normed_around_one)
    monkeypatch.setattr("transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm.forward", normed)
    monkeypatch.setattr("transformers.models.deberta_v2.modeling_deberta_v2.scaled_size_sqrt", root)
    theirs: dict[str, float] = {}
    for number, (family, kind) in enumerate(cases):
        settings, folder = drawn(family, kind, shape, number), tmp_path / library_class(family, kind)
        twin = saved(folder, folder.name, **settings)
        wanted = library_results(twin.to(torch.float64), kind, settings)
        torch.save(wanted, folder / "wanted")
        if dtype != torch.float64:
            narrow = library_results(twin.to(dtype), kind, settings)
            errors = {key: error(value, wanted[0][key], key) for key, value in narrow[0].items()}
            errors |= gradient_errors(narrow[1], wanted[1])
            theirs |= {f"{folder.name}: {key}": value for key, value in errors.items()}
    given = (tmp_path, shape, cases, dtype)
    results = [parity(*given)] if ranks_of(shape) == 1 else run_ranks(ranks_of(shape), parity, *given, timeout=600)
    ours = [{name: value - theirs.get(name, 0.0) for name, value in result.items()} for result in results]
    name, value = worst(ours)
    print(f"{shape} {dtype}: {worst(results)[1]:.1e}, the library {max(theirs.values(), default=0.0):.1e}")
    assert value <= TOLERANCE[dtype], f"{name} differs by {value}"


@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(each, marks=pytest.mark.slow if each in FAMILIES[1:3] else ()) for each in FAMILIES),
        *(pytest.param(each, marks=pytest.mark.slow if each != "MegatronBert" else ()) for each in ALIKE),
        MPNET,
        pytest.param(EUROBERT, marks=WITH_EUROBERT),
        GEMMA,
        QWEN,
        DEBERTA,
        *sorted({family for family, _ in TURNED}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*not in the folder, so as initialised")
def test_there_and_back_to_the_bit(tmp_path: Path, family: str) -> None:
    """Names, bits and settings; the library finds no tensor missing and none too much."""
    some = (
        (*EUROPEAN, *TURNED, *AROUND_ONE, *BEFORE_ALONE, *SCORED)
        if family in (EUROBERT, GEMMA, QWEN, *ROTARY)
        else [(family, kind) for kind in OURS]
    )
    kinds = {kind: ours for kind, ours in OURS.items() if (family, kind) in some}
    for kind, ours in kinds.items():
        folder, back, shape = tmp_path / kind, tmp_path / f"{kind}-back", (1, 1, 1, 1)
        twin = saved(folder, library_class(family, kind), **drawn(family, kind, shape, 0))
        cube = Cube.single()
        cube.manual_seed(0)
        weights, model = open_weights(folder), ours.from_pretrained(folder, cube)
        # A bare encoder of ours has no pooler, which RoBERTa's has.
        heads = None if kind == "Model" else heads_of(family, kind)
        told = {"settings": weights.settings, "labels": weights.labels, "problem": weights.problem}
        written = export_huggingface(model, cube, back, heads=heads, **told)
        assert written.architecture == library_class(family, kind)
        found = {name: value for name, value in tensors_of(twin).items() if kind != "Model" or "pooler" not in name}
        assert same(load_file(back / "model.safetensors"), found)
        before, after = (json.loads((each / "config.json").read_text()) for each in (folder, back))
        # Beside one entry a kind of layer, transformers 5.0 writes some of no kind.
        if "rope_parameters" in before and family in ("ModernBert", GEMMA):
            found_of = before["rope_parameters"].items()
            before["rope_parameters"] = {each: said for each, said in found_of if isinstance(said, dict)}
        labels = {"id2label", "label2id"} if weights.labels else set()
        assert after.items() >= {k: v for k, v in before.items() if k not in labels}.items(), "all that was said"
        again, wrong = getattr(transformers, library_class(family, kind)).from_pretrained(
            back, output_loading_info=True
        )
        pooler = {name for name in wrong["missing_keys"] if kind == "Model" and name.startswith("pooler.")}
        assert wrong.pop("missing_keys") == pooler
        assert not any(wrong.values()), wrong
        assert same({name: again.state_dict()[name] for name in found}, found)


@pytest.mark.parametrize(
    "family",
    [
        "Bert",
        "Roberta",
        "ModernBert",
        DEBERTA,
        GEMMA,
        *[QWEN] * SEES_ALL,
        MPNET,
        *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES[3:5]),
        *(pytest.param(each, marks=pytest.mark.slow) for each in sorted({family for family, _ in TURNED})),
    ],
)
@pytest.mark.filterwarnings("ignore:.*not in the folder, so as initialised")
def test_a_decoder_of_its_own_there_and_back(tmp_path: Path, family: str) -> None:
    """Of two biases both are written, as the one that counts."""
    folder, back, cube = tmp_path / "theirs", tmp_path / "ours", Cube.single()
    twin = saved(folder, library_class(family, "ForMaskedLM"), **drawn(family, "ForMaskedLM", (1, 1, 1, 1), 1))
    cube.manual_seed(0)
    weights = open_weights(folder)
    model = OURS["ForMaskedLM"].from_pretrained(folder, cube)
    export_huggingface(model, cube, back, heads=("masked_lm",), settings=weights.settings)
    wanted = tensors_of(twin)
    both = [name for name in wanted if name.endswith("decoder.bias") and name.replace("decoder.", "") in wanted]
    assert len(both) == (family in ("Bert", "Roberta", DEBERTA, MPNET, *ROTARY[:2]))
    wanted |= {name.replace("decoder.", ""): wanted[name] for name in both}
    assert same(load_file(back / "model.safetensors"), wanted)
    assert json.loads((back / "config.json").read_text())["tie_word_embeddings"] is False
    again, wrong = getattr(transformers, library_class(family, "ForMaskedLM")).from_pretrained(
        back, output_loading_info=True
    )
    assert not any(wrong.values()), wrong
    assert same({name: again.state_dict()[name] for name in wanted}, wanted)
