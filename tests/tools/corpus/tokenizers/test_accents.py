"""Accents of uncased vocabularies: dropped as in BERT, or kept where the vocabulary has them."""

from __future__ import annotations

import json
import logging
import random
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tools.corpus.tokenized import PIECES, SPECIAL, TEXTS, write_vocabulary
from tools.corpus.__main__ import main
from tools.corpus.tokenizers import install_tokenizer, load_tokenizer
from tools.corpus.tokenizers.export import write_tokenizer
from tools.corpus.tokenizers.folder import open_tokenizer
from tools.corpus.tokenizers.huggingface import FoundTokenizer, find_tokenizer
from tools.corpus.tokenizers.model_dir import tokenizers_in
from tools.corpus.tokenizers.wordpiece import WordPieceTokenizer, guess_accents
from tools.finetune.config import ModelSection
from tools.finetune.init_model import _install
from tools.squad.__main__ import _tokenizer
from tools.training.resume import _other_tokenizer

GERMAN = ("müde", "mu", "m", "u", "##u", "##ü", "##d", "##e", "grün")
MANY = (*PIECES, *GERMAN, "ş", "ığ", "##ğ", "한", "##국", "어", "が", "##ば", "ấ", "##é", "ά", "й", "क्", "##ि", "i̇")
ODD = "aA fF.xX sS'\t\u3000\x00\u0301\u0308\u0323\u0345éÉßİ\u0131IΣσςçñÜüşğ漢한국が\u3099ấάй\u0915\u094d\u093f😀-[]1½ﬁǅ"


def texts() -> list[str]:
    draw = random.Random(9)
    made = ["".join(draw.choices(ODD, k=draw.randrange(40))) for _ in range(300)]
    made += ["".join(draw.choices(MANY, k=draw.randrange(9))).replace("##", "") for _ in range(150)]
    made += [
        unicodedata.normalize(form, "Müde grün \u0131ğd\u0131r 한국어 がば ấ ά й İ")
        for form in ("NFC", "NFD", "NFKC", "NFKD")
    ]
    # The library takes special tokens out of a text; here they are text.
    return [text for text in [*made, *TEXTS] if not any(name in text for name in SPECIAL)]


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strip", [None, True, False])
def test_kind_9_ids_are_those_of_transformers_with_accents_and_without(
    tmp_path: Path, lowercase: bool, strip: bool | None
) -> None:
    transformers = pytest.importorskip("transformers")
    file = write_vocabulary(tmp_path / "vocab.txt", list(dict.fromkeys(MANY)))
    theirs = transformers.BertTokenizer(str(file), do_lower_case=lowercase, strip_accents=strip)
    made = WordPieceTokenizer(file, lowercase=lowercase, strip_accents=strip, any_case=True)
    odd = texts()
    expected = theirs(odd, add_special_tokens=False)["input_ids"]
    assert made.encode(odd) == expected
    flat = made.encode_flat(odd)
    assert [part.tolist() for part in np.split(flat.ids, np.cumsum(flat.lengths)[:-1])] == expected
    # What a folder of each kind is taken for, and what is written for the library, give the same ids again.
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lowercase, "strip_accents": strip}))
    found = find_tokenizer(tmp_path)
    assert found.open().encode(odd) == expected
    run, output = tmp_path / "run", tmp_path / "out"
    for folder in (run / "tokenizer", output):
        folder.mkdir(parents=True)
    found.install(run / "tokenizer")
    assert load_tokenizer(run / "tokenizer").encode(odd) == expected
    (run / "model.json").write_text("{}")
    assert tokenizers_in(run)[0].open().fingerprint == made.fingerprint
    assert tokenizers_in(run)[0].in_words().startswith(f"vocab.txt, {'lowercased' if lowercase else 'cased'}")
    assert ("accents" in tokenizers_in(run)[0].in_words()) == (strip not in (None, lowercase))
    write_tokenizer(run, output, max_length=64)
    config = json.loads((output / "tokenizer_config.json").read_bytes())
    assert config["strip_accents"] == (None if strip in (None, lowercase) else strip)
    normalizer = json.loads((output / "tokenizer.json").read_bytes())["normalizer"]
    assert normalizer["strip_accents"] == (lowercase if strip is None else strip)
    (output / "config.json").write_text('{"model_type": "bert"}')
    again = transformers.AutoTokenizer.from_pretrained(output)
    assert again(odd, add_special_tokens=False)["input_ids"] == expected
    for name in ("tokenizer.json", "vocab.txt"):  # each of the two by itself
        assert find_tokenizer(output).open().encode(odd) == expected
        (output / name).unlink()


CASES = {
    "German": (("müde", "m", "##u", "##d", "##e", "##ü"), "Müde", ["müde"], ["m", "##u", "##d", "##e"]),
    "Turkish": (("dağ", "dag", "##ş", "##s"), "Dağş", ["dağ", "##ş"], ["dag", "##s"]),
    "Vietnamese": (("tiếng", "tieng", "##v"), "TIẾNG", ["tiếng"], ["tieng"]),
    "Korean": (("한국", "##어", "x"), "한국어", ["한국", "##어"], ["[UNK]"]),
    "Japanese": (("が", "か", "x"), "が", ["が"], ["か"]),
    "Hindi": (("हिन्दी", "x"), "हिन्दी", ["हिन्दी"], ["[UNK]"]),
    "Russian": (("мой", "мои", "x"), "Мой", ["мой"], ["мои"]),
}


