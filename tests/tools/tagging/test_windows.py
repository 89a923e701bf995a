"""Words and their pieces, and windows in one of which each piece is decided."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from models.bert import BertConfig, BertForTokenClassification
from models.bert.tasks import tag_logits
from tensor3d import Cube
from tests.tools.squad.small import PIECES, small_tokenizer
from tools.corpus.tokenizers import Tokenizer
from tools.tagging import windows as windows_module
from tools.tagging.schemes import Scheme
from tools.tagging.windows import (
    Pieces,
    TagSettings,
    WordTags,
    WordText,
    cut,
    tag_texts,
    targets_of,
    window_targets,
    window_text,
    windows_of,
)

CONFIG = BertConfig(
    layers=1, hidden=16, heads=2, vocab=len(PIECES), positions=16, dropout=0.0, attention_dropout=0.0, std=0.5
)
LONG = ["red", "uncommons", "7", "house", "uncommon"] * 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return small_tokenizer(tmp_path_factory.mktemp("vocabulary"))


def settings(length: int, stride: int) -> TagSettings:
    return TagSettings(scheme="iob2", max_length=length, stride=stride)


def test_words_have_first_pieces(tokenizer: Tokenizer) -> None:
    pieces = cut([WordText.of_words(["Uncommons", "\u200b", "7.", "red"])], tokenizer)[0]
    assert tokenizer.pieces(pieces.ids.tolist()) == ["un", "##common", "##s", "7", ".", "red"]
    assert pieces.first.tolist() == [0, -1, 3, 5], "a word of no character that the tokenizer keeps has none"
    assert pieces.word.tolist() == [0, 0, 0, 2, 2, 3]
    tags = np.array([1, 2, 3, 0])
    assert targets_of(pieces, tags, every=False).tolist() == [1, -100, -100, 3, -100, 0]
    assert targets_of(pieces, tags, every=True).tolist() == [1, 1, 1, 3, 3, 0]


class Whole:
    """A tokenizer whose pieces go over words, as those of a vocabulary of sentence pieces may."""

    def encode_all_with_offsets(self, _: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        return [([5, 6, 7], [(0, 2), (2, 5), (5, 6)])]  # "ab", "'s ", "x" of "ab's x"


def test_words_may_share_a_piece() -> None:
    text = WordText.of_text("ab's x")
    assert text.words == ["ab", "'", "s", "x"]
    pieces = cut([text], Whole())[0]  # type: ignore[arg-type]
    assert pieces.first.tolist() == [0, 1, 1, 2]
    assert targets_of(pieces, np.array([0, 1, 2, 3]), every=False).tolist() == [0, 1, 3], "the first one's tag"


def test_marks_and_joiners_belong_to_the_character_before_them() -> None:
    for text, words in (
        ("\u0e14\u0e35\u0e19", ["\u0e14\u0e35", "\u0e19"]),  # Thai: a consonant with its vowel, and one without
        ("\u304b\u3099a", ["\u304b\u3099", "a"]),  # what sounds \u304c
        ("\U0001f469\u200d\U0001f467 !\ufe0f", ["\U0001f469\u200d", "\U0001f467", "!\ufe0f"]),
        ("\u0928\u0926\u0940 e\u0301t\u00e9", ["\u0928\u0926\u0940", "e\u0301t\u00e9"]),
        (" \u0301a", ["\u0301a"]),  # there is none before it
    ):
        assert WordText.of_text(text).words == words


def said(numbers: Sequence[int], shared: Sequence[int] = ()) -> WordTags:
    alike = np.array([place in shared for place in range(len(numbers))])
    return WordTags(numbers=np.array(numbers), probabilities=np.ones(len(numbers), np.float32), shared=alike)


@pytest.mark.parametrize(
    ("scheme", "known", "first", "tags"),
    [
        ("iob2", "O B-X I-X", "B-X", "B-X I-X I-X O"),  # once an entity for each character of a piece
        ("iob2", "O B-X I-X", "I-X", "I-X I-X I-X O"),
        ("iob1", "O B-X I-X", "B-X", "B-X I-X I-X O"),
        ("iobes", "O B-X I-X E-X S-X", "B-X", "B-X I-X E-X O"),
        ("iobes", "O B-X I-X E-X S-X", "I-X", "I-X I-X E-X O"),
        ("iobes", "O B-X I-X", "B-X", "B-X I-X I-X O"),  # E-X is no label
        ("iobes", "O B-X E-X S-X", "B-X", "B-X E-X O O"),
        ("iobes", "O B-X I-X E-X S-X", "S-X", "S-X O O O"),
        ("iobes", "O B-X I-X E-X S-X", "E-X", "E-X O O O"),
        ("iob2", "O B-X", "B-X", "B-X O O O"),  # no entity has two words
        ("iob2", "O B-X I-X", "O", "O O O O"),
        ("plain", "N V", "V", "V V V N"),
    ],
)
def test_words_that_share_a_piece_are_one_entity(scheme: Scheme, known: str, first: str, tags: str) -> None:
    labels = known.split()
    found = said([labels.index(first)] * 3 + [0], shared=[1, 2])
    assert found.names(labels, scheme) == tags.split()


def test_an_entity_of_several_pieces_ends_where_its_last_word_does() -> None:
    labels = ["O", "B-X", "I-X", "E-X", "S-X"]

    def named(tags: str, shared: Sequence[int], missing: Sequence[int] = ()) -> str:
        numbers = [-1 if place in missing else labels.index(tag) for place, tag in enumerate(tags.split())]
        return " ".join(said(numbers, shared).names(labels, "iobes"))

    assert named("B-X I-X I-X O", shared=[2]) == "B-X I-X E-X O"
    assert named("B-X B-X E-X O", shared=[1]) == "B-X I-X E-X O"
    assert named("B-X B-X O B-X O", shared=[1, 3], missing=[2]) == "B-X I-X I-X E-X O"
    assert named("B-X I-X O", shared=[]) == "B-X I-X O", "what the model said of a word stays"
    assert named("B-X B-X S-X", shared=[1]) == "B-X E-X S-X"


def test_a_word_without_a_piece_is_in_an_entity_that_goes_on_behind_it() -> None:
    labels = ["O", "B-X", "I-X", "B-Y", "I-Y"]
    assert said([-1, 1, -1, -1, 2, -1]).names(labels, "iob2") == ["O", "B-X", "I-X", "I-X", "I-X", "O"]
    for behind in ("B-X", "I-Y", "O"):  # another one
        assert said([1, -1, labels.index(behind)]).names(labels, "iob2") == ["B-X", "O", behind]
    assert said([1, -1, 1], shared=[2]).names(labels, "iob2") == ["B-X", "I-X", "I-X"], "one piece around it"


def test_pieces_tell_which_words_share_them() -> None:
    text = Pieces(ids=np.array([5, 6]), first=np.array([-1, 0, 0, -1, 0, 1, -1]), word=np.array([4, 5]))
    found = windows_module._of_words(text, np.array([1, 2]), np.ones(2, np.float32))
    assert found.shared.tolist() == [False, False, True, False, True, False, False]
    assert found.numbers.tolist() == [-1, 1, 1, -1, 1, 2, -1]


@pytest.mark.parametrize(("length", "stride"), [(10, 8), (10, 3), (12, 1), (64, 5)])
def test_each_piece_is_learnt_once(length: int, stride: int, tokenizer: Tokenizer) -> None:
    texts = cut([WordText.of_words(words) for words in (LONG, ["red"], LONG[:7])], tokenizer)
    windows = windows_of(texts, settings(length, stride))
    for number, text in enumerate(texts):
        seen = np.zeros(len(text.ids), dtype=int)
        targets = np.arange(len(text.ids))
        for window in (window for window in windows if window.text == number):
            ids = window_text(window, texts, tokenizer).ids
            assert len(ids) == window.tokens <= length
            own = window_targets(window, targets)
            assert (own[0], own[-1], len(own)) == (-100, -100, len(ids))
            learnt = own[own >= 0]
            assert (text.ids[learnt] == ids[own >= 0]).all()
            seen[learnt] += 1
        assert (seen == 1).all()
    assert len(windows) > 3 or length == 64


def test_a_word_is_tagged_where_it_has_most_context(tokenizer: Tokenizer) -> None:
    cube = Cube.single()
    cube.manual_seed(1)
    model = BertForTokenClassification(CONFIG, 5, cube)
    text = cut([WordText.of_words(LONG)], tokenizer)[0]
    windows = windows_of([text], settings(12, 4))
    (found,) = tag_texts(model, [text], tokenizer, settings(12, 4), batch_tokens=25)
    different = 0
    for word, piece in enumerate(text.first.tolist()):
        said = {}
        for window in windows:
            if 0 <= (place := piece - window.first) < window.pieces:
                (logits,) = tag_logits(model, [window_text(window, [text], tokenizer)])
                around = min(place, window.pieces - 1 - place)
                said[around, window.pieces, -window.first] = logits[1 + place].softmax(0)
        best = said[max(said)]
        assert found.numbers[word] == best.argmax()
        assert found.probabilities[word] == pytest.approx(float(best.max()), abs=1e-5)
        different += len({int(each.argmax()) for each in said.values()}) > 1
    assert different, "windows differ, so that it matters which one decides"
    assert found.names(["a", "b", "c", "d", "e"], "plain")[0] in "abcde"
    with torch.no_grad():
        model.tags.bias += torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        tag_texts(model, [text], tokenizer, settings(12, 4), batch_tokens=25)


def test_settings_of_folders() -> None:
    labels = ("O", "B-X", "E-X")
    assert TagSettings.from_facts({}, labels, 12) == TagSettings(scheme="iobes", max_length=12, stride=5)
    told = TagSettings(scheme="iob1", max_length=20, stride=9)
    assert TagSettings.from_facts(told.as_facts(), labels, 20) == told
    assert TagSettings.from_facts(told.as_facts(), labels, 8).stride == 6, "no token falls between shorter windows"
    for facts in ({"tag": {"stride": 3}}, {"tag": [1]}, {"tag": {"scheme": "iob2", "stride": "x"}}):
        with pytest.raises(ValueError, match=r"facts\.tag are no settings of tags"):
            TagSettings.from_facts(facts, labels, 12)
    with pytest.raises(ValueError, match=r"'U-X' is a label of a scheme that is not read here.*S- for U-"):
        TagSettings.from_facts({}, ("O", "B-X", "I-X", "U-X"), 12)
    assert TagSettings.from_facts({}, ("M-phase", "other"), 12).scheme == "plain"
    with pytest.raises(ValueError, match="scheme must be one of"):
        TagSettings.from_facts({"tag": {"scheme": "bilou", "stride": 3}}, labels, 12)
