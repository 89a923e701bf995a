"""The templates that are part of a sentence, and what a reader sees of each.

A name means one thing in one wiki and another in the next: `{{date|1|janvier|2017}}` and `{{date|2006-08-04|dmy}}`. So
there is a table for each language, of Wikipedia alone, and each rule in it has a signature: the calls that it knows.
What has no rule, or is called otherwise, is left out and counted: a hole is honest, a wrong text is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from tools.corpus.extract.read_context import Site
from tools.corpus.extract.wikitext import english
from tools.corpus.extract.wikitext.calls import (
    QUOTE,
    Call,
    Rule,
    foreign_word,
    labelled,
    lowered,
    named_or,
    pick,
    quantity,
    quote,
    raised,
    table,
    wrapped,
)
from tools.corpus.extract.wikitext.names import template_key, wiki_language, words

# Signs and letters of other scripts are meant.
# ruff: noqa: RUF001, RUF002

# --- Languages of which a few templates are known ---------------------------------------------------------------------

_ROMAN = re.compile(r"[IVX]{1,6}")
_FRENCH_MONTHS = frozenset({
    "janvier", "février", "mars", "avril", "mai", "juin", "juillet", "août", "septembre", "octobre", "novembre",
    "décembre",
})  # fmt: skip


def _french_date(call: Call) -> str | None:
    """`{{date|1|janvier|2017}}` -> "1er janvier 2017"; a fourth argument is the subject that the link leads to."""
    day, month, year = (*call.positions, "", "", "")[:3]
    if (
        month not in _FRENCH_MONTHS
        or not re.fullmatch(r"\d{1,4}|", year)
        or not re.fullmatch(r"0?[1-9]|[12]\d|3[01]|1er|", day)
    ):
        return None
    return " ".join(filter(None, ["1er" if day in ("1", "01") else day.lstrip("0"), month, year]))


def _french_century(call: Call) -> str | None:
    """`{{s|XIX|e}}` -> "XIXe siècle"."""
    known = _ROMAN.fullmatch(call[1]) and call[2] == ("er" if call[1] == "I" else "e")
    return f"{call[1]}{call[2]} siècle" if known else None


def _french_hour(call: Call) -> str | None:
    """`{{heure|10|30}}` -> "10 h 30"."""
    known = re.fullmatch(r"\d{1,2}", call[1]) and re.fullmatch(r"[1-5]\d|", call[2])
    return f"{call[1]} h {call[2]}".strip() if known else None


def _spanish_century(call: Call) -> str | None:
    """`{{siglo|XIX||s}}` -> "siglo XIX"."""
    start = {"": "", "s": "siglo ", "S": "Siglo "}.get(call[3])
    return None if start is None or call[2] or not _ROMAN.fullmatch(call[1]) else start + call[1]


def _reading(call: Call) -> str:
    """`{{読み仮名|漢字|かんじ}}` -> "漢字（かんじ）"."""
    return f"{call[1]}（{call[2]}）"


_RUSSIAN = MappingProxyType({
    "en": "англ.", "fr": "фр.", "de": "нем.", "la": "лат.", "it": "итал.", "es": "исп.", "uk": "укр.", "pl": "польск.",
    "be": "белор.", "grc": "др.-греч.", "el": "греч.", "pt": "порт.", "nl": "нидерл.", "sv": "швед.", "cs": "чеш.",
})  # fmt: skip
_GERMAN = MappingProxyType({
    "en": "englisch", "fr": "französisch", "es": "spanisch", "it": "italienisch", "la": "lateinisch",
    "pt": "portugiesisch", "nl": "niederländisch", "sv": "schwedisch", "da": "dänisch", "pl": "polnisch",
    "cs": "tschechisch", "hu": "ungarisch", "ro": "rumänisch", "tr": "türkisch", "fi": "finnisch",
})  # fmt: skip
_JAPANESE = MappingProxyType({
    "en": "英語", "fr": "フランス語", "de": "ドイツ語", "es": "スペイン語", "it": "イタリア語", "ru": "ロシア語",
    "pt": "ポルトガル語", "nl": "オランダ語", "la": "ラテン語",
})  # fmt: skip


RULES: Mapping[str, Mapping[str, Rule]] = MappingProxyType({
    "en": english.RULES,
    "de": table(
        *labelled(_GERMAN, "{}S", "{} {}"),
        (quote, QUOTE, "Zitat"),
        (wrapped("„", "“"), "1", '"'),
    ),
    "fr": table(
        (_french_date, "2-4?", "date, date-"),
        (quantity(" ", ","), "1-2", "unité, nombre, nb"),
        (_french_century, "2", "s, s-"),
        (_french_hour, "1-2", "heure"),
        (raised, "1", "exp"),
        (lowered, "1", "ind"),
        (pick(1), "1", "petit"),
        (wrapped("« ", " »"), "1", "citation"),
        (quote, QUOTE, "citation bloc"),
        (lambda call: call.first_of("texte") or call[4] or call.first_of("fr") or call[1] or None,
            "0-4? texte fr lang langue trad", "lien"),
    ),
    "es": table(
        (_spanish_century, "1-3?", "siglo"),
        (pick(1), "1", "esd"),
        (quantity(" ", ",", 5), "1-2", "unidad"),
        (quote, QUOTE, "cita"),
    ),
    "it": table((quote, QUOTE, "citazione"), (pick(1), "1", "TA")),
    "pt": table((quote, QUOTE, "quote")),
    "ru": table(
        *labelled(_RUSSIAN, "lang-{}", "{} {}"),
        (pick(2, 1), "1-5? nocat", "iw, нп5, не переведено 5, не переведено"),
    ),
    "ja": table(
        *labelled(_JAPANESE, "lang-{}", "{}: {}"),
        (_reading, "2", "読み仮名"),
        (named_or("label"), "2-3 label preserve redirect", "仮リンク"),
        (pick(1), "2", "ルビ"),
    ),
    "zh": table((pick(3, 1), "2-3", "le, link-en"), (pick(4, 3), "3-4", "tsl")),
})  # fmt: skip
"""By the language of the Wikipedia."""
COMMON: Mapping[str, Rule] = MappingProxyType(table(
    (pick(1), "1", "nowrap, nobr, nobreak"), (foreign_word, "2 dir rtl size italic cat nocat links", "lang")
))  # fmt: skip
"""Templates that are the same in every wiki which has them."""


def _centuries() -> list[str]:
    tens, ones = ("", "X", "XX"), ("", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX")
    return [f"{ten}{one}{'er' if ten + one == 'I' else 'e'}" for ten in tens for one in ones if ten + one]


def _constants(*tables: Mapping[str, str]) -> dict[str, str]:
    """Texts by the names of the templates that stand for them."""
    return {
        template_key(name): text for table in tables for text, names in table.items() for name in names.split(", ")
    }  # fmt: skip


CONSTANTS: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "en": _constants(english.CONSTANTS),
    "fr": _constants({text: text for text in ("e", "er", "re", "1er", *(f"{of} siècle" for of in _centuries()))}),
})  # fmt: skip
"""Templates that show this where they are called without arguments; by the language of the Wikipedia."""

# --- What is known of the templates of a wiki -------------------------------------------------------------------------

_FOREIGN = re.compile(r"lang-[a-z]{2,3}(?:-[a-z-]{1,12})?")
_foreign = table((english.foreign, f"1-3 {english.ROMANIZED}", "lang-"))["lang-"]
FUNCTIONS = words("formatnum, lc, uc, lcfirst, ucfirst, ns, int, plural, gender, grammar, padleft, padright, urlencode")
"""Functions of MediaWiki that are called by a name in small letters."""
_FUNCTION = re.compile(r"\s*(formatnum|lc|uc|lcfirst|ucfirst):(.*)", re.DOTALL | re.IGNORECASE)
_FUNCTIONS: Mapping[str, Callable[[str], str]] = MappingProxyType({
    "lc": str.lower,
    "uc": str.upper,
    "lcfirst": lambda text: text[:1].lower() + text[1:],
    "ucfirst": lambda text: text[:1].upper() + text[1:],
})  # fmt: skip


_OWN_DIGITS = words("""
    ar, arz, as, bh, bho, bn, ckb, dz, fa, glk, gu, kn, ks, lo, mni, mr, my, mzn, ne, new, or, ps, sa, sat, sdh, te
