"""Pre-training that goes on from a RoBERTa, an MPNet and a ModernBERT of the library, on a text of one's own and with
their tokenizers, or begins anew; and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from models.bert import BertConfig, BertForPreTraining, BertModel, export_huggingface, open_weights
from tensor3d import Cube
from tensor3d.data.masking import SpecialTokens
from tests.ranks import run_ranks
from tests.tools.corpus.tokenized import PIECES, write_vocabulary
from tests.tools.relatives import write_mpnet_tokenizer, write_qwen_tokenizer
from tests.tools.runs import WORDS, arguments, journal, on_rank, write_text
from tools import pretrain
from tools.convert.__main__ import main as convert
from tools.corpus.__main__ import main as corpus
from tools.corpus.tokenizers.model_dir import tokenizer_of
from tools.predict import load
from tools.training.config import ModelConfig, TrainConfig
from tools.training.resume import weights_for

tokenizers = pytest.importorskip("tokenizers")

SIZES: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "inner": 64, "eps": 1e-5, "next_sentence": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "roberta": {"family": "roberta", "first_position": 2, "types": 1, "positions": 64},
    "mpnet": {"family": "mpnet", "first_position": 2, "types": 0, "positions": 64},
    "gte": {"family": "gte", "types": 1, "positions": 64, "rotary_factor": 1.5},
    "gemma3_text": {
        **{"family": "gemma3_text", "encoder": "modern", "types": 0, "positions": 256, "window": 9, "global_every": 2},
        **{"rotary_base": 1_000_000.0, "local_rotary_base": 10_000.0, "dropout": 0.0, "attention_dropout": 0.0},
        **{"activation": "gelu_tanh", "head_dim": 12, "kv_heads": 2, "pooling": "score"},
    },
    "modernbert": {
        **{"family": "modernbert", "encoder": "modern", "types": 0, "positions": 256, "window": 9, "global_every": 3},
        **{"rotary_base": 160_000.0, "local_rotary_base": 10_000.0, "dropout": 0.0, "attention_dropout": 0.0},
    },
}
NAMES = {
    "roberta": {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"},
    "mpnet": {"mask": "<mask>"},
    "gte": {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"},
    "gemma3_text": {"pad": "<pad>", "sep": "<eos>", "cls": "<bos>", "unk": "<unk>", "mask": "<mask>"},
    "modernbert": {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "mask": "[MASK]"},
}


class Start(NamedTuple):
    folder: Path
    """Of the model."""
    recipe: Path
    """Its samples lie beside it."""


def write_tokenizer(folder: Path, family: str, text: Path) -> int:
    """Pieces of bytes, as GPT-2 has them, with the special tokens and the layout of pairs of the family; MPNet's are
    words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    if family == "mpnet":
        return len(write_mpnet_tokenizer(folder, (*PIECES, *WORDS)))
    made, names = Tokenizer(models.BPE()), NAMES[family]
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(names.values()), initial_alphabet=alphabet, show_progress=False
    )
    made.train([str(text)], trainer)
    ends = [(names[each], made.token_to_id(names[each])) for each in ("sep", "cls")]
    if family in ("roberta", "gte"):
        made.post_processor = processors.RobertaProcessing(*ends)
    else:
        pair = f"{names['cls']} $A {names['sep']} $B {names['sep']}"
        made.post_processor = processors.TemplateProcessing(
            single=pair.replace(f" $B {names['sep']}", ""), pair=pair, special_tokens=ends
        )
    made.save(str(folder / "tokenizer.json"))
    settings = {f"{role}_token": name for role, name in names.items()}
    kind = "RobertaTokenizer" if family in ("roberta", "gte") else "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **settings}))
    return int(made.get_vocab_size())


def write_model(folder: Path, vocab: int, family: str, **changes: Any) -> None:
    cube = Cube.single()
    cube.manual_seed(3)
    model = BertForPreTraining(BertConfig(vocab=vocab, **(SIZES | FAMILIES[family] | changes)), cube)
    export_huggingface(model, cube, folder, settings={"pad_token_id": 1, "mine": "kept"})


