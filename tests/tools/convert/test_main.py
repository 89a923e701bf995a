"""Models of the Hugging Face library in and out: the same weights to the bit, the same ids, nothing half-written."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Library
from tokenizers import processors

from models.bert import BertConfig, BertForPreTraining
from models.bert.huggingface import write_model_json
from tensor3d import Cube, checkpoint
from tests.ranks import run_ranks
from tests.tools.corpus.tokenized import CASED, PIECES, TEXTS, write_sentencepiece, write_vocabulary
from tests.tools.relatives import write_qwen_tokenizer
from tools.convert.__main__ import FromHuggingFace, ToHuggingFace, check_new, main, new_folder
from tools.corpus.quick.sentencepiece_tokenizer import train_tokenizer
from tools.corpus.tokenizers import Kind, install_tokenizer, load_tokenizer
from tools.corpus.tokenizers.export import library_of_sentencepiece, write_tokenizer
from tools.corpus.tokenizers.model_dir import tokenizer_of
from tools.predict import load

transformers = pytest.importorskip("transformers")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
SIZES = {
    "vocab_size": len(PIECES),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "hidden_act": "gelu_new",
    "initializer_range": 0.2,
}
MORE = (
    "\u00c9t\u00e9 e\u0301t\u0101 \u6f22\u5b57\u3002 \u00bd na\u00efve\u00df \ufb01x\u200b!",
    *(" a  b ", "", "\u0130s\u3000\U0001f600", "T\u0302he"),
)
ODD = (
    "aA fF.xX sS'Z \t\n\u3000\u200b\x00\x1c\u0301\u00e9\u00c9\u00df\u0130\u03a3\u03c3\u03c2\u6f22\ua4e4\U0001f600"
    "_-#12\u00bd\ufb01\u01c5\uff71\uff9e\u2026\uac00"
)


def library_folder(folder: Path, kind: str = "BertForPreTraining", **sizes: Any) -> Path:
    """As the library saves a model and its tokenizer, with the vocab.txt that published ones have beside them."""
    torch.manual_seed(5)
    model = getattr(transformers, kind)(transformers.BertConfig(**{**SIZES, **sizes}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    vocabulary = write_vocabulary(folder / "vocab.txt")
    transformers.BertTokenizer(str(vocabulary), do_lower_case=True).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library_folder(tmp_path_factory.mktemp("library") / "model")


def converted(source: Path, middle: Path, output: Path, *more: str) -> None:
    assert main(["from-hf", str(source), str(middle)]) == 0
    assert main(["to-hf", str(middle), str(output), *more]) == 0


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


# --- there and back ---------------------------------------------------------------------------------------------------


def test_a_model_comes_back_to_the_bit(library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    converted(library, tmp_path / "ours", tmp_path / "back")
    said = capsys.readouterr().out
    assert "encoder, pooler, masked_lm, next_sentence" in said
    assert "2 layers, hidden 32, 4 heads, inner 48, 40 positions, gelu_tanh" in said
    assert_same(weights(tmp_path / "back"), weights(library))
    for name in TOKENIZER_FILES:
        assert (tmp_path / "back" / name).read_bytes() == (library / name).read_bytes()
    assert (tmp_path / "ours" / "huggingface" / "config.json").read_bytes() == (library / "config.json").read_bytes()
    told = json.loads((tmp_path / "ours" / "model.json").read_text())
    assert told["heads"] == ["pooler", "masked_lm", "next_sentence"]
    assert told["facts"]["max_length"] == 40
    loaded, info = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values())
    assert loaded.config.hidden_act == "gelu_new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "ours"]


def test_only_what_is_there_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = library_folder(tmp_path / "library", "BertForMaskedLM")
    # Once more, with a type that must not be lost and a tensor that nobody asks for.
    content = {name: tensor.to(torch.bfloat16) for name, tensor in weights(library).items()}
    save_file({**content, "adapter.weight": torch.zeros(2)}, library / "model.safetensors", {"format": "pt"})
    converted(library, tmp_path / "ours", tmp_path / "back")
    said = capsys.readouterr().out
    assert "not there  pooler, next_sentence: fresh" in said
    assert "not used   adapter.weight" in said
    assert json.loads((tmp_path / "ours" / "model.json").read_text())["heads"] == ["masked_lm"]
    step = tmp_path / "ours" / "checkpoints" / "step-00000000"
    assert "pooler" not in (step / "tensors.json").read_text()
    assert_same(weights(tmp_path / "back"), content)
    assert (
        main(
            ["to-hf", str(tmp_path / "ours" / "checkpoints" / "step-00000000"), str(tmp_path / "f"), "--dtype", "fp32"]
        )
        == 0
    )
    assert_same(weights(tmp_path / "f"), {name: tensor.float() for name, tensor in content.items()})


def test_a_head_may_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as a decoder that is not the embedding. What is not taken over is told."""
    library = library_folder(tmp_path / "library")
    content = weights(library)
    untied = {"cls.predictions.decoder.weight": content["bert.embeddings.word_embeddings.weight"] + 1}
    places = {"bert.embeddings.position_ids": torch.arange(40)[None]}
    # Read tensors may lie in the file itself, which must not be written over.
    save_file({**content, **untied, **places}, library / "new.safetensors", {"format": "pt"})
    (library / "new.safetensors").replace(library / "model.safetensors")
    (library / "1_Pooling").mkdir()
    (library / "1_Pooling" / "config.json").touch()
    (library / "2_Normalize").mkdir()  # empty, as is usual
    (library / "modules.json").touch()
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert "--heads" in refused(capsys, "from-hf", library, ours)
    assert "has no answers. Its heads are: pooler, masked_lm, next" in refused(
        capsys, "from-hf", library, ours, "--heads", "answers"
    )
    assert main(["from-hf", str(library), str(ours), "--heads", "pooler", "next_sentence"]) == 0
    said = capsys.readouterr().out
    assert "tokenizer.json: " in said
    assert "not there    masked_lm: fresh" in said
    assert "no weights   bert.embeddings.position_ids: left out" in said
    assert "left behind  1_Pooling/, modules.json\n" in said
    assert json.loads((ours / "model.json").read_text())["heads"] == ["pooler", "next_sentence"]
    # The folder of checkpoints means the model too.
    assert main(["to-hf", str(ours / "checkpoints"), str(back)]) == 0
    assert_same(weights(back), {name: part for name, part in content.items() if not name.startswith("cls.pred")})