""")
"""Languages of wikis that write numbers with digits of their own."""
_DECIMAL_POINT = frozenset({"en", "he", "hi", "ja", "ko", "ms", "ta", "th", "zh"})


@dataclass(frozen=True, kw_only=True)
class Templates:
    """What is known of the templates of a wiki."""

    rules: Mapping[str, Rule]
    constants: Mapping[str, str]
    """What templates show that are called without arguments."""
    layout: Mapping[str, str]
    """What templates show whatever their arguments."""
    language: str
    foreign: bool
    """Whether `{{lang-fr|mot}}` stands for an English name and the word."""

    def rule_of(self, key: str) -> Rule | None:
        """The rule of the template of this name, as `template_key` has it; None: nothing is known of it."""
        return self.rules.get(key) or (_foreign if self.foreign and _FOREIGN.fullmatch(key) else None)

    def has_rule(self, name: str, key: str) -> bool:
        return self.rule_of(key) is not None or (":" in name and _FUNCTION.match(name) is not None)

    def shown(self, call: Call, name: str) -> str | None:
        """What a reader sees of a template with a rule; None where its arguments are not known.

        Args:
            call: its arguments.
            name: its plain name; that of a function has the first argument in it, as in `formatnum:5`.
        """
        function = _FUNCTION.match(name) if ":" in name else None
        if function is not None:
            if call.positions or call.named:
                return None
            kind, text = function[1].lower(), function[2].strip()
            return self._number(text) if kind == "formatnum" else _FUNCTIONS[kind](text)
        rule = self.rule_of(call.name)
        return rule(call) if rule is not None else None

    def _number(self, text: str) -> str | None:
        """`{{formatnum:12345}}` without the signs between groups; None where a reader sees other digits, or another
        decimal sign."""
        other_digits = self.language in _OWN_DIGITS and re.search(r"[0-9]", text)
        other_sign = self.language not in _DECIMAL_POINT and "." in text
        return None if not self.language or other_digits or other_sign else text


@lru_cache(maxsize=64)
def templates_of(site: Site) -> Templates:
    """The templates of a wiki: those of every one, and of a Wikipedia those of its language."""
    language = wiki_language(site.language) if site.wikipedia else ""
    return Templates(
        rules={**COMMON, **RULES.get(language, {})},
        constants={"=": "=", **CONSTANTS.get(language, {})},
        layout=_constants(english.LAYOUT) if language == "en" else {},
        language=wiki_language(site.language),
        foreign=language == "en",
    )