SLOW_MPNET = pytest.param("mpnet", marks=pytest.mark.slow)
SLOW_GTE = pytest.param("gte", marks=pytest.mark.slow)
SLOW_GEMMA = pytest.param("gemma3_text", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["roberta", SLOW_MPNET, "modernbert", SLOW_GEMMA])
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """A model by chance, and samples of a text by its tokenizer."""
    root, family = tmp_path_factory.mktemp(request.param), request.param
    text, folder = root / "text.txt", root / "model"
    write_text(text)
    folder.mkdir()
    write_model(folder, write_tokenizer(folder, family, text), family)
    made = {name: str(root / name) for name in ("documents", "tokenizer", "ids", "samples")}
    for step in (
        ["extract", str(text), "--output", made["documents"]],
        ["tokenizer", "--tokenizer-file", str(folder / "tokenizer.json"), "--output", made["tokenizer"]],
        ["tokenize", "--docs", made["documents"], "--tokenizer", made["tokenizer"], "--output", made["ids"]],
        ["samples", "--corpora", made["ids"], "--single-texts", "--max-length", "32", "--output", made["samples"]],
    ):
        assert corpus([*step, "--workers", "1"]) == 0
    model = {**SIZES, **FAMILIES[family]}
    del model["next_sentence"]
    lines = [f"{name} = {json.dumps(value)}" for name, value in model.items()]
    data = ["[data]", f'source = "{made["samples"]}"', 'objective = "masked-lm"', "max_length = 32", "capacity = 64"]
    rest = ["[batch]", "global_batch = 8", "[run]", "steps = 2", "evaluate_every = 0", "checkpoint_every = 2"]
    (root / "recipe.toml").write_text("\n".join([*data, "[model]", *lines, *rest]))
    return Start(folder, root / "recipe.toml")


def went_on(start: Start, output: Path, *more: str) -> int:
    samples = start.recipe.parent / "samples"
    return pretrain.main(arguments(start.recipe, output, "--start-from", str(start.folder), *more, corpus=samples))


