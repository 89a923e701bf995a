"""The tokenizer of a Hugging Face folder is found, and is the one that its own library makes of the folder."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.tools.corpus.tokenized import CASED, PIECES, TEXTS, write_vocabulary
from tests.tools.relatives import write_mpnet_tokenizer
from tools.corpus.quick.sentencepiece_tokenizer import train_tokenizer
from tools.corpus.tokenizers import Kind, load_tokenizer
from tools.corpus.tokenizers.base import TextLayout
from tools.corpus.tokenizers.export import library_of_sentencepiece
from tools.corpus.tokenizers.folder import install_tokenizer, open_tokenizer
from tools.corpus.tokenizers.huggingface import find_tokenizer, layout_of, tokenizer_files, with_same_ids
from tools.corpus.tokenizers.model_dir import keep_tokenizer, tokenizer_of
from tools.corpus.tokenizers.tokenizer_json import JsonTokenizer
from tools.corpus.tokenizers.wordpiece import make_library
from tools.predict.text_encoder import TextEncoder
from tools.squad.windows import AnswerSettings, make_windows

UNICODE = (
    "The FOXES, \u00c9t\u00e9 e\u0301t\u0101 \u6f22\u5b57\u3002 \u00bd na\u00efve\u00df \ufb01x\u200b! "
    "\u0130s\u3000\U0001f600 fox-hill"
)
LOWER = {"do_lower_case": True}


def write_folder(folder: Path, pieces: tuple[str, ...] = PIECES, settings: object = None) -> Path:
    folder.mkdir(exist_ok=True)
    write_vocabulary(folder / "vocab.txt", pieces)
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "tokenizer.model"
    texts = [*TEXTS, "\u00c9t\u00e9 \u6f22\u5b57 \u00bd na\u00efve"]
    train_tokenizer(texts, file, vocab_size=70, character_coverage=1.0)
    return file


@pytest.mark.parametrize(
    ("pieces", "settings", "lowercase"),
    [
        (PIECES, None, True),
        # As the library does it; a capital letter or two make no cased vocabulary.
        ((*PIECES, "<S>"), None, True),
        (PIECES, {"tokenizer_class": "BertTokenizer", "strip_accents": None}, True),
        (CASED, {"do_lower_case": False, "strip_accents": False, "tokenize_chinese_chars": True}, False),
        # What is said counts for more than how the pieces look.
        (PIECES, {"do_lower_case": False}, False),
        (CASED, {"do_lower_case": True, "strip_accents": True}, True),
    ],
)
def test_a_vocabulary_has_the_case_that_its_folder_says(
    tmp_path: Path, pieces: tuple[str, ...], settings: object, lowercase: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path / "model", pieces, settings)
    found = find_tokenizer(folder)
    assert (found.kind, found.file, found.lowercase) == ("wordpiece", folder / "vocab.txt", lowercase)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [*TEXTS, UNICODE]
    if as_today(transformers):
        assert found.open().encode(texts) == theirs(texts, add_special_tokens=False)["input_ids"]
    assert found.open().encode(["THE"]) != open_tokenizer(
        "wordpiece", folder / "vocab.txt", lowercase=not lowercase, any_case=True
    ).encode(["THE"])
    (tmp_path / "ours").mkdir()
    found.install(tmp_path / "ours")
    assert load_tokenizer(tmp_path / "ours").encode(texts) == found.open().encode(texts)


def test_the_first_choice_is_the_file_that_says_everything(tmp_path: Path, sentencepiece: Path) -> None:
    folder = write_folder(tmp_path / "model", settings=LOWER)
    shutil.copy(sentencepiece, folder / "spiece.model")
    (folder / "config.json").write_text("{}")

    def kinds() -> list[Kind]:
        first = find_tokenizer(folder)
        return [first.kind, *(found.kind for found in with_same_ids(first, folder))]

    assert kinds() == ["wordpiece"]  # the other one has other pieces
    find_tokenizer(folder).open().library.save(str(folder / "tokenizer.json"))  # type: ignore[attr-defined]
    assert kinds() == ["json", "wordpiece"]
    names = ["tokenizer.json", "vocab.txt", "spiece.model", "tokenizer_config.json"]
    assert [file.name for file in tokenizer_files(folder)] == names
    # Nothing but the first choice decides: what it makes needless may be odd, of another case or of other pieces.
    for settings in ({"do_lower_case": True, "tokenize_chinese_chars": False}, {"do_lower_case": False}):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        assert kinds() == ["json"]
    (folder / "tokenizer_config.json").write_text(json.dumps(LOWER))
    write_vocabulary(folder / "vocab.txt", (*PIECES[:-2], PIECES[-1], PIECES[-2]))
    assert kinds() == ["json"]
    for name in names[:2]:
        (folder / name).unlink()
    there = open_tokenizer("sentencepiece", sentencepiece)
    assert find_tokenizer(folder).open().fingerprint == there.fingerprint


def test_what_a_vocabulary_cannot_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer.*tokenizer.json, vocab.txt and tokenizer.model"):
        find_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").symlink_to("../../blobs/4d7a")
    with pytest.raises(
        ValueError, match=r"has no tokenizer.*\. vocab.txt is there as a link to \.\./\.\./blobs/4d7a, wh"
    ):
        find_tokenizer(tmp_path)
    for settings, told in (
        ({"do_lower_case": True, "tokenize_chinese_chars": False}, "tokenize_chinese_chars = False"),
        ({"do_lower_case": True, "do_basic_tokenize": False}, r"do_basic_tokenize = False.*save_pretrained\("),
        ([1], "is no table of settings, but a list"),
    ):
        with pytest.raises(ValueError, match=told):
            find_tokenizer(write_folder(tmp_path / "model", settings=settings))
    with pytest.raises(ValueError, match=r"cased.*28 of its.*Write \{\"do_lower_case\": false\}"):
        find_tokenizer(write_folder(tmp_path / "model", CASED, {}))
    (tmp_path / "model" / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is no JSON"):
        find_tokenizer(tmp_path / "model")


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tokenizer_class": "BertJapaneseTokenizer"}, "tokenizer_class = 'BertJapaneseTokenizer', by which vocab.txt"),
        ({"tokenizer_class": "BertweetTokenizer"}, "tokenizer_class = 'BertweetTokenizer'"),
        ({"tokenizer_class": "MPNetTokenizer"}, "tokenizer_class = 'MPNetTokenizer'"),
        ({"tokenizer_class": "BertTokenizer", "auto_map": {"AutoTokenizer": ["own.Own", None]}}, r"never run here"),
        ({"auto_map": ["own.Own", None]}, r"never run here"),
    ],
)
def test_a_vocabulary_of_another_algorithm_is_refused(
    tmp_path: Path, file: str, settings: dict[str, object], told: str
) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / file).write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=told):
        find_tokenizer(folder)


def json_of_bert(folder: Path, **case: bool | None) -> Path:
    """A tokenizer.json by BERT's rules, with a template of its own."""
    made = make_library({piece: number for number, piece in enumerate(BOTH)}, lowercase=False, strip_accents=None)
    made.normalizer = normalizers.BertNormalizer(**case)
    made.add_special_tokens(list(BOTH[:5]))
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] [SEP] $B [SEP]",
        special_tokens=[("[CLS]", BOTH.index("[CLS]")), ("[SEP]", BOTH.index("[SEP]"))],
    )
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def as_today(transformers: Any) -> bool:
    """Whether settings mean what they do in the newest transformers: by default BertTokenizer of 5.0 keeps the case,
    whatever a tokenizer.json says."""
    signature = inspect.signature(transformers.BertTokenizer.__init__)
    return bool(signature.parameters["do_lower_case"].default)


