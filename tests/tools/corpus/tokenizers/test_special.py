"""Names of special tokens in a text stay text, also where the tokenizer's own library takes them for the tokens."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from tests.tools.corpus.tokenized import BERT, write_sentencepiece, write_vocabulary
from tools.corpus.tokenizers.base import Kind, find_special, spell_special
from tools.corpus.tokenizers.folder import open_tokenizer
from tools.corpus.tokenizers.model_dir import tokenizer_of
from tools.corpus.tokenizers.wordpiece import make_library

ROBERTA = ("<pad>", "<s>", "</s>", "<mask>")
CHARACTERS = [*string.ascii_lowercase, *"<>/[]", *string.ascii_uppercase]


def unigram(unknown: int = 4) -> Tokenizer:
    """Its model lists the special tokens among its pieces, as converted sentencepiece models do."""
    pieces = [(name, 0.0) for name in (*ROBERTA, "<unk>")] + [("▁", -2.0)] + [(c, -3.0) for c in CHARACTERS]
    made = Tokenizer(models.Unigram(pieces, unk_id=unknown))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.add_special_tokens([*ROBERTA[:3], AddedToken("<mask>", lstrip=True)])
    return made


def words() -> Tokenizer:
    """Between two spaces is a piece, and special tokens were added as words of the user."""
    pieces = [*BERT, "[UNK]", "a", "b", *"[]", *string.ascii_lowercase[2:]]
    made = Tokenizer(models.WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_tokens(list(BERT[:2]))
    return made


@pytest.mark.parametrize(
    ("make", "names", "text", "shown"),
    [
        (unigram, ROBERTA, "a <mask> b</s>", ["▁", "a", "▁", *"<mask>", "▁", "b", *"</s>"]),
        # What normalises to such a name is one.
        (unigram, ROBERTA, "\uff1cs\uff1e", ["▁", *"<s>"]),
        # What has no piece of its own is a small letter, or unknown.
        (words, BERT, "a [MASK] b [PAD]", ["a", "[", "m", "a", "s", "k", "]", "b", "[", "p", "a", "d", "]"]),
    ],
)
def test_a_library_that_sees_tokens_in_a_text_is_not_followed(
    tmp_path: Path, make: Callable[[], Tokenizer], names: tuple[str, ...], text: str, shown: list[str]
) -> None:
    library = make()
    library.save(str(tmp_path / "tokenizer.json"))
    library.encode_special_tokens = True
    special = {library.token_to_id(name) for name in names}
    assert special & set(library.encode(text, add_special_tokens=False).ids)  # else nothing is tested

    tokenizer = open_tokenizer("json", tmp_path / "tokenizer.json")
    assert set(tokenizer.special_ids.values()) == special
    [ids] = tokenizer.encode([text])
    assert tokenizer.pieces(ids) == shown
    assert not special & set(ids)
    assert tokenizer.encode_flat([text, "a"]).ids.tolist() == ids + tokenizer.encode(["a"])[0]
    again, offsets = tokenizer.encode_with_offsets(text)
    assert again == ids
    assert len(offsets) == len(ids)
    assert offsets[-1][1] == len(text)


def test_symbols_that_the_user_of_sentencepiece_defined_stay_text(tmp_path: Path) -> None:
    tokenizer = open_tokenizer("sentencepiece", write_sentencepiece(tmp_path / "tokenizer.model"))
    special = set(tokenizer.special_ids.values())
    text = "a [MASK] fox[SEP]"
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert special & set(library.encode(text))  # else nothing is tested
    [ids] = tokenizer.encode([text])
    assert tokenizer.pieces(ids)[-5:] == [*"[SEP", "<unk>"]  # "]" is not in what it was trained on
    assert not special & set(ids)
    assert tokenizer.encode_with_offsets(text)[0] == ids
    assert tokenizer.encode_with_offsets(text)[1][-5:] == 5 * [(12, 17)]
    assert tokenizer.decode([tokenizer.special.cls, *tokenizer.encode(["a fox"])[0]]).startswith("[CLS]")


def test_bytes_spell_what_has_no_piece(tmp_path: Path) -> None:
    file = write_sentencepiece(tmp_path / "tokenizer.model", vocab_size=340, byte_fallback=True)
    tokenizer = open_tokenizer("sentencepiece", file)
    [ids] = tokenizer.encode(["a [SEP]"])
    assert tokenizer.pieces(ids)[-1] == "<0x5D>"
    assert tokenizer.decode(ids) == "a [SEP]"


def test_a_special_token_that_stands_for_the_unknown_is_refused(tmp_path: Path) -> None:
    unigram(unknown=1).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"id.*1.*'cls'"):
        open_tokenizer("json", tmp_path / "tokenizer.json")


def test_what_cannot_be_said_at_all_is_left_out() -> None:
    ids = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, "S": 4, "p": 5}
    special = find_special(ids.get, "x")
    assert spell_special(ids.get, special, None, "x") == {0: (5,), 1: (4,), 2: (4, 5), 3: (4,)}


@pytest.mark.parametrize("kind", ["json", "wordpiece"])
def test_names_are_tokens_where_that_is_asked_for(tmp_path: Path, kind: Kind) -> None:
    """As the transformers library has them, those too that somebody added (`[E1]`)."""
    transformers = pytest.importorskip("transformers")
    pieces = [*BERT, "[UNK]", *"[]", *string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(pieces) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    added = kind == "json"
    if added:
        library = make_library({piece: n for n, piece in enumerate(pieces)}, lowercase=True, strip_accents=None)
        library.add_special_tokens([*BERT, "[UNK]", "[E1]"])
        library.save(str(tmp_path / "tokenizer.json"))
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["a [SEP] b", "ab[MASK]c [E1] d", "no name [here]", "[UNK]"]
    tokenizer = tokenizer_of(tmp_path)
    assert not {*tokenizer.special_ids.values()} & {number for ids in tokenizer.encode(texts) for number in ids}
    assert tokenizer.count_named(texts) == 3
    assert tokenizer.count_named(["[E1] a"]) == added
    tokenizer.read_names()
    wanted = theirs(texts, add_special_tokens=False)["input_ids"]
    assert tokenizer.encode(texts) == wanted
    assert tokenizer.encode_flat(texts).ids.tolist() == [number for ids in wanted for number in ids]
    assert [tokenizer.encode_with_offsets(text)[0] for text in texts] == wanted


THAI = "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22"


@pytest.mark.parametrize(("kind", "longest"), [("wordpiece", 100), ("json", 100), ("json", 200)])
def test_what_has_no_piece_is_counted_in_characters(tmp_path: Path, kind: Kind, longest: int) -> None:
    """Words of more than 100 characters too, as BERT has them; of a tokenizer.json as many as it says."""
    pieces = [*BERT, "[UNK]", *"a\u1100", "##\u1161", *set(THAI), *(f"##{letter}" for letter in set(THAI))]
    file = write_vocabulary(tmp_path / "vocab.txt", pieces)
    if kind == "json":
        library = make_library({piece: n for n, piece in enumerate(pieces)}, lowercase=True, strip_accents=False)
        plan = json.loads(library.to_str())
        plan["model"]["max_input_chars_per_word"] = longest
        file = tmp_path / "tokenizer.json"
        file.write_text(json.dumps(plan))
    tokenizer = open_tokenizer(kind, file, lowercase=True, strip_accents=False)
    assert tokenizer.longest_word == longest
    for text, unknown, too_long in (
        (THAI * 14, 0, 0),  # 98
        (f"a {THAI * 14}xa", 100, 0),
        (f"a {THAI * 20} {THAI} x", 1 + (140 if longest == 100 else 0), 140 if longest == 100 else 0),
        (f"{THAI * 30} a", 210, 210),
        ("a" * (longest + 1), longest + 1, longest + 1),
    ):
        found = tokenizer.count_unknown(["a", text], tokenizer.encode(["a", text]))
        assert (found.characters, found.unknown, found.too_long) == (1 + len(text), unknown, too_long), text
        assert (f"words of more than {longest} characters" in found.in_words()) == (too_long > 0)
        assert bool(found.in_words()) == (unknown > 0)


def test_a_word_is_too_long_as_the_rules_have_made_it(tmp_path: Path) -> None:
    """A syllable of Hangul without accents is two or three letters."""
    file = write_vocabulary(tmp_path / "vocab.txt", [*BERT, "[UNK]", "\u1100", "##\u1100", "##\u1161"])
    tokenizer = open_tokenizer("wordpiece", file, lowercase=True, any_case=True)
    for syllables, unknown in ((50, 0), (51, 51)):
        text = "\uac00" * syllables
        found = tokenizer.count_unknown([text], tokenizer.encode([text]))
        assert (found.unknown, found.too_long) == (unknown, unknown)


def test_unknown_characters_of_a_sentencepiece_model_are_counted(tmp_path: Path) -> None:
    tokenizer = open_tokenizer("sentencepiece", write_sentencepiece(tmp_path / "tokenizer.model"))
    texts = ["the \u6f22\u5b57 fox", "a dog", "\u6f22"]
    found = tokenizer.count_unknown(texts, tokenizer.encode(texts))
    assert (found.characters, found.unknown, found.too_long) == (16, 3, 0)
    assert found.in_words() == "3 of 16 characters are unknown to the tokenizer"


def test_a_sentencepiece_model_does_not_tell_names_from_text(tmp_path: Path) -> None:
    tokenizer = open_tokenizer("sentencepiece", write_sentencepiece(tmp_path / "tokenizer.model"))
    with pytest.raises(ValueError, match=r"can be read as tokens by a vocab.txt or a tokenizer.json"):
        tokenizer.read_names()
