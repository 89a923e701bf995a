"""What text is, for every reader of it (where a line is blank, what is no text, what an entity stands for, what counts
as a letter), and the way from a document to its sentences."""

from __future__ import annotations

import html
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from html.entities import html5
from types import MappingProxyType

from tools.common.bounds import LANGUAGE

_ASCII_LETTERS = string.ascii_letters.encode()
_ASCII_SPACES = bytes(byte for byte in range(128) if chr(byte).isspace())
_two_letters = re.compile(r"[^\W\d_]{2}").search
_ASCII = bytes(range(128))
# First bytes, in UTF-8, of spaces that Python's `bytes.strip` does not know: U+001C to U+001F, U+0085, U+00A0, U+1680,
# U+2000 and those after it, U+3000.
_OTHER_SPACES = frozenset((0x1C, 0x1D, 0x1E, 0x1F, 0xC2, 0xE1, 0xE2, 0xE3))


def is_blank(line: bytes) -> bool:
    """Whether a line of UTF-8 has nothing to see: spaces of any kind, a no-break or an ideographic one too."""
    rest = line.strip()
    return not rest or (rest[0] in _OTHER_SPACES and not rest.decode("utf-8", "replace").strip())


_TELLING = 32, 4096
"""Bytes that are needed to tell an encoding, and those that are looked at."""


_MARKS = {
    b"\xff\xfe\0\0": "UTF-32 (little-endian)",  # before that of UTF-16, which it begins with
    b"\0\0\xfe\xff": "UTF-32 (big-endian)",
    b"\xff\xfe": "UTF-16 (little-endian)",
    b"\xfe\xff": "UTF-16 (big-endian)",
    b"\x841\x953": "GB18030",
    b"+/v8-": "UTF-7",
}
"""Byte order marks of other encodings than UTF-8."""


def encoding_of_file(head: bytes) -> str:
    """Of a file that begins with the mark of another encoding than UTF-8, or in UTF-16 or UTF-32 without one, which
    and why, in words; "" of all others, also of those in which no encoding can be told by so little."""
    marked = next((name for mark, name in _MARKS.items() if head.startswith(mark)), "")
    if marked:
        return f"this is not UTF-8 (its byte order mark is another) but, as it seems, {marked}"
    head = head[: _TELLING[1]]
    wide = _wide_encoding(head) if len(head) >= _TELLING[0] else ""
    return f"there are NUL characters, as of {wide}" if wide else ""


def _wide_encoding(data: bytes) -> str:
    """By where its NULs are: in UTF-16 every other byte of ASCII, in UTF-32 the two highest of all characters."""
    parts = [data[place::4] for place in range(4)]
    nuls = [part.count(0) / max(1, len(part)) for part in parts]
    for name, (highest, high, *others) in (("UTF-32-LE", nuls[::-1]), ("UTF-32-BE", nuls)):
        if highest > 0.99 and high > 0.9 and min(others) < 0.5:
            return name
    even, odd = data[::2].count(0), data[1::2].count(0)
    if max(even, odd) > 4 * min(even, odd) and max(even, odd) * 8 >= len(data):
        return "UTF-16 (little-endian, UTF-16LE)" if odd > even else "UTF-16 (big-endian, UTF-16BE)"
    return ""


def likely_encoding(data: bytes) -> str:
    """What bytes are that are no UTF-8, or have NULs among them, in words; "" where nothing tells."""
    if wide := _wide_encoding(data):
        return wide
    even, odd = data[::2].count(0), data[1::2].count(0)
    try:
        from charset_normalizer import from_bytes  # here alone: who reads UTF-8 need not have it
    except ImportError:
        return "binary data" if even + odd else ""
    found = from_bytes(data[: _TELLING[1]]).best() if len(data) >= _TELLING[0] else None
    if found is None or (even + odd and not found.encoding.startswith(("utf_16", "utf_32"))):
        return "binary data" if even + odd else ""
    if not even + odd and max(str(found)) < "\u0250":  # what is above ASCII is guessed there
        return "an encoding of one byte a letter, such as ISO 8859-1 (Latin-1) or Windows-1252"
    return found.encoding.replace("_", "-").upper()


