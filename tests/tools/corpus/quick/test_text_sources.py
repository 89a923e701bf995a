"""What comes before the ids: sources of text, sentences, the tokenizer."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.tools.stories import STORIES
from tools.corpus.quick import text_sources
from tools.corpus.quick.sentencepiece_tokenizer import load_tokenizer, train_tokenizer
from tools.corpus.quick.text_sources import EmbeddedSource, TextSource, docstrings
from tools.corpus.sentences import split_sentences


@pytest.mark.slow
def test_embedded_documents_come_in_the_same_order() -> None:
    first, again = EmbeddedSource(), EmbeddedSource()
    assert first.fingerprint() == again.fingerprint()
    # The help topics and a hundred modules; the rest takes seconds and nothing new.
    assert list(islice(first.documents(), 180)) == list(islice(again.documents(), 180))


def test_tests_and_installed_packages_are_no_part_of_it() -> None:
    source = EmbeddedSource()
    parts = {part for file in source._files for part in file.relative_to(source._root).parts}
    assert "argparse.py" in parts
    assert parts.isdisjoint({"test", "tests", "idle_test", "site-packages"})


def test_docstrings_in_the_order_of_the_source() -> None:
    source = b'''
"""Module."""
import os
x = "no docstring"
if os.name:
    class A:
        """Class."""
        async def f(self):
            """Method."""
            def g():
                """Inner."""
try:
    pass
except OSError:
    def h():
        r"""Handler with \\d."""
def late():
    """Late."""
'''
    assert docstrings(source) == ["Module.", "Class.", "Method.", "Inner.", "Handler with \\d.", "Late."]
    assert docstrings(b"print 'not Python 3'") == []


def test_a_module_is_parsed_once_and_again_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    def noted(source: bytes) -> list[str]:
        parsed.append(source)
        return docstrings(source)

    monkeypatch.setattr(text_sources, "docstrings", noted)
    module = tmp_path / "module.py"
    monkeypatch.setattr(text_sources, "_sources", lambda root: iter([module]))
    module.write_text('"""As it was."""')
    os.utime(module, ns=(0, 1))
    assert [list(EmbeddedSource().documents())[-1] for _ in range(2)] == ["As it was."] * 2
    module.write_text('"""As it is now."""')
    os.utime(module, ns=(0, 2))
    assert list(EmbeddedSource().documents())[-1] == "As it is now."
    assert parsed == [b'"""As it was."""', b'"""As it is now."""']


def test_nothing_is_collected_while_a_module_is_parsed() -> None:
    begun: list[str] = []
    source = b"""def f(a, b, c):\n    return [a + b * c, (a, b), {a: c}]\n""" * 500

    def note(phase: str, info: dict[str, int]) -> None:
        begun.append(phase)

    gc.callbacks.append(note)
    try:
        assert docstrings(source) == []
    finally:
        gc.callbacks.remove(note)
    assert begun == []
    assert gc.isenabled()


def test_a_blank_line_ends_a_document(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes("\n\nOne.\r\nTwo.\r\n \t\r\n\r\nThree, ünïcode.".encode())
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfZero.\n")
    (tmp_path / "c.md").write_text("not text")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "d.txt").write_text("Last.")
    source = TextSource(tmp_path)
    assert list(source.documents()) == ["Zero.", "One.\nTwo.", "Three, ünïcode.", "Last."]
    assert list(TextSource(tmp_path / "a.txt").documents()) == ["Zero."]
    for name, told in (("a.csv", "a table"), ("a.JSONL", "JSON")):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=rf"{name} is {told} by its suffix: its marks and names would be learnt"):
            TextSource(tmp_path / name)


def test_lines_may_end_with_cr_alone(tmp_path: Path) -> None:
    """As of old Macs, and of Excel's "Text (Macintosh)"; where a file has LF, CR is a space."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfOne.\rTwo.\r \r\rThree.\r")
    assert list(TextSource(tmp_path).documents()) == ["One.\nTwo.", "Three."]
    (tmp_path / "a.txt").write_bytes(b"One.\rTwo.\n\nThree.")
    assert list(TextSource(tmp_path).documents()) == ["One.\rTwo.", "Three."]