def test_what_makes_a_sentences_vector_goes_in_and_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = library_folder(tmp_path / "library")
    hidden = json.loads((library / "config.json").read_text())["hidden_size"]
    (library / "1_Pooling").mkdir()
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    library_type = "sentence_transformers.models"
    modules = [{"idx": n, "path": path, "type": f"{library_type}.{kind}"} for n, (path, kind) in enumerate(kinds)]
    pooling = {"word_embedding_dimension": hidden, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": {"max_seq_length": 12},
        "config_sentence_transformers.json": {"prompts": {"q": "q: "}, "default_prompt_name": None},
    }
    for name, content in files.items():
        (library / name).write_text(json.dumps(content))
    ours, back = tmp_path / "ours", tmp_path / "back"
    converted(library, ours, back)
    said = capsys.readouterr().out
    assert re.search(r"vectors +pooling cls, at most 12 tokens, length 1\n", said)
    assert "left behind" not in said
    texts = ["the fox went over the hill", "a hill " * 20]
    wanted = [one.vector for one in load(library, "embed").predict(texts)]
    for folder in (ours, ours / "checkpoints", back):
        found = load(folder, "embed").predict(texts)
        for vector, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(torch.tensor(other.vector), torch.tensor(vector), atol=1e-6, rtol=0)
    for name in files:
        assert (back / name).read_bytes() == (library / name).read_bytes()