BOTH = (*PIECES, *(piece for piece in CASED if piece not in PIECES))
OF_BERT = {"tokenizer_class": "BertTokenizer"}


@pytest.mark.parametrize(
    ("case", "config", "settings", "sound"),
    [
        ({"lowercase": False}, {"model_type": "bert"}, {**OF_BERT, "do_lower_case": False}, True),
        ({"lowercase": True}, {"model_type": "bert"}, OF_BERT, True),
        ({"lowercase": True, "strip_accents": False}, None, {**OF_BERT, "strip_accents": False}, True),
        ({"lowercase": False}, {"model_type": "bert"}, {"tokenizer_class": "PreTrainedTokenizerFast"}, True),
        ({"lowercase": False}, None, None, True),
        ({"lowercase": True}, {"model_type": "bert"}, {**OF_BERT, "do_lower_case": False}, False),
        ({"lowercase": False}, {"model_type": "bert"}, OF_BERT, False),  # by default the class lowercases
        ({"lowercase": False}, {"model_type": "bert"}, None, False),  # and is the model's by default
        ({"lowercase": False}, {"tokenizer_class": "ElectraTokenizerFast"}, {"do_lower_case": True}, False),
        ({"lowercase": True, "strip_accents": False}, None, OF_BERT, False),
        ({"lowercase": True, "handle_chinese_chars": False}, None, OF_BERT, False),
        ({"lowercase": False}, None, {"tokenizer_class": "LayoutLMTokenizer"}, False),
        # Without types: the second text has type 0.
        ({"lowercase": True}, None, {"tokenizer_class": "DistilBertTokenizer"}, True),
        ({"lowercase": True}, None, {**OF_BERT, "model_input_names": ["input_ids", "attention_mask"]}, True),
        ({"lowercase": False}, None, {"tokenizer_class": "TokenizersBackend"}, True),
    ],
)
def test_settings_that_contradict_a_tokenizer_json_are_refused(
    tmp_path: Path, case: dict[str, bool], config: object, settings: dict[str, Any] | None, sound: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = json_of_bert(tmp_path / "model", **case)
    for name, content in (("config.json", config), ("tokenizer_config.json", settings)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [*TEXTS, UNICODE]
    alone = [
        found.ids
        for found in JsonTokenizer(folder / "tokenizer.json").library.encode_batch(texts, add_special_tokens=False)
    ]
    if as_today(transformers):
        assert (alone == theirs(texts, add_special_tokens=False)["input_ids"]) == sound, "as the library has it"
    if not sound:
        with pytest.raises(ValueError, match=r"tokenizer.json and .*tokenizer_config.json contradict each other"):
            find_tokenizer(folder)
        return
    made = tokenizer_of(folder)
    assert made.encode(texts) == alone
    pair = TextEncoder(made, 64).texts(["The fox"], ["the hill"])[0]
    wanted = theirs("The fox", "the hill")
    if as_today(transformers):
        assert pair.ids.tolist() == wanted["input_ids"]
    if (settings or {}).get("tokenizer_class", "PreTrainedTokenizerFast") != "PreTrainedTokenizerFast":  # it depends
        assert pair.types.tolist() == wanted.get("token_type_ids", [0] * len(pair.ids))
    keep_tokenizer(folder, tmp_path / "ours")
    assert tokenizer_of(tmp_path / "ours").layout == made.layout, "the model keeps it"


@pytest.mark.parametrize(
    ("template", "names", "layout"),
    [
        ("[CLS] $A [SEP] [SEP] $B [SEP]", ["input_ids"], TextLayout(between=2, second_type=0)),
        ("[CLS] $A [SEP] $B:1 [SEP]:1", ["input_ids", "token_type_ids"], TextLayout()),
        ("[CLS] $A [SEP] $B:1 [SEP]:1", ["input_ids"], TextLayout(second_type=0)),
        ("[CLS] $A [SEP] [SEP] $B:1 [SEP]:1", None, TextLayout(between=2)),
        ("$A [SEP] $B [SEP] [CLS]", None, None),  # XLNet's
        ("[CLS] $A $B [SEP]", None, None),
        ("[CLS] $A [SEP] $B:1 [SEP]:0", None, None),
    ],
)
def test_pairs_are_laid_out_as_the_template_has_them(
    tmp_path: Path, sentencepiece: Path, template: str, names: list[str] | None, layout: TextLayout | None
) -> None:
    library = library_of_sentencepiece(sentencepiece)
    assert not isinstance(library, str)
    special = [(name, library.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    single = " ".join(part for part in template.split() if not part.startswith("$B"))
    library.post_processor = processors.TemplateProcessing(single=single, pair=template, special_tokens=special)
    library.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "truncation_side": "left"}
    settings |= {} if names is None else {"model_input_names": names}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if layout is None:
        with pytest.raises(ValueError, match=r"lays out the pair 'a', 'b' as"):
            tokenizer_of(tmp_path)
        return
    assert tokenizer_of(tmp_path).layout == replace(layout, cut_left=True)


MARKED = (
    *(
        "\uff76\uff9e\uff7d \uff8a\uff9f\uff9d \uff76",
        "\u30ab\uff9e\u306f\uff9f",
        "\uff71\uff9e",
    ),  # Katakana of half width
    *("\u0e4d\u0e32", "\u0e01\u0e33 \u0e14\u0e35", "\u0915\u093c\u094d\u0937 \u0958"),  # Thai, Hindi
    *("\u200cnon \u200cnon", "\u0301e e\u0301\u00bd", "\uff9f\uff9f\u2465", "o\u0323\u0302 \u1ed9"),
    "\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \u2764\ufe0f",
)


@pytest.mark.parametrize("rule", ["nmt_nfkc", "nfkc", "nfkc_cf"])
def test_marks_are_read_by_the_written_file_as_by_sentencepiece(tmp_path: Path, rule: str) -> None:
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    names = {f"{role}_piece": name for role, name in (("pad", "[PAD]"), ("bos", "[CLS]"), ("eos", "[SEP]"))}
    trainer.train(
        sentence_iterator=iter([*TEXTS, *MARKED] * 2),
        model_prefix=str(tmp_path / "made"),
        vocab_size=130,
        hard_vocab_limit=False,
        character_coverage=1.0,
        normalization_rule_name=rule,
        pad_id=4,
        control_symbols=["[MASK]"],
        minloglevel=2,
        **names,
    )
    library = library_of_sentencepiece(tmp_path / "made.model")
    assert not isinstance(library, str)
    ours = open_tokenizer("sentencepiece", tmp_path / "made.model")
    for text in (*TEXTS, *MARKED, *(f"a{text}" for text in MARKED)):
        assert library.encode(text).ids == ours.encode([text])[0], ascii(text)


@pytest.mark.parametrize("model", ["roberta", "xlm-roberta", "camembert"])
def test_relatives_of_roberta_give_no_types_and_need_a_tokenizer_json(
    tmp_path: Path, sentencepiece: Path, model: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(ValueError, match=r"merges.txt alone is not read: AutoTokenizer.*save_pretrained"):
        find_tokenizer(tmp_path)
    shutil.copy(sentencepiece, tmp_path / "sentencepiece.bpe.model")
    with pytest.raises(ValueError, match=rf"config.json has model_type = '{model}', whose class is \w+, by which sent"):
        find_tokenizer(tmp_path)
    of_class(tmp_path, model)
    assert tokenizer_of(tmp_path).layout == TextLayout(between=2, second_type=0)


OF_ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
WORDS = [f"\u2581{word}" for word in ("the", "The", "fox", "FOX", "\u00e9t\u00e9", "2", "so")]


def of_class(folder: Path, kind: str, change: Callable[[Any], None] | None = None) -> Any:
    """A small tokenizer.json as the library has it for this kind of model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made: Any
    if kind == "roberta":
        pieces = {piece: number for number, piece in enumerate([*OF_ROBERTA, *alphabet, "\u0120f", "00"])}
        made = Tokenizer(models.BPE(pieces, [("\u0120", "f"), ("0", "0")]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789,.:!'`\"\u00e9\u00c9"]
        scored = [(piece, -1.0 - number) for number, piece in enumerate([*OF_ROBERTA, *WORDS, *letters])]
        made = Tokenizer(models.Unigram(scored, unk_id=3))
        words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        made.pre_tokenizer = pre_tokenizers.Sequence(words)
    pair = "<s> $A </s> </s> $B </s>"
    ends = [(name, OF_ROBERTA.index(name)) for name in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair=pair, special_tokens=ends)
    if change is not None:
        change(made)
    made.save(str(folder / "tokenizer.json"))
    return made


OF_EUROBERT = ("<|begin_of_text|>", "<|end_of_text|>", "<|mask|>", "<|reserved_special_token_1|>")


@pytest.mark.parametrize("own_padding", [False, True])
def test_a_eurobert_may_have_its_sep_for_padding_too(tmp_path: Path, own_padding: bool) -> None:
    """As the published ones, which have no [CLS] and no [SEP] by those names. Slots that nobody looks at get a token
    that no text has."""
    names = (*OF_EUROBERT, *(["<|pad|>"] if own_padding else []))
    made: Any = Tokenizer(
        models.BPE({piece: n for n, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([AddedToken(name, lstrip=name == "<|mask|>", special=True) for name in names])
    begin, end = (made.token_to_id(name) for name in names[:2])
    made.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A <|end_of_text|>",
        pair="<|begin_of_text|> $A <|end_of_text|> $B <|end_of_text|>",
        special_tokens=[(names[0], begin), (names[1], end)],
    )
    made.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "bos_token": names[0],
        "eos_token": names[1],
        "mask_token": names[2],
        "pad_token": names[-1 if own_padding else 1],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "eurobert"}')
    tokenizer = find_tokenizer(tmp_path).open()
    padding = made.token_to_id(names[-1])
    assert tokenizer.special_ids == {"pad": padding, "cls": begin, "sep": end, "mask": made.token_to_id("<|mask|>")}
    assert layout_of(tmp_path, tokenizer) == TextLayout(second_type=0)
    # In a text their names are text.
    assert len(tokenizer.encode(["<|mask|>"])[0]) > 1
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "mask_token": "<|begin_of_text|>"}))
    with pytest.raises(ValueError, match=r"calls mask_token '<|begin_of_text|>', and tokenizer.json has '<|mask|>'"):
        find_tokenizer(tmp_path)


def write_gemma(folder: Path, change: Callable[[dict[str, Any]], None] | None = None) -> None:
    """A small tokenizer as EmbeddingGemma's."""
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces = [*names, *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abcdefghijklmnopqrstuvwxyz.,", "th", "the"]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the")]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, "\u2581the"])}
    made: Any = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    single = "<bos> $A <eos>"
    ends = [("<bos>", 2), ("<eos>", 1)]
    made.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} <bos>:1 $B:1 <eos>:1", special_tokens=ends
    )
    plan = json.loads(made.to_str())
    if change is not None:
        change(plan)
    (folder / "tokenizer.json").write_text(json.dumps(plan))
    settings = {f"{name[1:-1]}_token": name for name in names} | {"add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GemmaTokenizer", **settings}))
    (folder / "config.json").write_text('{"model_type": "gemma3_text"}')


