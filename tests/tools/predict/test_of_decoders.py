"""Models whose tokenizer has no [CLS] and no [MASK] make vectors as the library does, learn to, and do nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tools.relatives import OF_QWEN, there_and_back, write_qwen_tokenizer
from tools.bench.vs_transformers.infer import VectorLibrary, written_texts
from tools.convert.__main__ import main as convert
from tools.corpus.tokenizers.model_dir import tokenizer_of
from tools.finetune.__main__ import main as finetune
from tools.predict import load

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "EuroBertConfig"), reason="this version of transformers has no EuroBERT"
)
TEXTS = ["the fox", "names of <|endoftext|> and <|im_start|> are text", "cafe\u0301: " + "the " * 30, "\u6f22\u5b57"]
END, PROMPT = OF_QWEN[0], "Instruct: find it\nQuery:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of sentence-transformers, with a prompt, the vector of the last token, and length 1."""
    made = tmp_path_factory.mktemp("of") / "decoder"
    tokenizer = write_qwen_tokenizer(made)
    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    vocab = {"vocab_size": tokenizer.get_vocab_size() + 3, "intermediate_size": 48, "initializer_range": 0.3}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id"), tokenizer.token_to_id(END))
    config = transformers.EuroBertConfig(**sizes, **vocab, **ids, max_position_embeddings=64)
    transformers.EuroBertForMaskedLM(config).save_pretrained(made)
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(parts)
    ]
    (made / "1_Pooling").mkdir()
    for name, content in {
        "modules.json": modules,
        "1_Pooling/config.json": {
            **{"word_embedding_dimension": 32, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
        },
        "sentence_bert_config.json": {"max_seq_length": 24, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {"query": PROMPT}, "default_prompt_name": None},
    }.items():
        (made / name).write_text(json.dumps(content))
    return made


def plain(folder: Path, texts: list[str], prompt: str = "") -> Any:
    """By the library, one by one."""
    model = transformers.EuroBertModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    options = {"split_special_tokens": True, "truncation": True, "max_length": 24, "return_tensors": "pt"}
    with torch.no_grad():
        found = [model(**tokenizer(prompt + text, **options)).last_hidden_state[0, -1] for text in texts]
    return torch.nn.functional.normalize(torch.stack(found)).numpy()


def vectors(folder: Path, **options: Any) -> Any:
    return np.stack([each.vector for each in load(folder, "embed", **options).predict(TEXTS)])


def test_vectors_are_those_of_the_library(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = written_texts(tokenizer_of(folder), np.array([0, 0, 0, 0, 1]), 5)
    assert [len(text.split()) for text in written] == [3] * 5, "and the end"
    texts = [*TEXTS[::2], "  fox "]  # without names
    wanted = plain(folder, [text.strip() for text in texts])
    for batch in (1, 2):  # with which `bench infer` compares
        np.testing.assert_allclose(VectorLibrary(folder).results(texts, batch), wanted, atol=2e-6)
    ours = there_and_back(folder)
    said = capsys.readouterr().out
    assert "python -m tools.finetune embed RECIPE.toml" in said
    assert re.search("not there +pooler: fresh", said), "and no head of next sentences, which its family has not"
    for each in (folder, ours, folder.with_name("decoder-back")):
        np.testing.assert_allclose(vectors(each), plain(folder, TEXTS), atol=2e-6)
        np.testing.assert_allclose(vectors(each, prompt_name="query"), plain(folder, TEXTS, PROMPT), atol=2e-6)


@pytest.mark.parametrize("task", ["fill-mask", "score"])
def test_masks_are_refused_before_there_is_a_model(folder: Path, task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.predict.loading._fill", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=r"has no \[CLS\] and no \[MASK\]"):
        load(folder, task)


def test_it_learns_and_keeps_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    rows = [{"anchor": f"the {a}{b}", "positive": f"a {b}{a} fox"} for a in "abcd" for b in "efgh"]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": tmp_path / "pairs.jsonl", "dev": tmp_path / "pairs.jsonl", "query_prompt": PROMPT}
    recipe = [
        *("[data]", *(f"{name} = {json.dumps(str(value))}" for name, value in data.items())),
        *("[model]", f'start_from = "{folder}"', "[optimizer]", "lr = 1e-3"),
        *("[run]", "epochs = 1", "batch = 8", "tokens_per_rank = 400", "seeds = [0]"),
    ]
    (tmp_path / "small.toml").write_text("\n".join(recipe))
    assert finetune(["embed", str(tmp_path / "small.toml"), "--output", str(tmp_path / "out")]) == 0
    seed = tmp_path / "out/seed-0"
    assert convert(["to-hf", str(seed), str(tmp_path / "back")]) == 0
    assert (tmp_path / "back/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert np.abs(vectors(seed) - vectors(folder)).max() > 1e-4
    np.testing.assert_allclose(vectors(seed), plain(tmp_path / "back", TEXTS), atol=2e-6)


def test_tags_are_not_learnt_and_no_file_is_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tags.txt").write_text("of a line without a tag\n")
    recipe = f'[data]\ntrain = "{tmp_path}/tags.txt"\ndev = "{tmp_path}/tags.txt"\n[model]\nstart_from = "{folder}"\n'
    (tmp_path / "tags.toml").write_text(recipe)
    assert finetune(["tag", str(tmp_path / "tags.toml"), "--output", str(tmp_path / "out")]) == 2
    assert "has no [CLS] and no [MASK]" in capsys.readouterr().err
