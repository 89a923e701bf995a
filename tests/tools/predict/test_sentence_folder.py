"""Folders of sentence-transformers: their vectors are those that a plain computation by modules.json gives, or none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tensor3d import Cube
from tests.ranks import run_ranks
from tools.convert.__main__ import main as convert
from tools.predict import load
from tools.predict.__main__ import main
from tools.predict.sentence_folder import sentence_files, sentence_json, sentence_settings

transformers = pytest.importorskip("transformers")

WORDS = ["the", "fox", "went", "over", "a", "hill", "and", "The", "Fox", "query", ":", "river"]
TEXTS = ["the fox went", "The Fox went over a hill and over a river and the fox went over the hill", "a"]
POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
LIBRARY = "sentence_transformers.models"


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=32, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    write(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "do_lower_case": False})
    return folder


def described(encoder: Path, folder: Path, *, name: str = "", modules: tuple[str, ...] = (), **files: Any) -> Path:
    """A folder with the encoder in `name` and modules after it; `files` by the names that they begin with."""
    kinds = ["Transformer", "Pooling", *modules]
    paths = [name, *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], 1))]
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"{LIBRARY}.{kind}"}
        for number, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    write(folder / "modules.json", listed)
    for file in encoder.iterdir():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / file.name).write_bytes(file.read_bytes())
    pooling = {"word_embedding_dimension": 16, **dict.fromkeys(POOLINGS, False), "pooling_mode_mean_tokens": True}
    write(folder / "1_Pooling" / "config.json", files.get("pooling", pooling))
    for number, dense in enumerate(files.get("dense", ()), 2):
        write_dense(folder / f"{number}_Dense", *dense)
    if "sentence" in files:
        write(folder / name / "sentence_bert_config.json", files["sentence"])
    if "prompts" in files:
        write(folder / "config_sentence_transformers.json", files["prompts"])
    return folder


def write_dense(
    folder: Path, layer: torch.nn.Linear, settings: dict[str, Any] | None = None, *, pickled: bool = False
) -> None:
    """As sentence-transformers saves a `Dense`."""
    sizes = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias is not None}
    write(folder / "config.json", {**sizes, **(settings or {})})
    content = {f"linear.{name}": tensor for name, tensor in layer.state_dict().items()}
    if pickled:
        torch.save(content, folder / "pytorch_model.bin")
    else:
        save_file(content, folder / "model.safetensors")


def plain(encoder: Path, texts: list[str], pooling: str, most: int = 32) -> np.ndarray[Any, Any]:
    """With the library's model and words of one piece each."""
    model = transformers.BertModel.from_pretrained(encoder).eval()
    ids = {word: number for number, word in enumerate((encoder / "vocab.txt").read_text().split())}
    vectors = []
    for text in texts:
        words = [ids.get(word, ids["[UNK]"]) for word in text.replace(":", " : ").split()][: most - 2]
        with torch.no_grad():
            h = model(torch.tensor([[ids["[CLS]"], *words, ids["[SEP]"]]])).last_hidden_state[0]
        made = {"cls": h[0], "mean": h.mean(0), "max": h.amax(0), "mean_sqrt_len": h.sum(0) / len(h) ** 0.5}
        weights = torch.arange(1.0, len(h) + 1)[:, None]
        made |= {"last": h[-1], "weightedmean": (weights * h).sum(0) / weights.sum()}
        vectors.append(made[pooling].numpy())
    return np.stack(vectors)


def vectors(folder: Path, cube: Cube | None = None, **options: Any) -> np.ndarray[Any, Any]:
    return np.stack([one.vector for one in load(folder, "embed", cube=cube, **options).predict(TEXTS)])


MODES = [*POOLINGS][:4]


