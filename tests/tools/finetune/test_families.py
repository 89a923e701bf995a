"""Tags, ranks, vectors and numbers learnt by BERT's relatives: a step on each, and what comes of it says the same as a
run and as a folder of the library."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from models.bert import BertConfig, BertForPreTraining, BertModel, export_huggingface
from models.bert.huggingface import read_model_json
from tensor3d import Cube
from tests.ranks import run_ranks
from tests.tools.relatives import write_mpnet_tokenizer
from tests.tools.runs import journal
from tests.tools.squad.small import COLORS, PIECES, digit_questions, write_vocab
from tools.convert.__main__ import main as convert
from tools.finetune.__main__ import main
from tools.predict import load

FAMILIES: dict[str, dict[str, Any]] = {
    "roberta": {"first_position": 1, "types": 1},
    "mpnet": {"first_position": 2, "types": 0},
    "distilbert": {"types": 0},
    "electra": {"embedding": 8},
    "jina_embeddings_v3": {"types": 1},
    "nomic_bert": {"activation": "silu"},
    "gte": {"types": 1},
    "gemma3_text": {
        **{"encoder": "modern", "types": 0, "window": 5, "rotary_base": 1_000_000.0, "local_rotary_base": 10_000.0},
        **{"eps": 1e-6, "dropout": 0.0, "attention_dropout": 0.0, "activation": "gelu_tanh", "kv_heads": 2},
        **{"head_dim": 12, "pooling": "mean"},
    },
    "qwen3": {
        **{"encoder": "modern", "types": 0, "causal": True, "pooling": "last", "rotary_base": 1_000_000.0},
        **{"eps": 1e-6, "dropout": 0.0, "attention_dropout": 0.0, "activation": "silu", "kv_heads": 2, "head_dim": 12},
    },
    "modernbert": {
        **{"encoder": "modern", "types": 0, "window": 5, "rotary_base": 160_000.0, "local_rotary_base": 10_000.0},
        **{"eps": 1e-5, "dropout": 0.0, "attention_dropout": 0.0, "pooling": "mean"},
    },
}


DROPOUT = {"distilbert": "seq_classif_dropout", "mpnet": "hidden_dropout_prob"}


def language_model(folder: Path, family: str) -> Path:
    """One by chance, with an uncased vocabulary beside it, whose heads of fine-tuning drop out 0.3 of what they read
    (MPNet's as much as all hidden states)."""
    cube = Cube.single()
    cube.manual_seed(1)
    config = BertConfig(
        **{"layers": 2, "hidden": 16, "heads": 2, "inner": 32, "vocab": len(PIECES) + 5, "positions": 32, "std": 0.3},
        **{"family": family, "next_sentence": False, **FAMILIES[family]},
    )
    export_huggingface((BertModel if config.causal else BertForPreTraining)(config, cube), cube, folder)
    told = json.loads((folder / "config.json").read_text())
    told[DROPOUT.get(family, "classifier_dropout")] = 0.3
    (folder / "config.json").write_text(json.dumps(told))
    if family == "mpnet":
        write_mpnet_tokenizer(folder, PIECES)
        return folder
    write_vocab(folder)
    names = ["input_ids", *(["token_type_ids"] if config.types > 1 else []), "attention_mask"]
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_input_names": names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tags() -> str:
    return "\n\n".join(f"{COLORS[n % 5]} O\n{n % 10} B-NUM\nuncommons B-ODD" for n in range(16)) + "\n"


def ranked() -> str:
    rows = [{"query": "what number", "passages": [COLORS[n % 5], f"a {n % 10}"], "grades": [0, 1]} for n in range(16)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def alike() -> str:
    rows = [{"anchor": f"{COLORS[n % 5]} {n % 10}", "positive": f"the {COLORS[n % 5]} {n % 10}"} for n in range(32)]
    return "".join(json.dumps({**row, "score": n % 2}) + "\n" for n, row in enumerate(rows))


def numbers() -> str:
    """Pairs of texts, and how many words the second one has."""
    rows = [f"{COLORS[n % 5]}\tthe {' '.join(COLORS[: n % 4])}\t{n % 4}.5" for n in range(32)]
    return "\n".join(["first\tsecond\tnumber", *rows]) + "\n"


class Task(NamedTuple):
    file: str
    content: str
    question: Any
    """For `tools.predict`."""
    more: tuple[str, ...] = ()
    """Of the section [data]."""

    def recipe(self, folder: Path) -> Path:
        (folder / self.file).write_text(self.content)
        data = [*(f'{part} = "{folder}/{self.file}"' for part in ("train", "dev")), *self.more, "max_length = 24"]
        run = ["[run]", "epochs = 1", "batch = 16", "tokens_per_rank = 512", "seeds = [0]"]
        (folder / "small.toml").write_text("\n".join(["[data]", *data, *run]) + "\n")
        return folder / "small.toml"


TASKS = {
    "tag": Task("train.conll", tags(), {"tokens": ["red", "4", "uncommons"]}, ("stride = 5",)),
    "rank": Task("train.jsonl", ranked(), {"query": "what number", "passages": ["red 4", "blue house", "the 3 2"]}),
    "embed": Task("train.jsonl", alike(), "the red house 4"),
    "regress": Task(
        "train.tsv",
        numbers(),
        {"text": "red", "text_b": "the blue house"},
        ('text = "first"', 'text_b = "second"', 'label = "number"'),
    ),
    "classify": Task(
        "train.tsv",
        numbers(),
        {"text": "red", "text_b": "the blue house"},
        ('text = "first"', 'text_b = "second"', 'label = "number"'),
    ),
    "answer": Task(
        "train.json",
        json.dumps(digit_questions(16)),
        # As many words as the longest answer of the recipe: a folder of the library has no such bound.
        {"question": "what number is in the house?", "context": "blue 4 white"},
        ("stride = 4", "question_length = 8", "answer_length = 3"),
    ),
}


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `test_main.py` are drawn."""
    monkeypatch.setattr("tools.finetune.pictures._can_draw", lambda: False)


@pytest.mark.parametrize(
    ("task", "family", "heads"),
    [
        ("tag", "modernbert", ["prediction_head", "tags"]),
        ("tag", "electra", ["tags"]),
        ("rank", "roberta", ["pooler", "classifier"]),
        ("rank", "distilbert", ["pooler", "classifier"]),
        ("embed", "modernbert", []),
        ("embed", "roberta", []),
        *(
            pytest.param(task, "mpnet", heads, marks=pytest.mark.slow)
            for task, heads in (
                ("embed", []),
                ("tag", ["tags"]),
                ("classify", ["pooler", "classifier"]),
                ("answer", ["answers"]),
            )
        ),
        pytest.param("embed", "gemma3_text", [], marks=pytest.mark.slow),
        pytest.param("embed", "qwen3", [], marks=pytest.mark.slow),
        pytest.param("answer", "jina_embeddings_v3", ["answers"], marks=pytest.mark.slow),
        pytest.param("tag", "nomic_bert", ["tags"], marks=pytest.mark.slow),
        pytest.param("classify", "gte", ["pooler", "classifier"], marks=pytest.mark.slow),
        ("regress", "modernbert", ["prediction_head", "classifier"]),
        ("regress", "electra", ["pooler", "classifier"]),
    ],
)
def test_a_run_and_its_folder_of_the_library_say_the_same(
    task: str, family: str, heads: list[str], tmp_path: Path
) -> None:
    start = ["--model.start-from", str(language_model(tmp_path / "start", family)), "--model.vocab", "None"]
    assert main([task, str(TASKS[task].recipe(tmp_path)), *start, "--output", str(tmp_path / "out")]) == 0
    seed = tmp_path / "out" / "seed-0"
    told = read_model_json(seed)
    assert (sorted(told.heads), told.config.family) == (sorted(heads), family)
    assert convert(["to-hf", str(seed), str(tmp_path / "back")]) == 0
    if heads not in ([], ["answers"]):  # of which nothing is dropped out
        back = json.loads((tmp_path / "back" / "config.json").read_text())
        assert told.facts["classifier_dropout"] == 0.3
        assert back[DROPOUT.get(family, "classifier_dropout")] == 0.3
        assert family != "mpnet" or "classifier_dropout" not in back, "its library has no such setting"
    asked = "classify" if task == "regress" else task
    question, folders = TASKS[task].question, (seed, tmp_path / "back")
    ours, theirs = (load(folder, asked).predict([question])[0].as_json() for folder in folders)
    assert ours == theirs, "to the last digit that is shown"


def _tuned(folder: Path, start: Path, name: str, *more: str) -> int:
    """`main` here, or on a rank whose process group stands."""
    if torch.distributed.is_initialized():
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        os.environ.update(WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(rank))
    options = ["--model.start-from", str(start), "--model.vocab", "None", "--output", str(folder / name), *more]
    return main(["tag", str(folder / "small.toml"), *options])


def _losses(seed: Path) -> list[float]:
    return [record["loss"] for record in journal(seed, "step")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=pytest.mark.long(reason="of these packs are held to the library"))
        if each in ("mpnet", "jina_embeddings_v3", "nomic_bert", "gte", "gemma3_text", "qwen3")
        else each
        for each in FAMILIES
    ],
)
def test_packed_padded_and_on_a_cube_they_learn_the_same(family: str, tmp_path: Path) -> None:
    TASKS["tag"].recipe(tmp_path)
    start = language_model(tmp_path / "start", family)
    quiet = ("--model.dropout", "0", "--model.attention-dropout", "0", "--run.evaluate-every", "0", "--run.batch", "8")
    assert _tuned(tmp_path, start, "packed", *quiet) == 0
    assert _tuned(tmp_path, start, "padded", *quiet, "--run.padding", "padded") == 0
    on_cube = (*quiet, "--cube", "1x2x1", "--run.tokens-per-rank", "48")
    assert run_ranks(2, _tuned, tmp_path, start, "cube", *on_cube) == [0, 0]
    packed = _losses(tmp_path / "packed/seed-0")
    assert len(packed) > 1
    for other in ("padded", "cube"):
        assert _losses(tmp_path / other / "seed-0") == pytest.approx(packed, rel=1e-5), other