def test_an_embeddinggemmas_second_text_begins_as_the_first_one_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_gemma(tmp_path)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), tokenizer_of(tmp_path)
    assert ours.special_ids == {"pad": 0, "cls": 2, "sep": 1, "mask": 4}
    assert ours.layout == TextLayout(again=True, second_type=0)
    assert ours.layout.in_words() == "[CLS] before the second text of a pair, too, type 0 for the second text of a pair"
    reader = TextEncoder(ours, 64)
    texts = ["the fox, \u00e9t\u00e9.", "  two  spaces", "\u6f22\u5b57"]
    assert [each.ids.tolist() for each in reader.texts(texts)] == theirs(texts)["input_ids"]
    assert [each.ids.tolist() for each in reader.texts(texts, texts[::-1])] == theirs(texts, texts[::-1])["input_ids"]
    short = TextEncoder(ours, 9, "truncate").texts(["a a a a a"], ["b b b"])[0]
    assert len(short.ids) == 9
    assert [each for each in short.ids.tolist() if each < 5] == [2, 1, 2, 1]
    with pytest.raises(ValueError, match=r"max_length must be at least 6 for pairs: .* Got 5"):
        TextEncoder(ours, 5).texts(["a"], ["b"])
    windows = make_windows([("the fox", "a b c d")], ours, AnswerSettings(max_length=16, question_length=8, stride=2))
    assert windows.heads[0].tolist() == [2, *ours.encode(["the fox"])[0], 1, 2]
    install = tmp_path / "ours"
    install.mkdir()
    kept = install_tokenizer("json", tmp_path / "tokenizer.json", install, layout=ours.layout)
    assert load_tokenizer(install).layout == kept.layout == ours.layout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan.update(normalizer=None), "as a GemmaTokenizer, .* goes by rules of its own, and"),
        (lambda plan: plan["model"].update(byte_fallback=False), "byte_fallback = False where the class has pieces of"),
    ],
    ids=["spaces", "bytes"],
)
def test_a_gemmas_file_that_cuts_text_otherwise(tmp_path: Path, change: Any, message: str) -> None:
    write_gemma(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        find_tokenizer(tmp_path)


def test_an_mpnet_has_special_tokens_of_its_own_beside_those_of_bert(tmp_path: Path) -> None:
    """As the published ones: BERT's are pieces there like others."""
    pieces = write_mpnet_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "mpnet"}')
    tokenizer = tokenizer_of(tmp_path / "model")
    assert tokenizer.special_ids == {"pad": 1, "cls": 0, "sep": 2, "mask": len(pieces) - 1}
    assert tokenizer.unknown == pieces.index("[UNK]")
    assert tokenizer.layout == TextLayout(between=2, second_type=0)
    names = tokenizer.encode(["the <mask> [MASK]"])[0]  # are text in a text
    assert {tokenizer.special.mask, pieces.index("[MASK]")}.isdisjoint(names)
    assert len(names) > 6
    keep_tokenizer(tmp_path / "model", tmp_path / "ours")
    kept = tokenizer_of(tmp_path / "ours")
    assert (kept.special_ids, kept.layout) == (tokenizer.special_ids, tokenizer.layout)
    # Without its class, by the kind of model; and a vocabulary by itself does not say which of both are meant.
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    del settings["tokenizer_class"]
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    assert tokenizer_of(tmp_path / "model").layout == tokenizer.layout
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings | {"do_lower_case": False}))
    with pytest.raises(ValueError, match=r"contradict each other: as a MPNetTokenizer"):
        find_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    write_vocabulary(tmp_path / "model" / "vocab.txt", pieces)
    with pytest.raises(ValueError, match=r"model_type = 'mpnet', whose class is MPNetTokenizer, by which vocab.txt"):
        find_tokenizer(tmp_path / "model")


