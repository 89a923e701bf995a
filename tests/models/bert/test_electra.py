"""ELECTRA's and DeBERTa's generator and discriminator beside the library's: hidden states, losses, gradients, folders.

What the library does not have of DeBERTa, the head that tells replaced tokens and the sum of two tables of which one
has no gradient, is here as the authors' code has it (microsoft/DeBERTa, apps/models/replaced_token_detection_model.py
and apps/tasks/rtd_task.py).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.bert import ElectraForPreTraining, ReplacedTokens
from tensor3d import Cube, CubeShape
from tensor3d.data import Pack
from tensor3d.layers.sampling import vocab_sample
from tests.models.bert.electra_pairs import PARTS, packs_of, parity, sizes
from tests.models.bert.huggingface.families import DEBERTA
from tests.models.bert.huggingface.subject import original, settings_of, tensors_of, write
from tests.models.toy import CAPACITY, Shape, lay, toy_config, toy_packs
from tests.ranks import run_ranks
from tests.single_device_reference import ranks_of, worst

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
TABLE = "embeddings.word_embeddings.weight"
SHAPES = [(1, 1, 1, 1), (2, 2, 2, 1), (1, 2, 4, 1), (1, 2, 1, 2)]


class Head(nn.Module):
    """DeBERTa's: a LayerNorm of each token and its sequence's [CLS], dense, activation, one output."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, 1)
        for parameter in self.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
        from transformers.activations import ACT2FN

        self.activation = ACT2FN[config.hidden_act]

    def forward(self, h: Tensor) -> Tensor:
        return self.classifier(self.activation(self.dense(self.LayerNorm(h[:, :1] + h))))[..., 0]


class Discriminator(nn.Module):
    """The library's encoder with that head. Its table of tokens is what it differs by from the generator's."""

    def __init__(self, encoder: Any, generator: Any) -> None:
        super().__init__()
        self.deberta, self.mask_predictions, self.config = encoder, Head(encoder.config), encoder.config
        self.generator = [generator]  # none of its parts
        own, others = (each.embeddings.word_embeddings.weight.data for each in (encoder, generator.deberta))
        for table in (own, others):  # so few digits that sums and differences are exact in fp32
            table.copy_((table * 1024).round() / 1024)
        own -= others

    @property
    def of_generator(self) -> Tensor:
        return self.generator[0].deberta.embeddings.word_embeddings.weight.detach()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """As the authors' files have them: the table is the sum."""
        found = {name: value.clone() for name, value in self.state_dict().items()}
        found[f"deberta.{TABLE}"] += self.of_generator
        return found

    def forward(self, *, token_type_ids: Tensor, **given: Any) -> SimpleNamespace:
        table = self.deberta.embeddings.word_embeddings.weight + self.of_generator
        found = torch.func.functional_call(self.deberta, {TABLE: table}, kwargs=given)
        return SimpleNamespace(logits=self.mask_predictions(found.last_hidden_state), hidden_states=found.hidden_states)


def root(query: Tensor, scale_factor: int) -> Tensor:
    """DeBERTa's scale without the library's rounding to fp32."""
    return torch.tensor(query.shape[-1] * scale_factor, dtype=torch.float64).sqrt()


def twins(folder: Path, shape: Shape, number: int, family: str) -> tuple[Any, Any]:
    """Discriminator and generator of the library, and folders of both."""
    pytest.importorskip("transformers")
    of_discriminator, of_generator, _ = sizes(shape, number, family)
    if family == DEBERTA:
        beside = original(f"{DEBERTA}ForMaskedLM", **of_generator)
        encoder = original(f"{DEBERTA}Model", **of_discriminator)
        settings = settings_of(encoder)
        model = Discriminator(encoder, beside)
        write(folder / PARTS[0], model.tensors, settings)
        write(folder / PARTS[1], tensors_of(beside), settings_of(beside))
        return model, beside
    discriminator = original("ElectraForPreTraining", **of_discriminator)
    generator = original("ElectraForMaskedLM", **of_generator)
    generator.electra.embeddings = discriminator.electra.embeddings
    generator.generator_lm_head.weight = discriminator.electra.embeddings.word_embeddings.weight
    for part, model in zip(PARTS, (discriminator, generator), strict=True):
        write(folder / part, tensors_of(model), settings_of(model))
    return discriminator, generator


def padded(packs: list[Pack], values: Any, rest: int) -> Tensor:
    """(sequences, CAPACITY): of each token one of `values` (tokens,) of a pack, else `rest`."""
    rows = []
    for pack in packs:
        for part in torch.as_tensor(values(pack)).split(pack.lengths.tolist()):
            rows.append(torch.cat([part, torch.full((CAPACITY - len(part),), rest)]))
    return torch.stack(rows)