def with_dense(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Two dense layers behind pooling, of which the second is in another type; their weights, by file."""
    modules = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Dense", "Dense"))
    listed = [
        {"idx": n, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(modules)
    ]
    hidden, tanh = SIZES["hidden_size"], "torch.nn.modules.activation.Tanh"
    files: dict[str, Any] = {
        "modules.json": listed,
        "1_Pooling/config.json": {"word_embedding_dimension": hidden, "pooling_mode_mean_tokens": True},
        "2_Dense/config.json": {"in_features": hidden, "out_features": 50, "bias": True, "activation_function": tanh},
        "3_Dense/config.json": {"in_features": 50, "out_features": 7, "bias": False, "activation_function": tanh},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    torch.manual_seed(2)
    first = {"linear.weight": torch.randn(50, hidden), "linear.bias": torch.randn(50)}
    second = {"linear.weight": torch.randn(7, 50).to(torch.bfloat16)}
    torch.save(first, folder / "2_Dense/pytorch_model.bin")
    save_file(second, folder / "3_Dense/model.safetensors")
    return {"2_Dense": first, "3_Dense": second}


def test_dense_layers_go_in_and_out_to_the_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = library_folder(tmp_path / "library")
    dense = with_dense(library)
    ours, back, half = (tmp_path / name for name in ("ours", "back", "half"))
    assert main(["from-hf", str(library), str(ours), "--heads", "pooler"]) == 0  # dense layers are no choice
    said = capsys.readouterr().out
    assert re.search(r"found +encoder, pooler, dense\n", said)
    assert re.search(r"vectors +pooling mean, dense to 50 \(tanh\), dense to 7 \(tanh\), at most 40 tokens\n", said)
    assert "left behind" not in said
    assert json.loads((ours / "model.json").read_text())["heads"] == ["pooler"]
    assert [path.name for path in ours.glob("*_Dense/*")] == ["config.json"] * 2, "weights are in the checkpoint"
    assert main(["to-hf", str(ours), str(back)]) == 0
    assert "dense was left out" not in capsys.readouterr().out
    for name, content in dense.items():
        assert_same(weights(back / name), content)
        assert (back / name / "config.json").read_bytes() == (library / name / "config.json").read_bytes()
    assert main(["to-hf", str(library), str(half), "--dtype", "fp16"]) == 0
    assert_same(weights(half / "3_Dense"), {"linear.weight": dense["3_Dense"]["linear.weight"].to(torch.float16)})
    texts = ["the fox went over the hill", "a hill " * 20]
    wanted = [one.vector for one in load(library, "embed").predict(texts)]
    for folder in (ours, ours / "checkpoints", back):
        for vector, other in zip(wanted, load(folder, "embed").predict(texts), strict=True):
            torch.testing.assert_close(torch.tensor(other.vector), torch.tensor(vector), atol=1e-6, rtol=0)
    # What is not there is told before anything is written.
    (library / "2_Dense/pytorch_model.bin").unlink()
    assert "2_Dense has no weights. It needs one of" in refused(capsys, "from-hf", library, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_weights_that_a_type_cannot_hold_are_refused_of_dense_layers_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = library_folder(tmp_path / "library")
    large = with_dense(library)["2_Dense"]
    large["linear.bias"][3] = 1e6
    torch.save(large, library / "2_Dense/pytorch_model.bin")
    told = refused(capsys, "to-hf", library, tmp_path / "half", "--dtype", "fp16")
    assert "bias of a dense layer has values that fp16 cannot hold. Export as fp32 or bf16." in told


def test_a_classifier_of_tokens_keeps_its_tags(tmp_path: Path) -> None:
    names = {"id2label": {0: "O", 1: "B-PER", 2: "I-PER"}, "label2id": {"O": 0, "B-PER": 1, "I-PER": 2}}
    library = library_folder(tmp_path / "library", "BertForTokenClassification", **names, classifier_dropout=0.3)
    converted(library, tmp_path / "ours", tmp_path / "back")
    told = json.loads((tmp_path / "ours" / "model.json").read_text())
    assert (told["heads"], told["labels"], told["problem"]) == (["tags"], ["O", "B-PER", "I-PER"], "tag")
    assert_same(weights(tmp_path / "back"), weights(library))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["architectures"], config["id2label"]["1"]) == (["BertForTokenClassification"], "B-PER")
    assert (config["classifier_dropout"], "problem_type" in config) == (0.3, False)


def test_a_classifier_keeps_its_labels(tmp_path: Path) -> None:
    labels = {"id2label": {0: "bad", 1: "so-so", 2: "good"}, "label2id": {"bad": 0, "so-so": 1, "good": 2}}
    library = library_folder(tmp_path / "library", "BertForSequenceClassification", **labels, classifier_dropout=0.3)
    converted(library, tmp_path / "ours", tmp_path / "back")
    told = json.loads((tmp_path / "ours" / "model.json").read_text())
    assert (told["heads"], told["labels"], told["problem"]) == (
        ["pooler", "classifier"],
        ["bad", "so-so", "good"],
        "classify",
    )
    assert_same(weights(tmp_path / "back"), weights(library))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["id2label"]["1"], config["classifier_dropout"]) == ("so-so", 0.3)
    # Heads that no class of the library has together are chosen from.
    assert main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "encoder"), "--heads", "pooler"]) == 0
    assert json.loads((tmp_path / "encoder" / "config.json").read_text())["architectures"] == ["BertModel"]


def _convert(library: Path, folder: Path) -> None:
    cube = Cube(2, 2, 1)
    FromHuggingFace(source=library, output=folder / "ours", cube="2x2x1").convert(cube)
    ToHuggingFace(source=folder / "ours", output=folder / "back", cube="2x2x1").convert(cube)
    with pytest.raises(ValueError, match="is not empty"):
        ToHuggingFace(source=folder / "ours", output=folder / "back", cube="2x2x1").convert(cube)
    with pytest.raises(ValueError, match="has no tokenizer"):
        FromHuggingFace(source=folder / "bare", output=folder / "none", cube="2x2x1").convert(cube)


@pytest.mark.slow
def test_any_cube_writes_the_same(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    library = library_folder(tmp_path_factory.mktemp("dense") / "model")
    dense = with_dense(library)
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).write_bytes((library / name).read_bytes())
    run_ranks(4, _convert, library, tmp_path)
    assert_same(weights(tmp_path / "back"), weights(library))
    for name, content in dense.items():
        assert_same(weights(tmp_path / "back" / name), content)
    # What fails leaves nothing behind, also no draft.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "bare", "ours"]


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err


def test_a_folder_takes_its_place_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, link, cube = tmp_path / "real", tmp_path / "link", Cube.single()
    real.mkdir()
    link.symlink_to(real)
    with new_folder(link, cube) as draft:
        (draft / "file").touch()
    assert link.is_symlink()
    assert (real / "file").exists()
    # A scheduler ends the process.
    before = signal.getsignal(signal.SIGTERM)

    def killed() -> None:
        with new_folder(tmp_path / "new", cube) as draft:
            (draft / "file").touch()
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        killed()
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]
    (real / "file").unlink()
    monkeypatch.chdir(real)
    with pytest.raises(ValueError, match=r"\. is the current folder.*Name a folder inside"):
        check_new(Path("."))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "is_mount", lambda _: True)
    with pytest.raises(ValueError, match="real is a mount point"):
        check_new(real)


def test_what_cannot_be_converted_is_told(library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full, nothing = tmp_path / "full", tmp_path / "out"
    full.mkdir()
    (full / "file").touch()
    assert "is not empty. Name another folder." in refused(capsys, "from-hf", library, full)
    assert "is a file" in refused(capsys, "from-hf", library, full / "file")
    assert "is not there: a model is a folder" in refused(capsys, "from-hf", tmp_path / "nowhere", nothing)
    assert "has no config.json: it is no Hugging Face folder" in refused(capsys, "from-hf", full, nothing)
    (full / "config.json").symlink_to("../../blobs/4d7a")
    assert "a link to ../../blobs/4d7a, which is not: copy what" in refused(capsys, "from-hf", full, nothing)
    (full / "config.json").unlink()
    assert "is no folder of a model" in refused(capsys, "to-hf", full, nothing)
    told = refused(capsys, "from-hf", library, nothing, "--cube", "1x2x1")
    assert "--nproc-per-node=2 -m tools.convert from-hf" in told
    assert "heads must divide by y=3" in refused(capsys, "from-hf", library, nothing, "--cube", "1x3x1")
    short = tmp_path / "short"
    short.mkdir()
    for file in library.iterdir():
        (short / file.name).write_bytes(file.read_bytes())
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"vocab_size": 50}))
    told = refused(capsys, "from-hf", short, nothing)
    assert f"config.json says vocab_size 50, and the weights have {len(PIECES)} entries" in told
    (short / "config.json").write_text(json.dumps(config))
    (short / "model.safetensors").write_bytes((library / "model.safetensors").read_bytes()[:-100])
    assert "cut off or damaged" in refused(capsys, "from-hf", short, nothing)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "short"]


# --- tokenizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "lowercase"), [("unigram", False), ("unigram", True), ("bpe", False), ("bpe", True)])
def test_a_sentencepiece_model_has_the_same_ids_as_json(tmp_path: Path, model: Any, lowercase: bool) -> None:
    file = tmp_path / "tokenizer.model"
    train_tokenizer([*TEXTS, *MORE], file, vocab_size=60, model=model, lowercase=lowercase)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(file))
    made = library_of_sentencepiece(file)
    assert not isinstance(made, str)
    draw = random.Random(3)
    texts = [*TEXTS, *MORE, *("".join(draw.choices(ODD, k=draw.randrange(40))) for _ in range(3000))]
    for text in texts:
        assert made.encode(text, add_special_tokens=False).ids == theirs.encode(text), ascii(text)


def installed(folder: Path, kind: Kind) -> Path:
    """The folder of a model with nothing but a tokenizer of ours."""
    (folder / "tokenizer").mkdir(parents=True)
    file = folder / "file"
    if kind == "sentencepiece":
        train_tokenizer([*TEXTS, *MORE], file, vocab_size=60)
    else:
        write_vocabulary(file, CASED)
    if kind == "json":
        made = install_tokenizer("wordpiece", file, folder / "tokenizer")
        made.library.save(str(file))  # type: ignore[attr-defined]
        (folder / "tokenizer" / "vocab.txt").unlink()
    install_tokenizer(kind, file, folder / "tokenizer")
    file.unlink()
    return folder


@pytest.mark.parametrize("of_decoder", [False, True])
def test_a_eurobert_of_ours_has_the_ids_of_our_tokenizer(tmp_path: Path, of_decoder: bool) -> None:
    """Where the library's defaults are those of its own. A tokenizer of a decoder has two of them."""
    source = installed(tmp_path / "ours", "wordpiece")
    if of_decoder:
        write_qwen_tokenizer(tmp_path / "qwen")
        install_tokenizer("json", tmp_path / "qwen" / "tokenizer.json", source / "tokenizer")
    cube, tokenizer = Cube.single(), tokenizer_of(source)
    cube.manual_seed(0)
    config = BertConfig(
        **{"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "inner": 16, "vocab": tokenizer.vocab_size},  # type: ignore[arg-type]
        **{"family": "eurobert", "encoder": "modern", "types": 0, "tied": False},  # type: ignore[arg-type]
    )
    model = BertForPreTraining(replace(config, next_sentence=False), cube)
    checkpoint.save(source / "checkpoints", 1, model, torch.optim.AdamW(model.parameters()), cube, {})
    write_model_json(source, config=model.config, heads=("masked_lm",))
    assert main(["to-hf", str(source), str(tmp_path / "theirs")]) == 0
    settings = json.loads((tmp_path / "theirs" / "config.json").read_text())
    names = {"pad": "pad", "cls": "bos", "sep": "eos", "mask": "mask"}
    assert {role: settings[f"{names[role]}_token_id"] for role in tokenizer.special_ids} == tokenizer.special_ids
    assert len(tokenizer.special_ids) == (2 if of_decoder else 4)
    assert (settings["model_type"], settings["num_key_value_heads"]) == ("eurobert", 1)


@pytest.mark.parametrize("first", [1, 2])
def test_a_run_whose_positions_do_not_begin_behind_padding_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: int
) -> None:
    """Of before, when such a run could begin. The ids of [CLS] and [SEP] are the tokenizer's, and not the library's."""
    source = installed(tmp_path / "ours", "wordpiece")
    cube, special = Cube.single(), tokenizer_of(source).special
    cube.manual_seed(0)
    sizes: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "inner": 16, "vocab": special.vocab_size}
    config = BertConfig(**sizes, family="roberta", first_position=first, types=1, next_sentence=False)
    model = BertForPreTraining(config, cube)
    checkpoint.save(source / "checkpoints", 1, model, torch.optim.AdamW(model.parameters()), cube, {})
    write_model_json(source, config=config, heads=("masked_lm",))
    assert main(["to-hf", str(source), str(tmp_path / "theirs")]) == 0
    told = "positions begin behind the id 1, and padding has the id 0 in the tokenizer: the library numbers texts with"
    assert (told in capsys.readouterr().out) == (first == 2)
    settings = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (settings["bos_token_id"], settings["eos_token_id"]) == (special.cls, special.sep) != (0, 2)


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece", "json"])
def test_the_library_reads_our_tokenizers(tmp_path: Path, kind: Kind) -> None:
    source, output = installed(tmp_path / "ours", kind), tmp_path / "theirs"
    output.mkdir()
    (output / "config.json").write_text(json.dumps({"model_type": "bert", **SIZES}))
    told = write_tokenizer(source, output, max_length=77)
    assert f"from the {kind} one" in told
    assert ("another order than Unicode's" in told) == (kind == "sentencepiece")
    ours, theirs = tokenizer_of(source), transformers.AutoTokenizer.from_pretrained(output)
    texts = [*TEXTS, *MORE]
    assert theirs(texts, add_special_tokens=False)["input_ids"] == ours.encode(texts)
    special, [a, b] = ours.special, ours.encode(["The fox", "a hill"])
    pair = theirs("The fox", "a hill")
    assert pair["input_ids"] == [special.cls, *a, special.sep, *b, special.sep]
    assert pair["token_type_ids"] == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    assert (theirs.mask_token_id, theirs.pad_token_id, theirs.model_max_length) == (special.mask, special.pad, 77)
    assert theirs.unk_token_id == ours.unknown
    # Unlike here, "[MASK]" in a text is the token: that is how the library is asked to fill one in.
    assert special.mask in theirs(f"The {theirs.mask_token}.")["input_ids"]