ENTITY = re.compile(r"&(?:#0{0,20}[0-9]{1,7}|#[xX]0{0,20}[0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
"""`&shy` without its `;` is none."""


def entity_text(entity: str) -> str:
    """What an entity stands for: itself where HTML has none of that name; nothing where its number is that of no
    character (`&#0;`, half of a surrogate pair), for which others write U+FFFD, or of U+FFFD itself."""
    return entity if entity[1] != "#" and entity[1:] not in html5 else html.unescape(entity).replace("\ufffd", "")


def decode_entities(text: str, counts: Counter[str]) -> str:
    """Text with what its entities stand for; `characters_dropped` counts those that stand for nothing."""

    def counted(entity: re.Match[str]) -> str:
        found = entity_text(entity[0])
        counts["characters_dropped"] += not found
        return found

    return ENTITY.sub(counted, text) if "&" in text else text


def count_letters(text: str) -> int:
    """How many characters are what words are made of: letters of ASCII; of all other scripts letters, marks (vowel
    signs, points, accents) and digits, the categories L, M and N of Unicode, and what joins or parts the syllables and
    words of scripts that do it otherwise than by spaces (`IN_WORDS`).

    Letters of ASCII are most of them, and are counted all at once. Digits of ASCII do not count: tables and code are
    made of them.
    """
    return count_letters_and_visible(text)[0]


IN_WORDS = "\u0f0b\u0f0c\u1361\u200c\u200d"
"""Marks between syllables (Tibetan) and words (Ethiopic), and joiners."""


def count_letters_and_visible(text: str) -> tuple[int, int]:
    """The same, and how many characters are no spaces."""
    plain = text.encode("ascii", "ignore")
    letters = len(plain) - len(plain.translate(None, _ASCII_LETTERS))
    visible = len(plain.translate(None, _ASCII_SPACES))
    if len(plain) < len(text):
        foreign = text.encode("utf-8", "surrogatepass").translate(None, _ASCII).decode("utf-8", "surrogatepass")
        others = [character for character in foreign if not character.isalpha()]
        letters += len(foreign) - len(others)
        letters += sum(unicodedata.category(character)[0] in "MN" or character in IN_WORDS for character in others)
        visible += len(foreign) - sum(map(str.isspace, others))
    return letters, visible


def is_mostly_letters(text: str, least: float, letters: int, visible: int) -> bool:
    """Whether letters are at least that share of what is visible. Marks that code does not have, such as `。`, `“`, `—`
    and emoji, are left out of it, as many as there are letters: where a word has one letter or two, as in Chinese, a
    dialogue has as many marks as words.

    Args:
        letters, visible: what `count_letters_and_visible` says of the text.
    """
    if letters >= least * visible:
        return True
    if text.isascii():
        return False
    others = (mark for mark in _NOT_WORDS.findall(text) if not mark.isascii())
    marks = sum(unicodedata.category(mark)[0] == "P" or mark >= "\U0001f000" for mark in others)
    return letters > 0 and letters >= least * (visible - min(marks, letters))


_NOT_WORDS = re.compile(r"[^\w\s]")


def has_word(text: str) -> bool:
    """Whether two letters stand side by side, whatever marks are between them."""
    if _two_letters(text) is not None:
        return True
    if text.isascii():
        return False
    return _two_letters("".join(part for part in text if unicodedata.category(part)[0] != "M")) is not None


# --- Sentences --------------------------------------------------------------------------------------------------------


LEAST_LETTERS = 0.8
"""Share of letters (`count_letters`) among the visible characters; prose has more, tables, grammars and code have
fewer."""
LOOKED_AT = 1 << 16
"""Characters of a paragraph that tell whether it is code: its words, one by one, would take many times its memory."""
MOST_WORDS = 100
"""A longer sentence is a list, or text without full stops."""
BLOCK = 8192
"""Characters that `sentencex` is given at a time: its time grows with the square of the sentences in one text."""
_has_letter_or_digit = re.compile(r"[^\W_]").search
_paragraphs = re.compile(r"\n\s*\n").split
OTHER_MARKS = "\u17d4\u17d5\u0f0d\u0f0e"
"""Of Khmer and Tibetan: of all that end a sentence in Unicode, those that `sentencex` does not know."""
_other_ends = re.compile(rf"(?<=[{OTHER_MARKS}])(?=\s+[^\s{OTHER_MARKS}])").split


LEFT_OUT = ("sentences_left_out", "characters_left_out")
"""What is counted of sentences that become nothing; characters without spaces."""


def split_sentences(document: str, language: str = "en", left_out: dict[str, int] | None = None) -> list[str]:
    """The sentences of a document, each on one line with single spaces between its words.

    Prose is split by `sentencex`, across line breaks. Where its rules have no hold, in what looks like code and in
    sentences of more than 100 words, each line counts as a sentence. What has neither letter nor digit is left out.

    Args:
        document: text; blank lines separate paragraphs.
        language: ISO 639-1 code; of a variant such as "de-at" the rules are those of the language.
        left_out: the counts `LEFT_OUT`, which what is left out here is added to.
    """
    sentences: list[str] = []
    language = language.partition("-")[0]  # rules are those of a language, not of Austria's German
    for paragraph in _paragraphs(document):
        sentences += _sentences(paragraph, language)
    kept = [sentence for sentence in sentences if _has_letter_or_digit(sentence)]
    if left_out is not None and len(kept) < len(sentences):
        count_left_out((sentence for sentence in sentences if not _has_letter_or_digit(sentence)), left_out)
    return kept


def count_left_out(sentences: Iterable[str], counts: dict[str, int]) -> None:
    """Adds sentences that become nothing to the counts `LEFT_OUT`; those of spaces alone are none."""
    for sentence in sentences:
        counts["sentences_left_out"] += bool(sentence)
        counts["characters_left_out"] += len(sentence.replace(" ", ""))


def check_language(language: str) -> None:
    """Raises ValueError for what is no code of a language. Languages without rules of their own have those of "en"."""
    if needed := LANGUAGE.needed(language):
        raise ValueError(f"--language must be {needed}. Got {language!r}.")


def _sentences(paragraph: str, language: str) -> Iterable[str]:
    """With single spaces between their words; "" for parts of spaces alone."""
    letters, visible = count_letters_and_visible(paragraph[:LOOKED_AT])
    if _is_code(paragraph, letters, visible):
        return [" ".join(line.split()) for line in paragraph.split("\n")]
    sentences = list(_segment(paragraph, language))
    if len(sentences) > 1 and language != "en":
        sentences = list(_rejoined(sentences, language))
    if not paragraph.isascii() and any(mark in paragraph for mark in OTHER_MARKS):
        sentences = [part for sentence in sentences for part in _other_ends(sentence)]
    # Nearly all paragraphs have single spaces and no others.
    if len(paragraph) == visible + paragraph.count(" ") and "  " not in paragraph:
        return map(str.strip, sentences)  # and no line ends, at which long ones would be cut
    return [
        " ".join(part.split())
        for sentence in sentences
        # Words have two characters at least, with the space after them.
        for part in (
            sentence.split("\n")
            if len(sentence) > 2 * MOST_WORDS and len(sentence.split()) > MOST_WORDS
            else (sentence,)
        )
    ]


def _segment(paragraph: str, language: str) -> Iterator[str]:
    """The sentences of a paragraph, nothing left out. The last one of a block is cut off by the block's end, so the
    next block begins with it; if it is all there is, it ends at a space."""
    import sentencex  # here alone: who splits nothing need not have it

    start = 0
    while len(paragraph) - start > BLOCK:
        block = paragraph[start : start + BLOCK]
        sentences = sentencex.segment(language, block)[:-1] or [block[: block.rfind(" ") + 1] or block]
        yield from sentences
        start += sum(map(len, sentences))
    yield from sentencex.segment(language, paragraph[start:])


_NUMBERS = re.compile(
    r"(?<![^\s(\[\"'\u201c\u2018£$€¥])[£$€¥]?\d[\d.,:]*(?:[-–/]\d[\d.,]*)?(?:%|st|nd|rd|th|s)?"
    r"(?![^\s.,;:)!?\]\"'\u201d\u2019])"
)
"""Numbers as prose has them: words by themselves."""
_WORDS = re.compile(r"[^\W\d_]{2,}")


_ORDINALS = frozenset(re.split(" ", "bs cs da de et fi fo hr hu is lb lv nb nn no sk sl sr tr"))
"""Languages that write ordinal numbers with a point."""
# Letters of other scripts are meant.
# ruff: noqa: RUF001
_BEFORE_NAMES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        language: frozenset(words.split())
        for language, words in {
            "ca": "sr sra dr dra st sta pàg núm",
            "es": "sr sra srta dr dra st sta pág núm",
            "fr": "mm mme mmes mlle dr pr prof mgr st ste av apr cf chap fig vol p pp n° me",
            "it": "sig sigg dott prof ing avv on sen san s pag",
            "nl": "dhr mevr dr prof drs ir ing st nr blz",
            "pl": "dr prof inż mgr hab św ks gen płk ul al pl nr tj",
            "pt": "sr sra srta dr dra prof st sta pág séc núm",
            "ru": "им ул пл пр просп пер г гг акад проф св оз р о см",
            "bn": "ড ডা মো প্রো",
            "hi": "डॉ प्रो श्री पं",
            "id": "jl dr prof drs ir hj tn ny no",
            "mr": "डॉ प्रा श्री",
            "vi": "tp ts gs ths",
            "uk": "ім вул пл пр просп м р акад проф св оз див",
        }.items()
    }
)
"""Abbreviations that stand before a name or a number and end no sentence, of languages whose rules lack some."""
_BEGINS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        language: frozenset(words.split())
        for language, words in {
            "de": "Aber Alle Als Auch Bei Beide Da Dabei Dadurch Daher Damals Damit Danach Dann Darum Das Dazu Denn "
            "Der Deshalb Die Dies Diese Dieser Dieses Doch Dort Durch Ein Eine Einer Er Es Für Heute Hier Ich Ihre Im "
            "In Jedoch Man Mit Nach Nun Obwohl Seit Seitdem Sie So Später Und Viele Während Weil Wenn Wer Wie Wir Zwar",
        }.items()
    }
)
"""Words that no ordinal number stands before: with a capital they begin a sentence."""
_FIRST_WORD = re.compile(r"\w+")
_QUOTED = re.compile(r"[。！？!?…―][」』”]\s*$")
_QUOTATIVE = re.compile(r"と(?:[\u4e00-\u9fff、]|い[いうえっわ]|の(?=[\u4e00-\u9fff]))")
_LAST_WORD = re.compile(r"(\S+)\.\s*$")
_BEFORE_WORD = re.compile("[(\\[«\u201c\u201e\"'\u2019-]")
_ROMAN = re.compile(r"[IVXLC]{1,6}")