@pytest.mark.parametrize(("mode", "name"), [*((mode, "") for mode in POOLINGS), *((m, "0_Transformer") for m in MODES)])
def test_the_pooling_of_the_folder_is_obeyed(encoder: Path, tmp_path: Path, mode: str, name: str) -> None:
    settings = {"word_embedding_dimension": 16, **dict.fromkeys(POOLINGS, False), mode: True}
    folder = described(encoder, tmp_path, name=name, pooling=settings)
    np.testing.assert_allclose(vectors(folder), plain(encoder, TEXTS, POOLINGS[mode]), atol=1e-5)
    np.testing.assert_allclose(vectors(folder, pooling="cls"), plain(encoder, TEXTS, "cls"), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "pooling"), [("cls", "cls"), ("mean_sqrt_len_tokens", "mean_sqrt_len"), ("lasttoken", "last")]
)
def test_the_newer_name_of_the_pooling_is_obeyed(encoder: Path, tmp_path: Path, name: str, pooling: str) -> None:
    folder = described(encoder, tmp_path, pooling={"embedding_dimension": 16, "pooling_mode": name})
    np.testing.assert_allclose(vectors(folder), plain(encoder, TEXTS, pooling), atol=1e-5)


def linear(inputs: int, outputs: int, bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(inputs + outputs)
    return torch.nn.Linear(inputs, outputs, bias)


def of_torch(name: str) -> dict[str, str]:
    return {"activation_function": f"torch.nn.modules.{name}"}


def test_dense_layers_are_obeyed(encoder: Path, tmp_path: Path) -> None:
    """As LaBSE has one and EmbeddingGemma two, in files and with settings of today and of before."""
    names = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
    wide, narrow, today = linear(16, 24, bias=False), linear(24, 7), {**names, "use_residual": False}
    folder = described(
        encoder,
        tmp_path / "two",
        modules=("Dense", "Dense", "Normalize"),
        dense=((wide, {**of_torch("linear.Identity"), **today}), (narrow,)),  # of before: no activation is Tanh
    )
    mean = torch.from_numpy(plain(encoder, TEXTS, "mean"))
    with torch.no_grad():
        wanted = torch.nn.functional.normalize(torch.tanh(narrow(wide(mean)))).numpy()
    np.testing.assert_allclose(vectors(folder), wanted, atol=1e-6)
    cut = wanted[:, :3] / np.linalg.norm(wanted[:, :3], axis=1, keepdims=True)
    np.testing.assert_allclose(vectors(folder, dimensions=3), cut, atol=1e-6)
    settings = sentence_settings(folder)
    assert settings is not None
    assert settings.in_words() == "pooling mean, dense to 24 (identity), dense to 7 (tanh), at most 32 tokens, length 1"
    assert "3_Dense/config.json" in sentence_files(folder)
    with pytest.raises(ValueError, match=r"dimensions must be between 1 and the model's 7\. Got 8"):
        load(folder, "embed", dimensions=8)
    written = sentence_json(settings, 16)
    assert [each["path"] for each in written["modules.json"]] == ["", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize"]
    assert written["2_Dense/config.json"] == {
        **{"in_features": 16, "out_features": 24, "bias": False},
        **of_torch("linear.Identity"),
    }
    for name, torch_has in {"ReLU": torch.relu, "GELU": F.gelu, "SiLU": F.silu, "Sigmoid": torch.sigmoid}.items():
        layer = linear(16, 5)
        folder = described(encoder, tmp_path / name, name="0_Transformer", modules=("Dense",), dense=((layer,),))
        (folder / "2_Dense/model.safetensors").unlink()
        write_dense(folder / "2_Dense", layer, of_torch(f"activation.{name}"), pickled=True)
        with torch.no_grad():
            np.testing.assert_allclose(vectors(folder), torch_has(layer(mean)).numpy(), atol=1e-6)


def _on_ranks(folder: Path, sizes: tuple[int, int, int]) -> np.ndarray[Any, Any]:
    return vectors(folder, Cube(*sizes))


@pytest.mark.parametrize(
    "mode", ["pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_lasttoken"]
)
def test_poolings_do_not_depend_on_the_cube(encoder: Path, tmp_path: Path, mode: str) -> None:
    settings = {"word_embedding_dimension": 16, **dict.fromkeys(POOLINGS, False), mode: True}
    layer = linear(16, 7)
    folder = described(encoder, tmp_path, pooling=settings, modules=("Dense",), dense=((layer,),))
    with torch.no_grad():
        wanted = torch.tanh(layer(torch.from_numpy(plain(encoder, TEXTS, POOLINGS[mode])))).numpy()
    for found in run_ranks(4, _on_ranks, folder, (1, 2, 2)):
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_the_length_of_the_folder_is_obeyed(encoder: Path, tmp_path: Path) -> None:
    folder = described(encoder, tmp_path / "said", sentence={"max_seq_length": 8, "do_lower_case": False})
    np.testing.assert_allclose(vectors(folder), plain(encoder, TEXTS, "mean", 8), atol=1e-5)
    np.testing.assert_allclose(vectors(folder, max_length=6), plain(encoder, TEXTS, "mean", 6), atol=1e-5)
    unsaid = described(encoder, tmp_path / "unsaid", sentence={"max_seq_length": None})
    write(unsaid / "tokenizer_config.json", {"do_lower_case": False, "model_max_length": 9})
    np.testing.assert_allclose(vectors(unsaid), plain(encoder, TEXTS, "mean", 9), atol=1e-5)
    write(unsaid / "tokenizer_config.json", {"do_lower_case": False, "model_max_length": 131072})
    assert convert(["from-hf", str(unsaid), str(tmp_path / "ours")]) == 0
    for folder in (unsaid, tmp_path / "ours"):
        settings = sentence_settings(folder)
        assert settings is not None
        assert settings.max_length == 32, "the positions of the model, which may have no table that ends"


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_older_names_of_the_settings_are_obeyed(encoder: Path, tmp_path: Path, kind: str) -> None:
    folder = described(encoder, tmp_path, name="0_Transformer")
    write(folder / "0_Transformer" / f"sentence_{kind}_config.json", {"max_seq_length": 8, "do_lower_case": True})
    settings = sentence_settings(folder)
    assert settings is not None
    assert (settings.max_length, settings.lowercase) == (8, True)
    assert f"0_Transformer/sentence_{kind}_config.json" in sentence_files(folder)
    assert settings.prepared(" The fox\n") == "the fox"  # byte-level pieces would have the spaces
    write(folder / "0_Transformer" / "sentence_bert_config.json", {"max_seq_length": 9})
    assert sentence_settings(folder) == replace(settings, max_length=9, lowercase=False)  # the first that is there


RELATIVES: dict[str, dict[str, Any]] = {
    "roberta": {"max_position_embeddings": 34, "pad_token_id": 1, "hidden_size": 16, "num_hidden_layers": 1},
    "mpnet": {"max_position_embeddings": 34, "hidden_size": 16, "num_hidden_layers": 1},
    "distilbert": {"max_position_embeddings": 32, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32},
}


@pytest.mark.parametrize("kind", RELATIVES)
def test_relatives_have_names_and_rows_of_their_own(tmp_path: Path, kind: str) -> None:
    """Of a RoBERTa's or MPNet's 34 rows 32 are for tokens; a DistilBERT calls its hidden size by another name."""
    sizes = {"vocab_size": 9, "num_attention_heads": 2, "intermediate_size": 32}
    write(tmp_path / "encoder" / "config.json", {"model_type": kind, **sizes, **RELATIVES[kind]})
    settings = sentence_settings(described(tmp_path / "encoder", tmp_path / "good"))
    assert settings is not None
    assert settings.max_length == 32
    wide = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    with pytest.raises(ValueError, match=r"is of vectors of 32, and .* of 16: they do not belong together"):
        sentence_settings(described(tmp_path / "encoder", tmp_path / "wide", pooling=wide))


def test_vectors_are_normalised_where_the_folder_says_so(encoder: Path, tmp_path: Path) -> None:
    folder = described(encoder, tmp_path, modules=("Dropout", "Normalize"))
    wanted = plain(encoder, TEXTS, "mean")
    np.testing.assert_allclose(vectors(folder), wanted / np.linalg.norm(wanted, axis=1, keepdims=True), atol=1e-5)


OF_TOKENS = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
OF_VECTORS = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}


def test_settings_as_the_library_of_today_writes_them_are_obeyed(encoder: Path, tmp_path: Path) -> None:
    """Version 6, of which the length is the tokenizer's, and each module says what it reads."""
    prompts = {
        "default_prompt_name": None,
        "model_type": "SentenceTransformer",
        "prompts": {"document": "", "query": ""},
    }
    folder = described(
        encoder,
        tmp_path,
        modules=("Normalize",),
        pooling={"embedding_dimension": 16, "pooling_mode": "mean", "include_prompt": True},
        sentence={**OF_TOKENS, "unpad_inputs": False},
        prompts=prompts,
    )
    write(folder / "2_Normalize/config.json", OF_VECTORS)
    write(folder / "tokenizer_config.json", {"do_lower_case": False, "model_max_length": 9})
    wanted = plain(encoder, TEXTS, "mean", 9)
    np.testing.assert_allclose(vectors(folder), wanted / np.linalg.norm(wanted, axis=1, keepdims=True), atol=1e-5)
    assert "2_Normalize/config.json" in sentence_files(folder)
    write(folder / "2_Normalize/config.json", {"module_input_name": "token_embeddings"})
    with pytest.raises(ValueError, match=r"2_Normalize/config.json has the setting module_input_name = 'token_emb"):
        sentence_settings(folder)


def test_the_prompt_and_the_case_of_the_folder_are_obeyed(encoder: Path, tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "Query: "}, "default_prompt_name": "query", "similarity_fn_name": "cosine"}
    folder = described(encoder, tmp_path, sentence={"do_lower_case": True}, prompts=prompts)
    wanted = plain(encoder, [f"query: {text.lower()}" for text in TEXTS], "mean")
    np.testing.assert_allclose(vectors(folder), wanted, atol=1e-5)


