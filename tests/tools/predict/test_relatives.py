"""RoBERTa, MPNet, DistilBERT and ModernBERT say of texts what they say in the library, and come back to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.relatives import distilbert, modernbert, mpnet, roberta, roberta_tokenizer, there_and_back
from tools.bench.vs_transformers.infer import VectorLibrary
from tools.predict import load

transformers = pytest.importorskip("transformers")

TEXTS = ["a fox", "the fox went to the hill in the morning", "The story tells of a fox, of a hill, and of the morning!"]
MADE = {"DistilBert": distilbert, "ModernBert": modernbert, "MPNet": mpnet}
PAIR = ("A fox went", "to the hill in the morning")


def asked(model: Any, tokenizer: Any, *texts: str) -> Any:
    with torch.no_grad():
        return model(**tokenizer(*texts, return_tensors="pt"))


def test_masks_of_a_roberta(tmp_path: Path) -> None:
    tokenizer = roberta_tokenizer(TEXTS)
    model = roberta(tmp_path / "roberta", "RobertaForMaskedLM", tokenizer)
    text = "the <mask> went to the hill"
    (logits,) = asked(model, tokenizer, text).logits
    place = tokenizer(text).input_ids.index(tokenizer.mask_token_id)
    wanted = logits[place].softmax(0).topk(3)
    for folder in (tmp_path / "roberta", there_and_back(tmp_path / "roberta")):
        for written in (text, text.replace("<mask>", "[MASK]")):
            (found,) = load(folder, "fill-mask", k=3).predict([written])
            assert [piece.id for piece in found.masks[0]] == wanted.indices.tolist()
            assert [piece.probability for piece in found.masks[0]] == pytest.approx(wanted.values.tolist(), abs=1e-6)
        (scored,) = load(folder, "score").predict([TEXTS[1]])
        ids = tokenizer(TEXTS[1]).input_ids
        score = 0.0
        for place in range(1, len(ids) - 1):
            masked = torch.tensor([[*ids[:place], tokenizer.mask_token_id, *ids[place + 1 :]]])
            with torch.no_grad():
                score += float(model(masked).logits[0, place].log_softmax(0)[ids[place]])
        assert scored.as_json()["score"] == pytest.approx(score, rel=1e-5)


@pytest.mark.parametrize(
    "family", ["Roberta", *(pytest.param(each, marks=pytest.mark.slow if each == "MPNet" else ()) for each in MADE)]
)
def test_classes_and_answers_of_pairs(tmp_path: Path, family: str) -> None:
    kinds, tokenizer = ("ForSequenceClassification", "ForQuestionAnswering"), roberta_tokenizer(TEXTS)
    folders, models = [tmp_path / f"{family} {kind}" for kind in kinds], []
    for folder, kind, outputs in zip(folders, kinds, (3, 2), strict=True):
        if family == "Roberta":
            models.append(roberta(folder, f"{family}{kind}", tokenizer, num_labels=outputs))
        else:
            model, tokenizer = MADE[family](folder, f"{family}{kind}", num_labels=outputs)
            models.append(model)
    wanted = asked(models[0], tokenizer, *PAIR).logits[0].softmax(0)
    for folder in (folders[0], there_and_back(folders[0])):
        (found,) = load(folder, "classify").predict([dict(zip(("text", "text_b"), PAIR, strict=True))])
        assert list(found.as_json()["probabilities"].values()) == pytest.approx(wanted.tolist(), abs=1e-6)
    question, context = "who went?", "A fox went to the hill in the morning"
    said, encoded = asked(models[1], tokenizer, question, context), tokenizer(question, context)
    places = [place for place in range(len(encoded.input_ids)) if encoded.sequence_ids()[place] == 1]
    scores = (said.start_logits[0][places, None] + said.end_logits[0][places]).triu()
    scores = scores.masked_fill(torch.ones_like(scores).tril(-1).bool(), -torch.inf)
    first, last = divmod(int(scores.argmax()), len(places))
    (answer,) = load(folders[1], "answer").predict([{"question": question, "context": context}])
    begin, end = encoded.token_to_chars(places[first]).start, encoded.token_to_chars(places[last]).end
    assert answer.as_json()["text"] == context[begin:end].strip()


@pytest.mark.parametrize("family", ["ModernBert", "MPNet"])
def test_masks_and_tags(tmp_path: Path, family: str) -> None:
    model, tokenizer = MADE[family](tmp_path / "masked", f"{family}ForMaskedLM")
    text = f"the {tokenizer.mask_token} went to the hill"
    (logits,) = asked(model, tokenizer, text).logits
    wanted = logits[tokenizer(text).input_ids.index(tokenizer.mask_token_id)].softmax(0).topk(3)
    for folder in (tmp_path / "masked", there_and_back(tmp_path / "masked")):
        asking = load(folder, "fill-mask", k=3)
        # As the folder says, though no table of a ModernBERT's positions ends there; two rows of an MPNet's are others.
        assert asking.task.reader.max_length == (42 if family == "ModernBert" else 40)  # type: ignore[attr-defined]
        (found,) = asking.predict([text])
        assert [piece.id for piece in found.masks[0]] == wanted.indices.tolist()
        assert [piece.probability for piece in found.masks[0]] == pytest.approx(wanted.values.tolist(), abs=1e-6)
    model, _ = MADE[family](tmp_path / "tags", f"{family}ForTokenClassification", num_labels=3)
    words = ["the", "fox", "went"]
    wanted = asked(model, tokenizer, " ".join(words)).logits[0, 1:-1].argmax(1)
    for folder in (tmp_path / "tags", there_and_back(tmp_path / "tags")):
        (tagged,) = load(folder, "tag").predict([{"tokens": words}])
        assert list(tagged.tags) == [f"LABEL_{tag}" for tag in wanted.tolist()]


def test_a_roberta_reads_as_many_tokens_as_it_has_rows_behind_padding(tmp_path: Path) -> None:
    tokenizer = roberta_tokenizer(TEXTS)
    model = roberta(tmp_path / "roberta", "RobertaModel", tokenizer)
    predictor = load(tmp_path / "roberta", "embed")
    long = " ".join(TEXTS * 6)
    (vector,) = predictor.predict([long])
    assert (predictor.truncated, predictor.tokens) == (1, 40), "42 rows, of which 2 are padding's"
    with torch.no_grad():
        ids = tokenizer(long, truncation=True, max_length=40, return_tensors="pt")
        wanted = model(**ids).last_hidden_state[0].mean(0)
    assert vector.as_json()["vector"] == pytest.approx(wanted.tolist(), rel=1e-4, abs=1e-5)
    (beside,) = VectorLibrary(tmp_path / "roberta").results([long], 1)  # which `bench infer` compares with
    assert beside.tolist() == pytest.approx(wanted.tolist(), rel=1e-4, abs=1e-5)


def test_vectors_of_an_mpnet(tmp_path: Path) -> None:
    """As all-mpnet-base-v2 has them: the encoder alone with a pooler that nobody asks, the mean of all tokens, length
    1; what says so comes along."""
    model, tokenizer = mpnet(tmp_path / "mpnet", "MPNetModel")
    kinds = ("Transformer", "1_Pooling", "2_Normalize")
    modules = [
        {
            "idx": n,
            "name": str(n),
            "path": kind * (n > 0),
            "type": f"sentence_transformers.models.{kind[2 * (n > 0) :]}",
        }
        for n, kind in enumerate(kinds)
    ]
    settings = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": 8, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
    }
    (tmp_path / "mpnet" / "1_Pooling").mkdir()
    for name, content in settings.items():
        (tmp_path / "mpnet" / name).write_text(json.dumps(content))
    wanted = []
    for text in TEXTS:
        with torch.no_grad():
            ids = tokenizer(text, truncation=True, max_length=8, return_tensors="pt")
            mean = model(**ids).last_hidden_state[0].mean(0)
        wanted.append(mean / mean.norm())
    ours = there_and_back(tmp_path / "mpnet")
    for name, content in settings.items():
        assert json.loads((tmp_path / "mpnet-back" / name).read_text()) == content
    for folder in (tmp_path / "mpnet", ours, tmp_path / "mpnet-back"):
        found = [torch.tensor(one.as_json()["vector"]) for one in load(folder, "embed").predict(TEXTS)]
        torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=0, atol=2e-6)
