"""Tokenizers without [CLS] and [MASK], as of sentence-vector models that came of decoders."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.models.toy import toy_config
from tests.tools.relatives import OF_QWEN, write_qwen_tokenizer
from tools.corpus.__main__ import main as corpus
from tools.corpus.tokenizers import load_tokenizer
from tools.corpus.tokenizers.base import TextLayout, find_special, spell_special
from tools.corpus.tokenizers.export import write_tokenizer
from tools.corpus.tokenizers.folder import install_tokenizer
from tools.corpus.tokenizers.model_dir import TOKENIZER, keep_tokenizer, tokenizer_of
from tools.predict.inputs import InputProblem, Query
from tools.predict.tasks import Classify, Ready
from tools.predict.text_encoder import TextEncoder, check_types
from tools.squad.windows import AnswerSettings, make_windows

END = OF_QWEN[0]
ENDS_BOTH, ENDS_PAIR = f"$A {END} $B:1 {END}:1", f"$A $B:1 {END}:1"
TEXTS = [
    "the cafe\u0301, THE fox's and IT'S 1234",
    " two  lines;\n\n\tof \u0939\u093f\u0928\u094d\u0926\u0940 \u6f22\u5b57 \r\n",
    "names: <|endoftext|>the<|im_start|> <|box_start|><tool_call> <|pad|>",
    "the the the the the the the the the the the the",
]


def ids_of(reader: TextEncoder, *texts: list[str]) -> list[list[int]]:
    return [each.ids.tolist() for each in reader.texts(*texts)]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Qwen2Tokenizer", "qwen3"),
        ("Qwen2TokenizerFast", "qwen3"),
        ("PreTrainedTokenizerFast", "qwen3"),
        ("TokenizersBackend", "eurobert"),
        (None, "qwen3"),
    ],
)
def test_the_ids_are_those_of_the_library(tmp_path: Path, name: str | None, config: str, side: str) -> None:
    """The end token stays where a text is cut, and names in texts are text, unless they are asked to be tokens."""
    transformers = pytest.importorskip("transformers")
    pair = ENDS_BOTH if side == "right" else ENDS_PAIR
    others = {"pad_token": OF_QWEN[1], "sep_token": OF_QWEN[2]}  # what nobody asks for
    write_qwen_tokenizer(tmp_path, name=name, pair=pair, truncation_side=side, **others)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": config}))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), tokenizer_of(tmp_path)
    assert (ours.layout.cut_left, ours.layout.second_type) == (side == "left", int(name == "PreTrainedTokenizerFast"))
    end = theirs.convert_tokens_to_ids(END)
    assert (ours.special_ids, ours.before, ours.end) == ({"pad": end, "sep": end}, [], end)
    for length in (12, 13, 99):
        options = {"split_special_tokens": True, "truncation": True, "max_length": length}
        found = ids_of(TextEncoder(ours, length), TEXTS)
        assert found == theirs(TEXTS, **options)["input_ids"]
        assert all(ids[-1] == end and ids.count(end) == 1 for ids in found)
        assert (
            ids_of(TextEncoder(ours, length), TEXTS, TEXTS[::-1]) == theirs(TEXTS, TEXTS[::-1], **options)["input_ids"]
        )
    assert ours.count_named(TEXTS) == 1
    keep_tokenizer(tmp_path, tmp_path / "ours")
    kept = tokenizer_of(tmp_path / "ours")
    assert (kept.layout, kept.special_ids, kept.encode(TEXTS)) == (ours.layout, ours.special_ids, ours.encode(TEXTS))
    ours.read_names()
    assert ids_of(TextEncoder(ours, 99), TEXTS) == theirs(TEXTS)["input_ids"]


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_qwen_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "again")
    assert ids_of(TextEncoder(tokenizer_of(tmp_path / "again"), 99), TEXTS[:2]) == theirs(TEXTS[:2])["input_ids"]


def test_types_are_those_of_the_template(tmp_path: Path) -> None:
    write_qwen_tokenizer(tmp_path, name="PreTrainedTokenizerFast", pair=ENDS_PAIR)
    (pair,) = TextEncoder(tokenizer_of(tmp_path), 99).texts(["ab"], ["c"])
    assert pair.types.tolist() == [0, 0, 1, 1]


def test_a_template_of_single_texts_alone_has_no_pairs(tmp_path: Path) -> None:
    write_qwen_tokenizer(tmp_path)
    reader = TextEncoder(tokenizer_of(tmp_path), 99)
    assert len(ids_of(reader, ["the"])[0]) == 2
    assert reader.tokenizer.layout.in_words().endswith("no pairs")
    with pytest.raises(ValueError, match=r"pairs have another form than A \[SEP\] B \[SEP\] and A B \[SEP\]"):
        reader.texts(["the"], ["the"])
    config: Any = toy_config(300)
    with pytest.raises(ValueError, match=r"pairs have another form than"):
        check_types(config, reader.tokenizer, "it")
    classes: Any = SimpleNamespace(config=config, cube=None, outputs=2)
    asked = [Query(where="line 1", number=0, first="the", second=second) for second in ("the", None)]
    problem, ready = Classify(classes, reader, "classify", ["a", "b"]).ready(asked)
    assert isinstance(problem, InputProblem)
    assert "does not say how two texts become one sequence" in problem.error
    assert isinstance(ready, Ready)
    assert ready.tokens == len(ready.content.ids) == 2
    with pytest.raises(ValueError, match=r"text 0 has no token: ''"):
        reader.texts([""])


def without_normalizer(plan: dict[str, Any]) -> None:
    plan["normalizer"] = None


def with_marks_in_words(plan: dict[str, Any]) -> None:
    """As newer Qwens have it."""
    pattern = plan["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    pattern["Regex"] = pattern["Regex"].replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+")


def with_lines_in_one(plan: dict[str, Any]) -> None:
    pattern = plan["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    pattern["Regex"] = pattern["Regex"].replace(r"|\s*[\r\n]+", "")


@pytest.mark.parametrize(
    ("change", "name"),
    [(without_normalizer, "Qwen2TokenizerFast"), (with_marks_in_words, None), (with_lines_in_one, None)],
)
def test_a_file_that_cuts_text_otherwise_than_its_class(tmp_path: Path, change: Any, name: str | None) -> None:
    write_qwen_tokenizer(tmp_path, change=change, name=name)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(
        ValueError, match=r"contradict each other: as a Qwen2Tokenizer(Fast)?, .* add_prefix_space = false"
    ):
        tokenizer_of(tmp_path)
    write_qwen_tokenizer(tmp_path, change=change, name="TokenizersBackend")
    tokenizer_of(tmp_path)


def not_special(plan: dict[str, Any]) -> None:
    plan["added_tokens"][0]["special"] = False


def of_two_ends(plan: dict[str, Any]) -> None:
    plan["post_processor"]["processors"][1]["single"] *= 2


def of_another_id(plan: dict[str, Any]) -> None:
    plan["post_processor"]["processors"][1]["special_tokens"][END]["ids"] = [0]


def of_a_generator(plan: dict[str, Any]) -> None:
    del plan["post_processor"]["processors"][1]


def of_nothing(plan: dict[str, Any]) -> None:
    plan["post_processor"] = None


@pytest.mark.parametrize("change", [not_special, of_two_ends, of_another_id, of_a_generator, of_nothing])
def test_nothing_but_one_end_token_behind_a_text_will_do(tmp_path: Path, change: Any) -> None:
    """Those of generators have none: of an empty text nothing would be left, and pooling of the last token would read
    one of the text."""
    write_qwen_tokenizer(tmp_path, change=change)
    with pytest.raises(
        ValueError, match=r"no token for 'cls': .* unless a tokenizer.json has a template of its own that"
    ):
        tokenizer_of(tmp_path)


@pytest.mark.parametrize("name", ["RobertaTokenizer", "BertTokenizer"])
def test_a_class_that_puts_a_cls_by_itself(tmp_path: Path, name: str) -> None:
    def as_robertas(plan: dict[str, Any]) -> None:
        plan["normalizer"] = None
        plan["pre_tokenizer"] = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        }

    write_qwen_tokenizer(tmp_path, change=as_robertas, name=name)
    with pytest.raises(
        ValueError, match=rf"puts no \[CLS\] before a text, and as a {name} the transformers library does"
    ):
        tokenizer_of(tmp_path)


def test_what_needs_more_than_texts_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_qwen_tokenizer(tmp_path, pair=ENDS_BOTH)
    tokenizer = tokenizer_of(tmp_path)
    message = r"has no \[CLS\] and no \[MASK\], .*'<\|endoftext\|>' behind a text is all that it adds"
    with pytest.raises(ValueError, match=message):
        _ = tokenizer.special
    with pytest.raises(ValueError, match=message):
        make_windows([("the fox", "a b")], tokenizer, AnswerSettings(max_length=16, question_length=8, stride=2))
    options = ["--tokenizer-file", str(tmp_path / "tokenizer.json"), "--output", str(tmp_path / "tokenizer")]
    assert corpus(["tokenizer", *options]) == 2
    assert "has no [CLS] and no [MASK]" in capsys.readouterr().err
    assert not (tmp_path / "tokenizer" / "tokenizer.json").exists()


def test_which_special_tokens_there_are() -> None:
    ids = {name: number for number, name in enumerate(["<e>", "<pad>", "<s>", "</s>", "<mask>"])}
    assert find_special(ids.get, "x", added=["<e>", "<pad>"], end=0) == {"pad": 1, "sep": 0}
    assert find_special(ids.get, "x", added=["<e>"], end=0) == {"pad": 0, "sep": 0}, "mere pieces are text"
    assert find_special(ids.get, "x", added=["<e>", "<s>"], end=0) == {"pad": 0, "sep": 0}
    of_four = {"pad": 1, "cls": 2, "sep": 3, "mask": 4}
    assert find_special(ids.get, "x", added=["<e>", "<s>", "<mask>"], end=0) == of_four, "as without a template"
    letters = {"<": 5, "e": 6, ">": 7, **ids}
    assert spell_special(letters.get, {"pad": 0, "sep": 0}, None, "x", added=["<e>"]) == {0: (5, 6, 7)}


def test_one_without_files_of_the_library_goes_out(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_qwen_tokenizer(tmp_path)
    (tmp_path / "ours" / TOKENIZER).mkdir(parents=True)
    (tmp_path / "ours" / "model.json").write_text("{}")
    (tmp_path / "out").mkdir()
    for layout, replaced in ((TextLayout(pairs=False), False), (TextLayout(), True)):
        install_tokenizer("json", tmp_path / "tokenizer.json", tmp_path / "ours" / TOKENIZER, layout=layout)
        told = write_tokenizer(tmp_path / "ours", tmp_path / "out", max_length=77, types=1)
        assert ("has the model's template now" in told) == replaced, "pairs with an end between"
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "out"),
        load_tokenizer(tmp_path / "ours" / TOKENIZER),
    )
    for texts in (["the fox"], ["the fox", "a hill"]):
        assert theirs(*texts)["input_ids"] == ids_of(TextEncoder(ours, 77), *([text] for text in texts))[0]
    assert tokenizer_of(tmp_path / "out").special_ids == ours.special_ids