def twin_step(discriminator: Any, generator: Any, packs: list[Pack], weight: float) -> dict[str, Tensor]:
    """What the library's models compute of the sequences, with tokens drawn of the generator's logits."""

    def labels_of(pack: Pack) -> Tensor:
        labels = torch.full((len(pack.ids),), -100)
        labels[pack.masked] = torch.from_numpy(pack.masked_labels)
        return labels

    labels = padded(packs, labels_of, -100)
    given = {
        "attention_mask": padded(packs, lambda pack: torch.ones(len(pack.ids), dtype=torch.int64), 0),
        "token_type_ids": padded(packs, lambda pack: pack.types, 0),
    }
    ids, masked, real = padded(packs, lambda pack: pack.ids, 0), labels >= 0, given["attention_mask"].bool()
    guessed = generator(input_ids=ids, labels=labels, output_hidden_states=True, **given)
    logits, draws = guessed.logits[masked], torch.cat([torch.as_tensor(pack.draws) for pack in packs])
    drawn = vocab_sample(logits, draws, logits.shape[1], Cube.single())
    seen = ids.masked_scatter(masked, drawn)
    replaced = (seen != torch.where(masked, labels, ids)).long()
    told = discriminator(input_ids=seen, output_hidden_states=True, **given)
    # Of all real tokens, as the library's own loss, which is fp32 whatever the logits are.
    of_tokens = F.binary_cross_entropy_with_logits(told.logits[real], replaced[real].to(told.logits.dtype))
    loss = guessed.loss + weight * of_tokens
    loss.backward()
    right = (told.logits > 0).long() == replaced
    found = {
        "loss": loss,
        "generator_loss": guessed.loss,
        "discriminator_loss": of_tokens,
        "generator_correct": (logits.argmax(1) == labels[masked]).sum(),
        "discriminator_correct": (right & real).sum(),
        "replaced": replaced.sum(),
    }
    for part, output in zip(PARTS, (told, guessed), strict=True):
        found |= {f"{part} {i}": h[real] for i, h in enumerate(output.hidden_states) if i > 0}
    return {name: value.detach() for name, value in found.items()}


@pytest.mark.parametrize(
    ("family", "shape", "number", "dtype"),
    [
        *(
            pytest.param("Electra", shape, 0, torch.float64, marks=pytest.mark.slow if shape[:3].count(1) < 2 else ())
            for shape in SHAPES
        ),
        ("Electra", SHAPES[0], 1, torch.float32),
        *(
            pytest.param("Electra", shape, number, dtype, marks=pytest.mark.slow)
            for shape in SHAPES
            for number, dtype in ((1, torch.float64), (2, torch.float64), (3, torch.float32))
        ),
        (DEBERTA, SHAPES[0], 0, torch.float64),
        (DEBERTA, SHAPES[-1], 1, torch.float64),
        *(
            pytest.param(DEBERTA, shape, number, dtype, marks=pytest.mark.slow)
            for shape, number, dtype in (
                (SHAPES[0], 1, torch.float32),
                ((1, 2, 2, 1), 2, torch.float64),
                (SHAPES[1], 1, torch.float64),
            )
        ),
    ],
    ids=str,
)
def test_both_compute_what_the_librarys_do(
    tmp_path: Path, family: str, shape: Shape, number: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same drawn tokens, which differ in about as many places as an untrained generator fills wrongly."""
    settings, _, objective = sizes(shape, number, family)
    packs = packs_of(settings["vocab_size"])
    models = [each.to(dtype) for each in twins(tmp_path, shape, number, family)]
    if family == DEBERTA:
        monkeypatch.setattr("transformers.models.deberta_v2.modeling_deberta_v2.scaled_size_sqrt", root)
    found = twin_step(*models, packs, objective.weight)
    assert found["replaced"] > 0.5 * sum(len(pack.masked) for pack in packs)
    shared = []
    if family == "Electra":
        shared = [f"electra.embeddings.{name}" for name, _ in models[0].electra.embeddings.named_parameters()]
    of_both = [
        {name: each.grad for name, each in model.named_parameters() if each.grad is not None} for model in models
    ]
    of_both[1] = {name: each for name, each in of_both[1].items() if name not in shared}
    torch.save((found, dict(zip(PARTS, of_both, strict=True))), tmp_path / "wanted")
    given = (tmp_path, shape, number, dtype, family)
    results = [parity(*given)] if ranks_of(shape) == 1 else run_ranks(ranks_of(shape), parity, *given)
    name, value = worst(results)
    print(f"{shape} {dtype}: {value:.1e} ({name})")
    assert value <= TOLERANCE[dtype], f"{name} differs by {value}"


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"family": "bert"}, {}, 'learnt by family="electra" and "deberta-v2", which alone .* Got family=\'bert\''),
        ({}, {"generator_size": 0.0}, "generator_size must be above 0 and at most 1. Got 0.0"),
        ({}, {"generator_size": 1.5}, "generator_size must be above 0 and at most 1. Got 1.5"),
        ({}, {"weight": -1.0}, "weight must be at least 0 and finite. Got -1.0"),
        (
            {},
            {"generator_heads": 3},
            "0.25 of the sizes of hidden=64, heads=8 cannot be: hidden must divide by heads=3",
        ),
        ({"heads": 2}, {}, "the generator, of hidden=16 with 1 heads: .*y=2.*say generator_heads"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(changes: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    config = toy_config(67, **{"family": "electra", "next_sentence": False, **changes})
    with pytest.raises(ValueError, match=message):
        ReplacedTokens(**settings).check(config, CubeShape(y=2))


def test_a_batch_without_random_bits_is_refused() -> None:
    cube = Cube.single()
    model = ElectraForPreTraining(toy_config(67, family="electra", next_sentence=False), ReplacedTokens(), cube)
    with pytest.raises(ValueError, match=r"the batch has none. Make it of packs with draws"):
        model(lay(toy_packs(67, 2), cube), 1, 1)