def test_the_library_gives_an_mpnet_the_same_ids(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pieces = write_mpnet_tokenizer(tmp_path / "ours")
    made = transformers.MPNetTokenizer(vocab={piece: number for number, piece in enumerate(pieces)})
    made.save_pretrained(tmp_path / "theirs")
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    for folder in ("ours", "theirs"):
        tokenizer = tokenizer_of(tmp_path / folder)
        assert {role: getattr(made, f"{role}_token_id") for role in tokenizer.special_ids} == tokenizer.special_ids
        for text in TEXTS:
            ids = [tokenizer.special.cls, *tokenizer.encode([text])[0], tokenizer.special.sep]
            assert ids == made(text).input_ids == read(text).input_ids
        assert isinstance(tokenizer, JsonTokenizer)
        assert tokenizer.laid_out("the fox", "a hill")[0] == made("the fox", "a hill").input_ids


def changed(part: str, value: Any) -> Callable[[Any], None]:
    return lambda made: setattr(made, part, value)


def test_pieces_of_another_kind_in_a_bert_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The library makes a WordPiece of them, and every word unknown."""
    made = of_class(tmp_path, "xlm-roberta")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    found = find_tokenizer(tmp_path).open()
    assert found.encode(["foxes"])[0] == made.encode("foxes", add_special_tokens=False).ids
    (told,) = caplog.messages
    assert "a model of type Unigram, and is read as it is. Its class, BertTokenizer" in told


DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
ONE_SEPARATOR = processors.BertProcessing(("</s>", 2), ("<s>", 0))


@pytest.mark.parametrize(
    ("kind", "settings", "change", "problem"),
    [
        ("roberta", {}, None, ""),
        ("roberta", {"trim_offsets": False, "tokenizer_class": "RobertaTokenizerFast"}, None, ""),
        ("roberta", {"add_prefix_space": True}, None, "add_prefix_space = true, and"),
        ("roberta", {}, changed("pre_tokenizer", pre_tokenizers.ByteLevel(True)), r"add_prefix_space = false \(its"),
        ("roberta", {}, changed("normalizer", normalizers.Lowercase()), "'the \u0120foxes' where the settings give"),
        ("roberta", {}, changed("pre_tokenizer", DIGITS), "contradict"),
        ("roberta", {}, lambda made: setattr(made.model, "dropout", 0.5), "dropout = 0.5 where the class has none"),
        ("roberta", {}, changed("post_processor", ONE_SEPARATOR), r"has 2 \[SEP\] between, and type 0"),
        ("xlm-roberta", {}, None, ""),
        ("xlm-roberta", {"add_prefix_space": False}, None, "add_prefix_space = false, and"),
        ("xlm-roberta", {}, changed("normalizer", normalizers.NFKC()), "contradict"),
        ("xlm-roberta", {}, changed("pre_tokenizer", pre_tokenizers.Metaspace()), "contradict"),  # double spaces
        ("camembert", {}, None, ""),
        ("camembert", {}, changed("normalizer", normalizers.Lowercase()), "contradict"),
        ("bert", {"tokenizer_class": "AlbertTokenizer"}, None, "contradict"),  # cased, with accents
        ("bert", {"tokenizer_class": "BigBirdTokenizer"}, None, "contradict"),
        ("bert", {"tokenizer_class": "DebertaV2Tokenizer"}, None, "contradict"),
        ("bert", {"tokenizer_class": "RobertaTokenizer"}, None, "a model of type Unigram where the class makes"),
    ],
)
def test_a_class_that_goes_by_its_own_rules_is_read_so_or_refused(
    tmp_path: Path, kind: str, settings: dict[str, Any], change: Any, problem: str
) -> None:
    transformers = pytest.importorskip("transformers")
    made = of_class(tmp_path, kind, change)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    texts = ["The fox, FOXES  \u00c9t\u00e9 ``so'' \u00bd", " 2 foxes of 3,000 "]
    if as_today(transformers) and kind != "bert" and "dropout" not in problem:
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        alone = [found.ids for found in made.encode_batch(texts)] + [made.encode("a", "b").ids]
        assert (alone == [*theirs(texts)["input_ids"], theirs("a", "b")["input_ids"]]) == (not problem)
    if problem:
        with pytest.raises(ValueError, match=problem):
            tokenizer_of(tmp_path)
    else:
        assert tokenizer_of(tmp_path).layout == TextLayout(between=2, second_type=0)


def test_a_model_of_albert_alone_is_refused_for_its_class_changes_the_text(tmp_path: Path, sentencepiece: Path) -> None:
    shutil.copy(sentencepiece, tmp_path / "spiece.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "AlbertTokenizer"}))
    with pytest.raises(ValueError, match=r"tokenizer_class = 'AlbertTokenizer', by which spiece.model alone does not"):
        find_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BigBirdTokenizer"}))
    assert find_tokenizer(tmp_path).kind == "sentencepiece"


def test_other_classes_and_words_of_a_tokenizer_json_are_refused(tmp_path: Path) -> None:
    folder = json_of_bert(tmp_path / "model", lowercase=True)
    config = folder / "tokenizer_config.json"
    for name in ("ProphetNetTokenizer", "FunnelTokenizerFast", "BertJapaneseTokenizer", "OwnTokenizer"):
        config.write_text(json.dumps({"tokenizer_class": name}))
        with pytest.raises(ValueError, match=rf"tokenizer_class = '{name}', by which tokenizer.json alone"):
            find_tokenizer(folder)
    config.write_text(json.dumps(OF_BERT | {"sep_token": "[MASK]"}))
    with pytest.raises(ValueError, match=r"calls sep_token '\[MASK\]', and tokenizer.json has '\[SEP\]'"):
        find_tokenizer(folder)
    config.write_text(json.dumps(OF_BERT))
    find_tokenizer(folder)
    plan = json.loads((folder / "tokenizer.json").read_text())
    for change in ({"max_input_chars_per_word": 5}, {"continuing_subword_prefix": "@@"}):
        (folder / "tokenizer.json").write_text(json.dumps(plan | {"model": plan["model"] | change}))
        with pytest.raises(ValueError, match=rf"contradict each other.*{next(iter(change))} = "):
            find_tokenizer(folder)


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("tokenizer_config.json", {"do_lower_case": "false"}),
        ("tokenizer_config.json", {"strip_accents": "yes"}),
        ("tokenizer_config.json", {"model_input_names": "input_ids"}),
        ("tokenizer_config.json", {"auto_map": 5}),
        ("tokenizer_config.json", {"truncation_side": ["left"]}),
        ("config.json", {"tokenizer_class": ["BertTokenizer"]}),
        ("special_tokens_map.json", {"additional_special_tokens": 5}),
    ],
)
def test_settings_of_another_type_are_refused(tmp_path: Path, file: str, settings: dict[str, object]) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / file).write_text(json.dumps({"model_type": "bert", **settings}))
    with pytest.raises(ValueError, match=rf"{file}: {next(iter(settings))} must be of type"):
        find_tokenizer(folder)


def test_a_folder_of_before_goes_on_with_the_layout_of_bert(tmp_path: Path) -> None:
    """Its model was fine-tuned with that, whatever the files say that were imported with it."""
    folder = json_of_bert(tmp_path / "model", lowercase=False)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    keep_tokenizer(folder, tmp_path / "ours")
    assert tokenizer_of(tmp_path / "ours").layout == TextLayout(between=2, second_type=0)
    kept = tmp_path / "ours" / "tokenizer" / "tokenizer-settings.json"
    kept.write_text(
        json.dumps({name: value for name, value in json.loads(kept.read_text()).items() if name != "layout"})
    )
    assert tokenizer_of(tmp_path / "ours").layout == TextLayout()


def test_the_side_on_which_texts_are_cut_is_the_folders(tmp_path: Path) -> None:
    folder = json_of_bert(tmp_path / "model", lowercase=True)
    plan = json.loads((folder / "tokenizer.json").read_text())
    cut = {"direction": "Left", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(plan | {"truncation": cut}))
    assert tokenizer_of(folder).layout.cut_left
    for side, left in (("right", False), ("left", True)):
        (folder / "tokenizer_config.json").write_text(json.dumps(OF_BERT | {"truncation_side": side}))
        assert tokenizer_of(folder).layout.cut_left == left
    (folder / "tokenizer_config.json").write_text(json.dumps({"truncation_side": "middle"}))
    with pytest.raises(ValueError, match=r"truncation_side is left or right. Got 'middle'"):
        tokenizer_of(folder)


def test_tokens_beside_a_vocabulary_are_refused(tmp_path: Path) -> None:
    """The library takes them whole, with ids behind those of the vocabulary or of its own pieces."""
    transformers = pytest.importorskip("transformers")
    folder, new = write_folder(tmp_path / "model", settings=LOWER), len(PIECES)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    text = "the <ent> fox\u00e9s."

    def theirs() -> list[int]:
        made = transformers.AutoTokenizer.from_pretrained(folder)
        return list(made(text, add_special_tokens=False)["input_ids"])

    def decoder(**tokens: str) -> dict[str, object]:
        return {**LOWER, "added_tokens_decoder": {number[1:]: {"content": name} for number, name in tokens.items()}}

    plain = find_tokenizer(folder).open().encode([text])[0]
    assert theirs() == plain
    for file, content in (
        ("added_tokens.json", {"<ent>": new}),
        ("added_tokens.json", {"story": PIECES.index("story")}),
        ("tokenizer_config.json", decoder(**{f"_{new}": "<ent>"})),
        ("tokenizer_config.json", {**LOWER, "additional_special_tokens": ["<ent>"]}),
        ("special_tokens_map.json", {"additional_special_tokens": [{"content": "<ent>"}]}),
    ):
        before = (folder / file).read_bytes() if (folder / file).exists() else None
        (folder / file).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=rf"{file} adds the token '(<ent>|story)'.* by itself does not have"):
            find_tokenizer(folder)
        if before is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(before)
    (folder / "special_tokens_map.json").write_text('{"cls_token": "<s>", "sep_token": {"content": "[SEP]"}}')
    with pytest.raises(ValueError, match=r"calls cls_token '<s>', and vocab.txt has '\[CLS\]'"):
        find_tokenizer(folder)
    # What the vocabulary has anyway, as saved folders say it, changes nothing.
    (folder / "special_tokens_map.json").write_text('{"cls_token": "[CLS]"}')
    (folder / "added_tokens.json").write_text(json.dumps({"[PAD]": 0, "[MASK]": PIECES.index("[MASK]")}))
    (folder / "tokenizer_config.json").write_text(json.dumps(decoder(_0="[PAD]", _1="[UNK]")))
    assert find_tokenizer(folder).open().encode([text])[0] == theirs() == plain
    # The remedy of the message is one.
    (folder / "tokenizer_config.json").write_text(json.dumps(LOWER))
    (folder / "added_tokens.json").write_text(json.dumps({"<ent>": new, "fox": new + 1}))
    with pytest.raises(ValueError, match=r"AutoTokenizer.from_pretrained\(.*\).save_pretrained"):
        find_tokenizer(folder)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    assert find_tokenizer(folder).open().encode([text])[0] == theirs() != plain
    # The library takes the tokens of both.
    (folder / "added_tokens.json").write_text(json.dumps({"<ent>": new, "covid": new + 1}))
    with pytest.raises(ValueError, match=f"'covid' with the id {new + 1}, and tokenizer.json has no such token"):
        find_tokenizer(folder)


def test_offsets_name_the_characters_of_each_piece(tmp_path: Path, sentencepiece: Path) -> None:
    folder = write_folder(tmp_path / "model")
    wordpiece = find_tokenizer(folder).open()
    wordpiece.library.save(str(folder / "tokenizer.json"))  # type: ignore[attr-defined]
    cases: list[tuple[Kind, Path]] = [
        ("wordpiece", folder / "vocab.txt"),
        ("json", folder / "tokenizer.json"),
        ("sentencepiece", sentencepiece),
    ]
    for kind, file in cases:
        made = open_tokenizer(kind, file, lowercase=True)
        for text in (*TEXTS, UNICODE, "", " ", "\u6f22", f" {UNICODE} {UNICODE}"):
            ids, offsets = made.encode_with_offsets(text)
            assert ids == made.encode([text])[0]
            starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
            assert starts == sorted(starts)
            assert ends == sorted(ends)
            assert all(0 <= start <= end <= len(text) for start, end in offsets)
            # No letter is left out, however many characters and bytes stand before it.
            covered = {place for start, end in offsets for place in range(start, end)}
            assert all(place in covered for place, letter in enumerate(text) if letter.isalnum())
    text = "Fo\u00e9\u6f22e\u0301."
    ids, offsets = wordpiece.encode_with_offsets(text)
    by_eye = [("f", "F"), ("##o", "o"), ("##e", "\u00e9"), ("\u6f22", "\u6f22"), ("e", "e"), (".", ".")]
    assert [(p, text[a:b]) for p, (a, b) in zip(wordpiece.pieces(ids), offsets, strict=True)] == by_eye
    # sentencepiece has the space in front of a word in its first piece.
    text = "\U0001f600 \u6f22\u5b57 na\u00efve hill"
    made = open_tokenizer("sentencepiece", sentencepiece)
    ids, offsets = made.encode_with_offsets(text)
    pairs = [(piece, text[a:b]) for piece, (a, b) in zip(made.pieces(ids), offsets, strict=True)]
    assert pairs[:3] == [("\u2581", ""), ("<unk>", "\U0001f600"), ("\u2581", " ")]
    assert all(piece == place.replace(" ", "\u2581") for piece, place in pairs[2:])