def _rejoined(sentences: Iterable[str], language: str) -> Iterator[str]:
    """Sentences that were cut behind a point which ends none: that of an initial ("M. Dupont"), of an ordinal number
    ("im 20. Jahrhundert"), of an abbreviation that stands before names, and, where a small letter follows, of one that
    has a point inside or of any number ("d.w.z. anders"). And what Japanese says of quoted speech, with that."""
    held: list[str] = []
    for sentence in sentences:
        if held and _ends(held[-1], sentence, language):
            yield "".join(held)
            held = []
        held.append(sentence)
    yield "".join(held)


def _ends(sentence: str, following: str, language: str) -> bool:
    """Whether a sentence ends where `following` begins."""
    if language == "ja" and (
        following.startswith(("」", "』")) or (_QUOTATIVE.match(following) and _QUOTED.search(sentence[-8:]))
    ):
        return False
    found = _LAST_WORD.search(sentence[-40:]) if sentence.rstrip().endswith(".") else None
    if found is None:
        return True
    word, begins = _BEFORE_WORD.split(found[1])[-1], following[:1]
    apart = sentence[-1:].isspace()  # "a.C." is cut between its letters
    if len(word) == 1 and word.isalpha() and (word.isupper() or begins.islower() or not apart):
        return False
    if word.casefold() in _BEFORE_NAMES.get(language, ()):
        return False
    if language in _ORDINALS and begins.isalpha() and (re.fullmatch(r"\d{1,2}", word) or _ROMAN.fullmatch(word)):
        first = _FIRST_WORD.match(following)
        return first is not None and first[0] in _BEGINS.get(language, ())
    return not (begins.islower() and ("." in word or word.isdecimal()))


def _is_code(paragraph: str, letters: int, visible: int) -> bool:
    """By what its beginning has: whether that are few letters, or a session of Python. Numbers among half
    as many words more are words, too."""
    beginning = paragraph[:LOOKED_AT]
    if not is_mostly_letters(beginning, LEAST_LETTERS, letters, visible):
        rest, numbers = _NUMBERS.subn(" ", beginning)
        if not numbers or "=" in beginning or 2 * len(_WORDS.findall(beginning)) < 3 * numbers:
            return True
        if not is_mostly_letters(rest, LEAST_LETTERS, *count_letters_and_visible(rest)):
            return True
    return ">>>" in paragraph and "".join(beginning.split()).startswith(">>>")