@pytest.mark.parametrize(
    ("single", "pair"),
    [("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"), ("$A", "[CLS] $A [SEP] $B:1 [SEP]:1")],
    ids=["RoBERTa's", "no ends"],
)
def test_another_template_of_the_file_gives_way_to_what_the_model_has_read(
    tmp_path: Path, single: str, pair: str
) -> None:
    """`tools.corpus tokenizer --tokenizer-file` takes pieces alone, and texts are laid out as BERT has them."""
    source, output = installed(tmp_path / "ours", "json"), tmp_path / "theirs"
    ours = tokenizer_of(source).special
    library = Library.from_file(str(source / "tokenizer" / "tokenizer.json"))
    library.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("[CLS]", ours.cls), ("[SEP]", ours.sep)]
    )
    library.save(str(tmp_path / "other.json"))
    install_tokenizer("json", tmp_path / "other.json", source / "tokenizer")
    output.mkdir()
    (output / "config.json").write_text(json.dumps({"model_type": "bert", **SIZES}))
    assert "it laid out texts otherwise than the model has read them" in write_tokenizer(source, output, max_length=77)
    theirs, [a, b] = (
        transformers.AutoTokenizer.from_pretrained(output),
        tokenizer_of(source).encode(["The fox", "a hill"]),
    )
    assert theirs("The fox")["input_ids"] == [ours.cls, *a, ours.sep]
    assert theirs("The fox", "a hill")["input_ids"] == [ours.cls, *a, ours.sep, *b, ours.sep]
    assert theirs("The fox", "a hill")["token_type_ids"] == [0] * (len(a) + 2) + [1] * (len(b) + 1)


def test_a_tokenizer_without_a_counterpart_goes_along_as_it_is(tmp_path: Path) -> None:
    source, output = tmp_path / "ours", tmp_path / "theirs"
    (source / "tokenizer").mkdir(parents=True)
    output.mkdir()
    install_tokenizer("sentencepiece", write_sentencepiece(tmp_path / "any.model"), source / "tokenizer")
    told = write_tokenizer(source, output, max_length=77)
    assert "has pieces that its user defined, so that no tokenizer.json gives the same ids" in told
    assert [file.name for file in output.iterdir()] == ["tokenizer.model"]
    assert (output / "tokenizer.model").read_bytes() == (tmp_path / "any.model").read_bytes()
    assert load_tokenizer(source / "tokenizer").fingerprint == tokenizer_of(source).fingerprint