def test_prompts_that_nobody_asks_for_change_nothing(encoder: Path, tmp_path: Path) -> None:
    folder = described(encoder, tmp_path, prompts={"prompts": {"query": "query: "}, "default_prompt_name": None})
    np.testing.assert_allclose(vectors(folder), plain(encoder, TEXTS, "mean"), atol=1e-5)


def test_a_prompt_may_be_named(encoder: Path, tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "Query: ", "document": "", "other": 3}, "default_prompt_name": None}
    folder = described(encoder, tmp_path, prompts=prompts)
    wanted = plain(encoder, ["Query: " + text for text in TEXTS], "mean")
    np.testing.assert_allclose(vectors(folder, prompt_name="query"), wanted, atol=1e-5)
    np.testing.assert_allclose(vectors(folder, prompt_name="document"), plain(encoder, TEXTS, "mean"), atol=1e-5)
    assert main(["embed", str(folder), "--prompt-name", "query", "--output", str(tmp_path / "v.jsonl"), TEXTS[0]]) == 0
    np.testing.assert_allclose(json.loads((tmp_path / "v.jsonl").read_text())["vector"], wanted[0], atol=1e-5)
    with pytest.raises(ValueError, match=r"has no prompt of the name 'other'. Its prompts are document, query"):
        vectors(folder, prompt_name="other")
    with pytest.raises(ValueError, match=r"has no prompt of the name 'query': folders of sentence-transformers"):
        vectors(encoder, prompt_name="query")
    write(folder / "1_Pooling/config.json", {**MEAN, "include_prompt": False})
    with pytest.raises(ValueError, match=r"include_prompt = false"):
        vectors(folder, prompt_name="query")
    np.testing.assert_allclose(vectors(folder, prompt_name="document"), plain(encoder, TEXTS, "mean"), atol=1e-5)


