"""`clean_page` on what nobody should write: any string, unclosed and deeply nested brackets, pages without an end."""

from __future__ import annotations

import re
import time
from collections import Counter
from importlib import import_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.corpus.extract.read_context import Site
from tools.corpus.extract.wikitext import MOST_PARSED, clean_page
from tools.corpus.extract.wikitext.strip import cut_web_links, swept
from tools.corpus.sentences import decode_entities

PIECES = st.sampled_from([
    "[[", "]]", "{{", "}}", "{|", "|}", "|", "\n", "\n\n", "=", "==", "''", "'''", "'", "<ref>", "</ref>", "<b>",
    "<!--", "-->", "<math>", "</math>", "<sup>1</sup>", "<table>", "</table>", "{{{", "}}}", "[http://a ",
    "(", ")", ";", ",", " ", "&nbsp;", "&#9;", "&", "*", ":", "#", "!", "File:", "Category:", "lang|fr|",
    "convert|5|km", "quote|", "nowrap|", "ndash", "a", "word. ", "\ufdd0", "\ufdd1", "\x00", "é",
    "語。", "1=",
    "-{", "}-", "zh:", "zh-hans:", "=>",
    "-", "__TOC__", "x\u2028", "[", "]", "{", "}", "[ ", "( )", "\u200b", "&#8203;", "_", "(;)'",
])  # fmt: skip
MARKUP = re.compile(r"\[\[|\]\]|\{\{|\}\}|\{\||''|</?(?:ref|b|math|sup|table)\b[^<>]*>|__TOC__|[\ufdd0-\ufdef\x00]")


CHINESE = Site(language="zh")


def check(text: str | None) -> None:
    """What holds of every result."""
    if not text:
        return
    for paragraph in text.split("\n\n"):
        assert paragraph == " ".join(paragraph.split()) != ""
        assert MARKUP.search(paragraph) is None, paragraph


@settings(max_examples=100)
@given(st.lists(PIECES, max_size=60).map("".join))
def test_any_heap_of_markup_comes_out_clean(wikitext: str) -> None:
    check(clean_page(wikitext, "T"))
    check(clean_page(wikitext, "T", CHINESE))


@settings(max_examples=100)
@given(st.text(max_size=200), st.text(max_size=20))
def test_any_string_is_read(wikitext: str, title: str) -> None:
    text = clean_page(wikitext, title)
    assert text is None or all(part.strip() for part in text.split("\n\n")) or text == ""


# Without what can be markup, and controls that are spaces too.
NO_MARKUP = st.one_of(
    st.characters(exclude_categories=["Cs"], exclude_characters="[]{}()|'=<>&_#*:;~!-\n\r\v\f\x1c\x1d\x1e\x1f"),
    st.sampled_from("\0\x01\ufffd\u200b\u200c\xad\ufdd0\u0085\u2028\u3000«»“” ab.,"),
)


@settings(max_examples=100)
@given(st.text(NO_MARKUP, max_size=60))
def test_prose_is_kept_or_counted(text: str) -> None:
    whole, counts = f"Word {text} end.", Counter[str]()
    found = "".join((clean_page(whole, "T", counts=counts) or "").split())
    dropped = counts["characters_dropped"] + counts["gap_characters_dropped"]
    assert len(found) + dropped == len("".join(whole.split()))
    rest = iter(whole)
    assert all(character in rest for character in found), "in their order, and no others"


@settings(max_examples=100)
@given(
    st.lists(
        st.sampled_from([
            "&#0;", "&#xD800;", "&#55296;", "&#1114112;", "&#x110000;", "&#xFFFD;", "&shy;", "&#8203;", "&#1;",
            "&nbsp;", "&amp;lt;", "a", " ", "[[a|&#0;b]]", "{{nowrap|&#xD9FF;c}}", "<nowiki>&#0;</nowiki>", "''&#0;''",
        ]),
        max_size=10,
    ).map("".join)
)  # fmt: skip
def test_entities_of_no_character_come_to_nothing(wikitext: str) -> None:
    text = clean_page(f"Word {wikitext} end.", "T") or ""
    assert not re.search("[\0-\x08\xad\u200b\ufffd\ud800-\udfff]", text)


def test_what_entities_stand_for() -> None:
    counts = Counter[str]()
    text = "a&shy;b &#0;c &#xD800;d &#xFFFD;e &copy;f &copyg &notit; &AMP;amp; &frac12; &#128;h &#x1F600;"
    assert clean_page(text, "T", counts=counts) == "ab c d e ©f &copyg &notit; &amp; ½ €h 😀"
    assert counts["characters_dropped"] == 4
    assert decode_entities("R&D a&b; &lt;b&gt; &#0;x&reg=1", counts := Counter()) == "R&D a&b; <b> x&reg=1"
    assert counts == {"characters_dropped": 1}