@pytest.mark.parametrize("name", CASES)
def test_kind_9_accents_are_kept_where_the_vocabulary_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    pieces, text, kept, dropped = CASES[name]
    file = write_vocabulary(tmp_path / "vocab.txt", [*SPECIAL, *pieces])

    def made(folder: str, *more: str) -> tuple[list[str], str]:
        words = ["tokenizer", "--vocab-file", str(file), "--output", str(tmp_path / folder), *more]
        assert main(words) == 0
        tokenizer = load_tokenizer(tmp_path / folder)
        return tokenizer.pieces(tokenizer.encode([text])[0]), capsys.readouterr().err

    found, told = made("guessed")
    assert found == kept
    assert "vocab.txt: accents are kept, since" in told
    assert "--strip-accents True or False says otherwise" in told
    for folder, option, expected in (("kept", "False", kept), ("dropped", "True", dropped)):
        found, told = made(folder, "--strip-accents", option)
        assert found == expected
        assert "accents" not in told
    settings = json.loads((tmp_path / "guessed" / "tokenizer-settings.json").read_bytes())
    assert (settings["lowercase"], settings["strip_accents"]) == (True, False)
    assert load_tokenizer(tmp_path / "guessed").fingerprint == load_tokenizer(tmp_path / "kept").fingerprint
    assert load_tokenizer(tmp_path / "guessed").fingerprint != load_tokenizer(tmp_path / "dropped").fingerprint
    assert main(["inspect", str(tmp_path / "guessed")]) == 0
    assert "strip accents" in capsys.readouterr().out


def test_kind_9_vocabularies_without_accents_are_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = [*SPECIAL, "mude", "ß", "ø", "漢", "か", *(f"word{number}" for number in range(2000))]
    file = write_vocabulary(tmp_path / "vocab.txt", pieces)
    assert guess_accents(file) == (
        True,
        f"vocab.txt: accents are dropped, since none of its {len(pieces)} pieces has any",
    )
    # One in some thousands is an accident, not a habit.
    write_vocabulary(file, [*pieces, "é"])
    strip, told = guess_accents(file)
    assert strip
    assert "since 1 of its" in told
    assert main(["tokenizer", "--vocab-file", str(file), "--output", str(tmp_path / "made")]) == 0
    assert "accents are dropped" in capsys.readouterr().err
    made = load_tokenizer(tmp_path / "made")
    assert made.pieces(made.encode(["Müde"])[0]) == ["mude"]
    assert made.fingerprint == open_tokenizer("wordpiece", file, lowercase=True).fingerprint
    # Folders of before have no word of accents.
    settings = json.loads((tmp_path / "made" / "tokenizer-settings.json").read_bytes())
    del settings["strip_accents"]
    (tmp_path / "made" / "tokenizer-settings.json").write_text(json.dumps(settings))
    assert load_tokenizer(tmp_path / "made").encode(["Müde"]) == made.encode(["Müde"])


def test_accents_are_asked_of_a_vocabulary_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words: Any = ["tokenizer", "--tokenizer-file", "t.json", "--output", str(tmp_path / "x"), "--strip-accents", "True"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "--strip-accents speaks of a --vocab-file. Got True with --tokenizer-file; leave it out." in told
    folder = tmp_path / "f"
    folder.mkdir()
    install_tokenizer("wordpiece", write_vocabulary(tmp_path / "v.txt", [*SPECIAL, *GERMAN]), folder, lowercase=True)
    made = load_tokenizer(folder)
    assert made.pieces(made.encode(["müde"])[0]) == ["mu", "##d", "##e"], "BERT's own rule, where nothing is said"


def test_kind_9_whoever_takes_a_vocabulary_treats_accents_alike(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("tools"), "propagate", True)
    file = write_vocabulary(tmp_path / "vocab.txt", [*SPECIAL, *GERMAN])
    with caplog.at_level(logging.INFO, logger="tools"):
        guessed = [_tokenizer(file, cased=False, strip_accents=None)]
        _install(ModelSection(vocab=str(file)), tmp_path / "fresh")
        for option in ("--strip-accents True or False", "model.strip_accents"):
            assert f"accents are kept, since 3 of its 14 pieces have any, such as 'müde'; {option} says" in caplog.text
    guessed.append(load_tokenizer(tmp_path / "fresh"))
    assert [made.pieces(made.encode(["Müde"])[0]) for made in guessed] == [["müde"], ["müde"]]
    _install(ModelSection(vocab=str(file), strip_accents=True), tmp_path / "told")
    for made in (load_tokenizer(tmp_path / "told"), _tokenizer(file, cased=False, strip_accents=True)):
        assert made.pieces(made.encode(["Müde"])[0]) == ["mu", "##d", "##e"]
    # The command that a run is told to begin with says what the guess would not.
    for lowercase, strip, option in ((True, None, True), (True, True, True), (True, False, None), (False, None, None)):
        found = FoundTokenizer(kind="wordpiece", file=file, lowercase=lowercase, strip_accents=strip)
        told = _other_tokenizer(tmp_path, [found])
        assert ("--tokenizer.strip-accents True" in told) == bool(option)
        assert ("--cased" in told) != lowercase