def with_rows(start: Start, folder: Path, rows: int) -> Path:
    """A model by chance of the same kind and tokenizer, with so many rows in its embedding."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((start.folder / name).read_bytes())
    write_model(folder, rows, open_weights(start.folder).config.family)
    return folder


def test_it_goes_on_and_comes_out_as_it_came_in(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a step of no size, all but the weights' moments: tensors, settings, tokenizer and its layout of pairs."""
    still = ("--run.steps", "1", "--run.checkpoint-every", "1", "--optimizer.lr", "1e-30")
    assert went_on(start, tmp_path / "run", *still) == 0
    assert "loaded: encoder, masked_lm; the optimiser's moments begin at 0\n" in capsys.readouterr().err
    assert convert(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    before, after = (load_file(each / "model.safetensors") for each in (start.folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.allclose(after[name], tensor, rtol=0, atol=1e-20) for name, tensor in before.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (start.folder / "config.json").read_text()
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (start.folder / name).read_bytes()
    assert tokenizer_of(tmp_path / "run").layout == tokenizer_of(start.folder).layout
    # Gone on with, the run keeps what it has: the model that it began with may be gone.
    assert pretrain.main([str(start.recipe), "--resume", str(tmp_path / "run"), "--run.steps", "2"]) == 0
    assert tokenizer_of(tmp_path / "run").layout == tokenizer_of(start.folder).layout
    assert (tmp_path / "run" / "huggingface" / "config.json").is_file()


def test_what_does_not_fit_is_refused_by_name(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family = open_weights(start.folder).config.family

    def refused(*more: str, folder: Path = start.folder) -> str:
        assert went_on(Start(folder, start.recipe), tmp_path / "none", *more) == 2
        assert not (tmp_path / "none").exists()
        return capsys.readouterr().err

    told = refused("--data.objective", "masked-lm+next-sentence")
    assert f"no head for next sentences, as no model of the family '{family}' has" in told
    assert 'Set data.objective = "masked-lm"' in told
    assert "has layers = 2, the recipe's 3. Set model.layers = 2, model.inner = 64, or" in refused(
        "--model.layers", "3", "--model.inner", "96"
    )
    if family in ("roberta", "mpnet"):
        long = ("--data.max-length", "65", "--data.capacity", "65", "--model.positions", "65")
        assert "has positions for sequences of 64 tokens, and data.max_length = 65" in refused(*long)
    else:
        base = FAMILIES[family]["rotary_base"]
        assert f"has rotary_base = {base}, the recipe's None. Set model.rotary_base" in refused(
            "--model.rotary-base", "None"
        )
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((start.folder / name).read_bytes())
    assert "bare has no tokenizer" in refused("--dry-run", folder=bare)
    pieces = tokenizer_of(start.folder).vocab_size
    rows = pieces + 8
    larger = with_rows(start, tmp_path / "larger", rows)
    told = f"has {rows} rows in its embedding, and its tokenizer {pieces} pieces. Set model.vocab_rows = {rows}."
    assert told in refused(folder=larger)
    assert told in refused("--model.vocab-rows", str(pieces + 9), folder=larger)
    few = refused("--model.vocab-rows", str(pieces - 1), folder=larger)
    assert f"must be at least data.vocab_size={pieces}, the pieces of the tokenizer. Got {pieces - 1}. Leave" in few


def test_a_tokenizer_without_masks_is_refused(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_rows(start, tmp_path / "other", 300)
    write_qwen_tokenizer(folder)
    assert went_on(start._replace(folder=folder), tmp_path / "run") == 2
    assert "has no [CLS] and no [MASK]" in capsys.readouterr().err


def test_a_model_that_sees_no_later_tokens_is_refused(tmp_path: Path) -> None:
    """But by its tokenizer first, of which no setting makes another."""
    cube = Cube.single()
    write_mpnet_tokenizer(tmp_path, PIECES)
    config = BertConfig(
        **{**SIZES, "family": "qwen3", "encoder": "modern", "types": 0, "vocab": 300},
        **{"activation": "silu", "causal": True, "pooling": "last"},
    )
    export_huggingface(BertModel(config, cube), cube, tmp_path)
    told = r"sees no later tokens.*into the config.json of its Hugging Face folder \(before tools.convert from-hf"
    with pytest.raises(ValueError, match=told):
        weights_for(tmp_path, TrainConfig(), None)
    write_qwen_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"has no \[CLS\] and no \[MASK\]"):
        weights_for(tmp_path, TrainConfig(), None)


def test_a_model_with_more_rows_than_pieces_goes_on(start: Start, tmp_path: Path) -> None:
    """As published ones have them; they come out as they came in."""
    rows = tokenizer_of(start.folder).vocab_size + 8
    larger = with_rows(start, tmp_path / "larger", rows)
    options = ("--model.vocab-rows", str(rows), "--run.steps", "1", "--run.checkpoint-every", "1")
    still = (*options, "--optimizer.lr", "1e-30")
    assert went_on(Start(larger, start.recipe), tmp_path / "run", *still) == 0
    assert convert(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    before, after = (load_file(each / "model.safetensors") for each in (larger, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.allclose(after[name], tensor, rtol=0, atol=1e-20) for name, tensor in before.items())


def test_a_rotary_base_and_a_length_of_its_own_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No weight is shaped by them."""
    from tools.training.resume import _changed

    old = {"rotary_base": 10_000.0, "local_rotary_base": None, "positions": 512}
    new = BertConfig(layers=1, hidden=8, heads=1, encoder="modern", rotary_base=160_000.0, positions=128)
    assert _changed(old, new) == (
        "; model.rotary_base = 160000.0, was 10000.0; the folder of the run will say that it takes 128 tokens, and "
        "this one says 512: model.positions = 512 keeps that"
    )


@pytest.mark.slow
def test_on_a_cube(start: Start, tmp_path: Path) -> None:
    """The same losses as on one process."""
    samples = start.recipe.parent / "samples"
    kept = ("--start-from", str(start.folder), "--model.dropout", "0", "--model.attention-dropout", "0")
    found = []
    for number, (ranks, cube) in enumerate(((1, "1x1x1"), (4, "1x2x2"))):
        run = tmp_path / str(number)
        assert run_ranks(ranks, on_rank, start.recipe, run, [*kept, "--cube", cube], samples) == [0] * ranks
        found.append([line["loss"] for line in journal(run, "step")])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("start", [SLOW_MPNET, SLOW_GTE], indirect=True)
def test_begun_anew_resumed_on_another_cube_and_read_by_the_library(start: Start, tmp_path: Path) -> None:
    """Which finds each tensor, and says of a masked place what the run says."""
    transformers = pytest.importorskip("transformers")
    if start.folder.parent.name.startswith("gte") and not hasattr(transformers, "GteConfig"):
        pytest.skip("this version of transformers has no GTE")
    run, samples = tmp_path / "run", start.recipe.parent / "samples"
    for more in (["--cube", "1x2x1"], ["--resume", str(run), "--cube", "1x1x2", "--run.steps", "4"]):
        assert run_ranks(2, on_rank, start.recipe, run, more, samples) == [0, 0]
    assert convert(["to-hf", str(run), str(tmp_path / "out")]) == 0
    model, told = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = f"{NAMES[open_weights(run).config.family]['mask']} cube axis face"
    ids = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        logits = model(**ids).logits[0, ids.input_ids[0].tolist().index(tokenizer.mask_token_id)]
    (found,) = load(run, "fill-mask", k=3).predict([text])
    wanted = logits.softmax(0)[[piece.id for piece in found.masks[0]]]
    assert [piece.probability for piece in found.masks[0]] == pytest.approx(wanted.tolist(), abs=2e-6)


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        ({"family": "roberta", "first_position": 2, "types": 1}, r"Set model\.first_position = 1\."),
        ({"family": "mpnet", "first_position": 2}, "Take one whose padding has the id 1: MPNet's own .* bpe-bytes"),
        ({"family": "roberta", "first_position": 1, "types": 1}, None),
        ({}, None),
    ],
)
def test_positions_begin_behind_padding(model: dict[str, Any], remedy: str | None) -> None:
    plan: Any = SimpleNamespace(recipe=TrainConfig(model=ModelConfig(**model)))
    text: Any = SimpleNamespace(special=SpecialTokens(vocab_size=9, pad=0, cls=2, sep=3, mask=4))
    if remedy is None:
        pretrain.check_padding(plan, text)
        return
    told = "model.first_position = 2 of family=.* and padding has the id 0 in the tokenizer of the corpus. "
    with pytest.raises(ValueError, match=told + remedy):
        pretrain.check_padding(plan, text)


@pytest.mark.parametrize("start", [SLOW_MPNET], indirect=True)
def test_a_run_is_refused_where_positions_do_not_begin_behind_padding(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run that begins anew: the library would number them so."""
    write_vocabulary(tmp_path / "vocab.txt", (*PIECES, *(word for word in WORDS if word not in PIECES)))
    documents = str(start.recipe.parent / "documents")
    made = {name: str(tmp_path / name) for name in ("vocab.txt", "tokenizer", "ids", "samples")}
    for step in (
        ["tokenizer", "--vocab-file", made["vocab.txt"], "--output", made["tokenizer"]],
        ["tokenize", "--docs", documents, "--tokenizer", made["tokenizer"], "--output", made["ids"]],
        ["samples", "--corpora", made["ids"], "--single-texts", "--max-length", "32", "--output", made["samples"]],
    ):
        assert corpus([*step, "--workers", "1"]) == 0
    words = arguments(start.recipe, tmp_path / "run", corpus=tmp_path / "samples")
    for more in ([], ["--prepare-only"]):
        assert pretrain.main([*words, *more]) == 2
        told = capsys.readouterr().err
        assert "model.first_position = 2 of family='mpnet'" in told
        assert "padding has the id 0 in the tokenizer of the corpus" in told
    assert not (tmp_path / "run").exists()