@pytest.mark.parametrize(
    "piece",
    [
        "[[", "{{", "{|\n", "|}\n", "[[a|", "{{a|", "{{lang|fr|", "{{{a|", "<ref>", "<b ", "<!--", "[http://a ",
        "[http://a [b] ", "''a '''b ", "==", "= ", "&", "( ", "(;", ", ", ") ", " .", "* a.\n", "|", "(or ",
        "{{lang|fr|a}} ", "[[a|[[b]]c", "-{", "}-", "-{zh:", "-{zh-hans:a;", "-{{", "-{ {{", "-{a}-", "-{H|a=>zh:b; ",
        "__A", "http://a-{",
    ],
)  # fmt: skip
def test_time_grows_with_the_length_alone(piece: str) -> None:
    """A parser that looks for each end anew takes a hundred times as long for ten times as much, or more."""
    seconds = []
    for count in (500, 5000):
        start = time.process_time()
        clean_page(piece * count, "T", CHINESE)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 0.25 or seconds[1] < 40 * seconds[0]


@pytest.mark.parametrize(
    "wikitext",
    [
        "x [//" + "a" * 200_000,
        "x [//" + "a" * 200_000 + "[",
        "[http://aaa" * 20_000,
        "[http://aaa " * 20_000,
        "[http://e.org/aaa" + " b" * 100_000,
        "[http://e.org/" + "[b] " * 50_000,
        "[http://e.org/" + "[//b] " * 40_000,
        "[mailto:a" + " " * 200_000 + "b",
        "{{convert|5|km|" + "1" * 200_000 + "x|in}}",
        "{{convert|5|km|" + "1 " * 100_000 + "x|in}}",
        "[[a" * 60_000 + "|",
        "{{{a|" + "b|" * 100_000,
        "<a" + " b" * 100_000,
        "<sup>" + " " * 200_000 + "1",
        "<ref>" + "</ref " * 30_000,
        "It was." + "\"" * 200_000 + "x",
        "_" * 200_000,
        "__" + "A" * 200_000,
        "{[" * 50_000 + "[{" * 50_000,
        "It (" + ";" * 200_000,
        "\n" + " " * 200_000 + "x",
        "a|" * 100_000 + "{{nowrap|b}}",
        "-{" * 100_000 + "}-" * 100_000,
        "-{zh:a" + ";" * 100_000 + "}-",
        "-{zh:a;" + " " * 100_000 + "x}-",
        "-{zh:a" + "; =>" * 50_000 + "}-",
        "-{" + "{{" * 50_000 + "}-" + "}}" * 50_000,
        "http://a" + "-{b}" * 50_000,
        "http://a" + "-{b" * 50_000,
        "#a [[" + "b" * 200_000,
    ],
    ids=lambda wikitext: wikitext[:12],
)  # fmt: skip
def test_long_pages_are_done_soon(wikitext: str) -> None:
    """Where an expression tries each place as an end anew, these take minutes."""
    start = time.process_time()
    clean_page(wikitext, "T", CHINESE)
    assert time.process_time() - start < 5


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(["[", "]", "//", "http:", "a", " ", "\n", "<", "[//a", "[b]"]), max_size=14).map("".join)
)
def test_links_to_the_web_are_read_as_by_one_expression(text: str) -> None:
    whole = r"\[(?:https?:)?//[^\s\[\]<>]*[^\S\n]*((?:[^\[\]\n]|\[[^\[\]\n]*\])*)\]"
    assert cut_web_links(text) == re.sub(whole, r"\1", text)


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("The MS [ [ here.", "The MS here."),
        ("The MS [ ( ) [ here.", "The MS here."),
        ("The '(;)' here.", "The here."),
        ("The [\u200b[ here.", "The here."),
        ("The [&#8203;[ here.", "The here."),
        ("The ''['' [ here.", "The here."),
        ("The _( )_TOC__ here.", "The here."),
        ("The <nowiki>[[x]]</nowiki> and &#91;&#91;y&#93;&#93; here ( ).", "The [[x]] and [[y]] here."),
    ],
)
def test_closing_gaps_leaves_no_markup_but_what_is_meant(wikitext: str, text: str) -> None:
    assert clean_page(wikitext, "T") == text


@pytest.mark.parametrize("depth", range(1, 12))
def test_a_heap_of_brackets_is_swept_whole(depth: int) -> None:
    assert swept("a " + "{[" * depth + "[{" * depth + " b") == "a  b"


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
    nodes = import_module("tools.corpus.extract.wikitext")

    def fails(*_: object, **__: object) -> object:
        raise nodes.ParserError("never seen")

    monkeypatch.setattr(nodes.mwparserfromhell, "parse", fails)
    assert clean_page("One {{nowrap|[[a|word [[b]] c]]}} and [[a|some [[b]] c]].", "T") == "One and some b c."