MEAN = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}


def of_dense(**settings: Any) -> dict[str, Any]:
    return {"modules": ("Dense",), "dense": ((linear(16, 4), settings),)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules": ("Dense",)}, r"2_Dense/config.json cannot be read"),
        ({"modules": ("Normalize", "Dense")}, r"A Dense after Normalize is not known here, only before it"),
        ({"modules": ("Dense",), "dense": ((linear(9, 4),),)}, r"in_features = 9, and is given vectors of 16"),
        (
            {"modules": ("Dense", "Dense"), "dense": ((linear(16, 4),), (linear(16, 4),))},
            r"3_Dense.* has in_features = 16, and is given vectors of 4",
        ),
        (of_dense(out_features=0), r"out_features must be a number of columns, at least 1. Got 0"),
        (of_dense(in_features=True), r"in_features must be .* Got True"),
        (of_dense(bias="no"), r"bias must be true or false. Got 'no'"),
        (of_dense(activation_function="torch.nn.modules.activation.Mish"), r"activation.Mish'. Known are torch.nn.mod"),
        (of_dense(activation_function=None), r"the activation_function None. Known are"),
        (of_dense(activation_function=["a"]), r"the activation_function \['a'\]. Known are"),
        (of_dense(module_input_name="token_embeddings"), r"setting module_input_name = 'token_embeddings'"),
        (of_dense(module_output_name="other"), r"setting module_output_name = 'other'"),
        (of_dense(use_residual=True), r"setting use_residual = True"),
        ({"modules": ("Normalize", "LayerNorm")}, r"LayerNorm is not known"),
        ({"pooling": {**MEAN, "pooling_mode_cls_token": True}}, r"cls_token and pooling_mode_mean_tokens"),
        ({"pooling": {**MEAN, "pooling_mode_mean_tokens": False}}, r"pooling none"),
        ({"pooling": {**MEAN, "pooling_mode_lasttoken": True}}, r"mean_tokens and pooling_mode_lasttoken"),
        ({"pooling": {"embedding_dimension": 16, "pooling_mode": ["cls", "lasttoken"]}}, r"cls and lasttoken"),
        ({"pooling": {**MEAN, "layers": [1, 2]}}, r"setting layers = \[1, 2\]"),
        ({"pooling": {**MEAN, "word_embedding_dimension": 32}}, r"vectors of 32.* of 16"),
        ({"sentence": {**OF_TOKENS, "module_output_name": "scores"}}, r"setting module_output_name = 'scores'"),
        ({"sentence": {**OF_TOKENS, "modality_config": {"message": {}}}}, r"setting modality_config = {'message'"),
        ({"sentence": {**OF_TOKENS, "query_length": 8}}, r"setting query_length = 8, .*Known are do_lower_case, max"),
        ({"sentence": {"max_seq_length": "long"}}, r"max_seq_length .*'long'"),
        ({"sentence": {"max_seq_length": 8, "truncate_from": "left"}}, r"setting truncate_from = 'left'"),
        ({"prompts": {"prompts": {}, "default_prompt_name": "q"}}, r"default_prompt_name = 'q'.*none"),
        (
            {
                "prompts": {"prompts": {"q": "q: "}, "default_prompt_name": "q"},
                "pooling": {**MEAN, "include_prompt": False},
            },
            r"include_prompt = false",
        ),
        ({"prompts": {"truncate_dim": 8}}, r"setting truncate_dim = 8"),
    ],
)
def test_what_is_not_known_is_refused(encoder: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = described(encoder, tmp_path, **changes)
    with pytest.raises(ValueError, match=rf"(?s){message}"):
        sentence_settings(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"linear.weight": torch.ones(4, 16)},
            r"have no linear.bias. Its config.json asks for linear.weight",
        ),
        ({"linear.bias": torch.ones(5)}, r"have linear.bias of shape \(5,\)"),
        ({"linear.weight": torch.ones(4, 16).to(torch.int8)}, r"have linear.weight of type I8"),
        ({"residual.weight": torch.ones(4, 16)}, r"have residual.weight, too"),
        ({}, r"2_Dense has no weights. It needs one of model.safetensors"),
    ],
)
def test_weights_of_dense_layers_are_as_their_settings_say(
    encoder: Path, tmp_path: Path, content: dict[str, torch.Tensor], message: str
) -> None:
    folder = described(encoder, tmp_path, **of_dense())
    file = folder / "2_Dense/model.safetensors"
    kept = {"linear.weight": torch.ones(4, 16), "linear.bias": torch.ones(4)} if "no linear.bias" not in message else {}
    file.unlink()
    if content:
        save_file({**kept, **content}, file)
    with pytest.raises(ValueError, match=message):
        load(folder, "embed")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"damaged"),
        ("[1]", r"must be a list of modules"),
        ('[{"idx": 0, "path": "../other", "type": "x.Transformer"}]', r"'../other', which is not inside"),
        ('[{"idx": 0, "path": "/etc", "type": "x.Transformer"}]', r"'/etc', which is not inside"),
        ('[{"idx": 0, "path": "", "type": "sentence_transformers.models.CLIPModel"}]', r"CLIPModel is not known"),
        (
            '[{"idx": 0, "path": "", "type": "custom_st.Transformer"}]',
            r"asks for custom_st.Transformer, code",
        ),
        (
            '[{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer", "kwargs": ["task"]}]',
            r"has kwargs = \['task'\] for the module sentence_transformers.models.Transformer, which may change",
        ),
    ],
)
def test_a_damaged_or_foreign_list_of_modules_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        sentence_settings(tmp_path)


def test_another_folder_says_nothing_of_sentences(encoder: Path) -> None:
    assert sentence_settings(encoder) is None