def test_the_fingerprint_follows_the_text_and_not_the_place(tmp_path: Path) -> None:
    prints = []
    for folder, name, content in (("1", "a", "x"), ("2", "a", "x"), ("3", "b", "x"), ("4", "a", "y")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.txt").write_text(content)
        prints.append(TextSource(tmp_path / folder).fingerprint())
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_prose_is_split_into_sentences_across_lines() -> None:
    text = "Dr. Smith reads (e.g. books)\nat  night. He sleeps\nlate.\n\nA heading\n\nIs it done?  Yes, it is!"
    assert split_sentences(text) == [
        "Dr. Smith reads (e.g. books) at night.",
        "He sleeps late.",
        "A heading",
        "Is it done?",
        "Yes, it is!",
    ]


def test_code_is_split_into_lines_and_rules_are_left_out() -> None:
    text = ">>> total = add(1, 2). Next\n3\n\nTitle\n=====\n\n| a | 1.0 |\n|---|-----|\n| b | 2.5 |"
    assert split_sentences(text) == [">>> total = add(1, 2). Next", "3", "Title", "| a | 1.0 |", "| b | 2.5 |"]


def test_lines_without_full_stops_do_not_become_one_sentence() -> None:
    lines = [f"line of words number {number}" for number in range(40)]
    assert split_sentences("\n".join(lines)) == lines


def test_nothing_gives_no_sentence() -> None:
    assert split_sentences("") == split_sentences(" \n\n \n") == split_sentences("***\n\n...") == []


@pytest.mark.parametrize(
    "problem", [KeyboardInterrupt(), ValueError("line 7 is bad"), OSError(5, "Input/output error")]
)
def test_what_ends_the_reading_of_sentences_comes_out_of_training_as_it_is(
    problem: BaseException, tmp_path: Path
) -> None:
    def sentences() -> Iterator[str]:
        yield from split_sentences(STORIES)
        raise problem

    with pytest.raises(type(problem)) as found:
        train_tokenizer(sentences(), tmp_path / "a", vocab_size=60)
    assert found.value is problem
    assert not list(tmp_path.iterdir())


def test_the_tokenizer_has_its_special_pieces_and_is_reproducible(tmp_path: Path) -> None:
    sentences = split_sentences(STORIES)
    for name in ("a", "b"):
        train_tokenizer(sentences, tmp_path / name, vocab_size=60)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    tokenizer = load_tokenizer(tmp_path / "a")
    assert [tokenizer.id_to_piece(i) for i in range(5)] == ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.vocab_size() == 60
    ids = tokenizer.encode("The fox [MASK] in the town.")
    assert min(ids) >= 1
    assert not set(ids) & {0, 2, 3, 4}
    assert tokenizer.decode(tokenizer.encode("The fox went to the town.")) == "The fox went to the town."
    assert tokenizer.encode("漢")[-1] == 1


def test_a_vocabulary_too_large_or_too_small_is_named_with_one_that_works(tmp_path: Path) -> None:
    sentences = split_sentences(STORIES)
    with pytest.raises(ValueError, match=r"small.*5000.*(\d+)") as error:
        train_tokenizer(sentences, tmp_path / "model", vocab_size=5000)
    largest = int(str(error.value).split("works is ")[1].split(".")[0])
    train_tokenizer(sentences, tmp_path / "model", vocab_size=largest)
    assert load_tokenizer(tmp_path / "model").vocab_size() == largest
    with pytest.raises(ValueError, match=r"vocabulary.*20.*it needs \d+"):
        train_tokenizer(sentences, tmp_path / "small", vocab_size=20)
    with pytest.raises(ValueError, match=r"vocab_size.*1.*0"):
        train_tokenizer(sentences, tmp_path / "small", vocab_size=0)
    assert not (tmp_path / "small").exists()


def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    for content in (None, b"", b"no model"):
        if content is not None:
            (tmp_path / "model").write_bytes(content)
        with pytest.raises(ValueError, match="no sentencepiece model"):
            load_tokenizer(tmp_path / "model")
