"""`clean_page` on what nobody should write: any string, unclosed and deeply nested brackets, pages without an end."""

from __future__ import annotations

import re
import time
from importlib import import_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.corpus.extract.wikitext import MOST_PARSED, clean_page

PIECES = st.sampled_from([
    "[[", "]]", "{{", "}}", "{|", "|}", "|", "\n", "\n\n", "=", "==", "''", "'''", "'", "<ref>", "</ref>", "<b>",
    "<!--", "-->", "<math>", "</math>", "<sup>1</sup>", "<table>", "</table>", "{{{", "}}}", "[http://a ",
    "(", ")", ";", ",", " ", "&nbsp;", "&#9;", "&", "*", ":", "#", "!", "File:", "Category:", "lang|fr|",
    "convert|5|km", "quote|", "nowrap|", "ndash", "a", "word. ", "\ufdd0", "\ufdd1", "\x00", "é",
    "語。", "1=",
    "-", "__TOC__", "x\u2028",
])  # fmt: skip
MARKUP = re.compile(r"\[\[|\]\]|\{\{|\}\}|\{\||''|</?(?:ref|b|math|sup|table)\b[^<>]*>|__TOC__|[\ufdd0-\ufdef\x00]")


def check(text: str | None) -> None:
    """What holds of every result."""
    if not text:
        return
    for paragraph in text.split("\n\n"):
        assert paragraph == " ".join(paragraph.split()) != ""
        assert MARKUP.search(paragraph) is None, paragraph


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=60).map("".join))
def test_any_heap_of_markup_comes_out_clean(wikitext: str) -> None:
    check(clean_page(wikitext, "T"))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200), st.text(max_size=20))
def test_any_string_is_read(wikitext: str, title: str) -> None:
    text = clean_page(wikitext, title)
    assert text is None or all(part.strip() for part in text.split("\n\n")) or text == ""


@pytest.mark.parametrize(
    "piece",
    [
        "[[", "{{", "{|\n", "|}\n", "[[a|", "{{a|", "{{lang|fr|", "{{{a|", "<ref>", "<b ", "<!--", "[http://a ",
        "[http://a [b] ", "''a '''b ", "==", "= ", "&", "( ", "(;", ", ", ") ", " .", "* a.\n", "|", "(or ",
        "{{lang|fr|a}} ", "[[a|[[b]]c",
    ],
)  # fmt: skip
def test_time_grows_with_the_length_alone(piece: str) -> None:
    """A parser that looks for each end anew takes a hundred times as long for ten times as much, or more."""
    seconds = []
    for count in (500, 5000):
        start = time.process_time()
        clean_page(piece * count, "T")
        seconds.append(time.process_time() - start)
    assert seconds[1] < 0.25 or seconds[1] < 40 * seconds[0]


@pytest.mark.parametrize(
    ("opened", "closed"),
    [
        ("{{lang|fr|", "}}"),
        ("[[a|", "]]"),
        ("\n{|\n", "\n|}\n"),
        ("[[a|{{nowrap|", "}}]]"),
        ("<i>", "</i>"),
        ("(", ")"),
    ],
)
def test_deep_nesting(opened: str, closed: str) -> None:
    text = clean_page(f"It was so. {opened * 5000}x{closed * 5000}\n\nThat is all.", "T")
    assert text is not None
    assert text.startswith("It was so.")
    assert text.endswith("That is all.")


def test_a_page_beyond_what_the_parser_gets() -> None:
    """Past the budget templates go without a look, and the text around them stays."""
    line = "He wrote {{lang|fr|[[mot|un [[mot]] " + "x" * 1000 + "]]}} here.\n\n"
    text = clean_page(line * (MOST_PARSED // 1000 + 3), "T")
    assert text is not None
    paragraphs = text.split("\n\n")
    assert paragraphs[0].startswith("He wrote un mot xxx")
    assert paragraphs[-1] == "He wrote here."


def test_a_failure_of_the_parser_costs_the_templates_only(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = import_module("tools.corpus.extract.wikitext.nodes")

    def fails(*_: object, **__: object) -> object:
        raise nodes.ParserError("never seen")

    monkeypatch.setattr(nodes.mwparserfromhell, "parse", fails)
    assert clean_page("One {{nowrap|[[a|word [[b]] c]]}} and [[a|some [[b]] c]].", "T") == "One and some b c."
