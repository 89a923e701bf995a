"""Rerankers and classifiers of decoders' families say what the library's classes do, learn, and go back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.relatives import OF_QWEN, there_and_back, write_qwen_tokenizer
from tools.convert.__main__ import main as convert
from tools.corpus.tokenizers.model_dir import tokenizer_of
from tools.finetune.__main__ import main as finetune
from tools.predict import load

transformers = pytest.importorskip("transformers")

END = OF_QWEN[0]
ENDS_PAIR = f"$A $B:1 {END}:1"
QUERY = "<|im_start|>which is the fox\n"
PASSAGES = ["the fox<|im_end|>", "a " * 9 + "<|im_end|>\n\n", "the the cafe\u0301 " + END, "\u6f22\u5b57<|im_end|>"]


def without_template(plan: dict[str, Any]) -> None:
    """As published rerankers have it: what is to stand around texts is in the texts."""
    del plan["post_processor"]["processors"][1]


def saved(folder: Path, kind: str, *, labels: int = 2, **tokenizer: Any) -> Any:
    """The model of the library, in a folder with its tokenizer."""
    made = write_qwen_tokenizer(folder, **tokenizer)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    vocab = {"vocab_size": made.get_vocab_size() + 3, "intermediate_size": 48, "initializer_range": 0.3, "head_dim": 8}
    config = transformers.Qwen3Config(**sizes, **vocab, pad_token_id=made.token_to_id(END), num_labels=labels)
    torch.manual_seed(2)
    model = getattr(transformers, kind)(config).eval()
    model.save_pretrained(folder)
    return model


def of_library(folder: Path, model: Any, *texts: list[str], batch: int, **options: Any) -> Any:
    """Its logits, of so many texts at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    parts = [[each[at : at + batch] for each in texts] for at in range(0, len(texts[0]), batch)]
    with torch.no_grad():
        found = [model(**tokenizer(*part, padding=True, return_tensors="pt", **options)).logits for part in parts]
    return torch.cat(found)


@pytest.mark.parametrize("bare", [True, False])
def test_a_reranker(tmp_path: Path, bare: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Pairs are as the tokenizer lays them out, with an end, which the library pads with, or without."""
    folder = tmp_path / "theirs"
    own = {"change": without_template} if bare else {"pair": ENDS_PAIR, "pad_token": OF_QWEN[1]}
    model = saved(folder, "Qwen3ForSequenceClassification", labels=1, **own)
    wanted = of_library(folder, model, [QUERY] * 4, PASSAGES, batch=4 if bare else 1)[:, 0].tolist()
    ours = there_and_back(folder)
    told = capsys.readouterr().out
    assert "python -m tools.finetune classify RECIPE.toml" in told
    assert ("pads with" in told) == (not bare)
    assert re.search(r"found +encoder, classifier\n", told)
    assert re.search(r"not used +nothing\n", told)
    for each in (folder, ours):
        (found,) = load(each, "rank", special_tokens="tokens").predict([{"query": QUERY, "passages": PASSAGES}])
        scores = {passage.index: passage.score for passage in found.passages}
        assert [scores[number] for number in range(4)] == pytest.approx(wanted, abs=1e-5)
    values = load(ours, "classify", special_tokens="tokens").predict(PASSAGES)
    alone = of_library(folder, model, PASSAGES, batch=4 if bare else 1)[:, 0].tolist()
    assert [value.value for value in values] == pytest.approx(alone, abs=1e-5)
    if bare:
        assert tokenizer_of(ours).special_ids == {"pad": model.config.pad_token_id}
        with pytest.raises(ValueError, match=r"puts nothing behind a text, as those of generators. Vectors of texts"):
            load(ours, "embed")
        with pytest.raises(ValueError, match=r"nothing is all that it adds. It is good for classes and rankings; for"):
            _ = tokenizer_of(ours).special


@pytest.mark.parametrize(
    "own",
    [{"pad_token": END}, {"pad_token": OF_QWEN[1]}, {"change": without_template}],
    ids=["end-is-padding", "end", "no-end"],
)
def test_what_is_learnt_here_is_the_librarys_class(tmp_path: Path, own: dict[str, Any]) -> None:
    """Also of a tokenizer that puts behind each text what it pads with, or something else, or nothing, as of models
    that were made to go on with a text."""
    folder, rows = tmp_path / "theirs", [("the fox", "fox"), ("a cafe", "none"), ("the the fox", "fox"), ("a", "none")]
    saved(folder, "Qwen3Model", **own)
    (tmp_path / "rows.tsv").write_text("text\tlabel\n" + "".join("\t".join(row) + "\n" for row in rows * 4))
    recipe = [
        *("[data]", f'train = "{tmp_path}/rows.tsv"', f'dev = "{tmp_path}/rows.tsv"'),
        *('text = "text"', 'label = "label"', "[model]", f'start_from = "{folder}"', "[optimizer]", "lr = 1e-3"),
        *("[run]", "epochs = 1", "batch = 8", "tokens_per_rank = 400", "seeds = [0]"),
    ]
    (tmp_path / "small.toml").write_text("\n".join(recipe))
    assert finetune(["classify", str(tmp_path / "small.toml"), "--output", str(tmp_path / "out")]) == 0
    back = tmp_path / "back"
    assert convert(["to-hf", str(tmp_path / "out/seed-0"), str(back)]) == 0
    settings = json.loads((back / "config.json").read_text())
    assert settings["architectures"] == ["Qwen3ForSequenceClassification"]
    assert settings["pad_token_id"] == transformers.AutoTokenizer.from_pretrained(back).pad_token_id
    model, told = transformers.AutoModelForSequenceClassification.from_pretrained(back, output_loading_info=True)
    assert not any(told.values()), told
    texts = [text for text, _ in rows]
    wanted = of_library(back, model.eval(), texts, batch=4, split_special_tokens=True).softmax(1).tolist()
    for each, probabilities in zip(load(tmp_path / "out/seed-0", "classify").predict(texts), wanted, strict=True):
        assert list(each.probabilities.values()) == pytest.approx(probabilities, abs=1e-5)
        assert tuple(each.probabilities) == ("fox", "none")
