"""With which arguments a template is called, which calls a rule knows, and the rules of more than one wiki."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tools.corpus.extract.wikitext.names import template_key


@dataclass(frozen=True, kw_only=True)
class Call:
    """A template as it is called, its arguments cleaned."""

    name: str
    """As `names.template_key` has it."""
    positions: tuple[str, ...]
    """Arguments without a name, or with a number as a name; the last one is not empty."""
    named: Mapping[str, str]
    """Those that are not empty."""

    def __getitem__(self, number: int) -> str:
        """The argument of a number from 1; "" where there is none."""
        return self.positions[number - 1] if number <= len(self.positions) else ""

    def first_of(self, *names: str) -> str:
        """The first of the named arguments that is there."""
        return next((self.named[name] for name in names if name in self.named), "")

    def says(self, name: str) -> bool:
        return self.named.get(name, "").casefold() in ("y", "yes", "on", "1", "true", "oui", "sí", "ja")


Rule = Callable[[Call], str | None]
"""What a reader sees; None where these arguments are not those that the rule knows."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The calls that a rule knows."""

    least: int
    most: int
    """Positions."""
    gaps: bool
    """Whether some of them may be empty."""
    names: frozenset[str]
    """Named arguments that the rule reads, or that change nothing of the text."""

    @classmethod
    def parsed(cls, text: str) -> Signature:
        """Of "1", "1-3" or "1-3?" with gaps, and the names behind it: "2 link size"."""
        numbers, *names = text.split()
        least, _, most = numbers.rstrip("?").partition("-")
        return cls(least=int(least), most=int(most or least), gaps=numbers.endswith("?"), names=frozenset(names))

    def fits(self, call: Call) -> bool:
        return (
            self.least <= len(call.positions) <= self.most
            and (self.gaps or all(call.positions))
            and call.named.keys() <= self.names
        )


def table(*rows: tuple[Rule, str, str]) -> dict[str, Rule]:
    """Rules by the names of their templates.

    Args:
        rows: a rule, the `Signature` of its calls, and the names, which commas or line ends separate.
    """
    return {
        template_key(name.strip()): _signed(rule, Signature.parsed(signature))
        for rule, signature, names in rows
        for name in re.split(r"[,\n]", names)
        if name.strip()
    }


def _signed(rule: Rule, signature: Signature) -> Rule:
    return lambda call: rule(call) if signature.fits(call) else None


# --- Rules that a name, a sign or a number makes ones of some wiki ----------------------------------------------------

SUP, SUP_END, SUB, SUB_END = "\ufdd4", "\ufdd5", "\ufdd6", "\ufdd7"
"""Stand around what is raised and lowered, until all that is beside it is known."""
ITALIC = "\ufde0"
"""Stands for the quotes that what is raised begins with: a variable."""
APART = "\ufde1"
"""Stands before a fraction, which is apart from a number before it."""
_RAISED = str.maketrans("0123456789+-−–=()n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁻⁼⁽⁾ⁿ")
_LOWERED = str.maketrans("0123456789+-−–=()", "₀₁₂₃₄₅₆₇₈₉₊₋₋₋₌₍₎")
_RAISABLE = re.compile(r"[0-9+\-−–=(),n]{1,12}")
_INSIDE = f"([^{SUP}{SUP_END}{SUB}{SUB_END}]*)"
_SCRIPT = re.compile(f"{SUP}{_INSIDE}{SUP_END}|{SUB}{_INSIDE}{SUB_END}")
_OVER = "[/\u2044\u2215]"
_FRACTION = re.compile(rf"{SUP}\s*(\d{{1,9}})\s*{SUP_END}\s*{_OVER}\s*{SUB}\s*(\d{{1,9}})\s*{SUB_END}")
_POWER = re.compile(r"[-+−–]\s?[^\W_]|[^\[\d]*\d")
_SIMPLE = re.compile(r"[-+−–]?(?:\d+(?:[.,]\d+)?|[A-Za-z]+)")
_MARKS = re.compile(f"[{SUP}{SUP_END}{SUB}{SUB_END}{ITALIC}{APART}]")
_AFTER_NUMBER = re.compile(rf"(?<=\d){APART}")
_MOST_SCRIPTS = 3
"""Raised in raised text: what is in more is as it stands."""


def place_scripts(text: str) -> str:
    """Raised and lowered text as signs of its own where numbers would be another one without: `10<sup>13</sup>` ->
    "10¹³", `x<sup>1/2</sup>` -> "x^(1/2)", `101<sub>2</sub>` -> "101₂"; other text as it stands: "19th", "H2O"."""
    if _MARKS.search(text) is None:
        return text
    text = _FRACTION.sub(rf"{APART}\1/\2", text)
    for _ in range(_MOST_SCRIPTS):
        text, found = _SCRIPT.subn(_placed, text)
        if not found:
            break
    return _MARKS.sub("", _AFTER_NUMBER.sub(" ", text))


def _placed(found: re.Match[str]) -> str:
    text, raised = found.string, found[1] is not None
    inside = found[1] if raised else found[2]
    content = inside.replace(ITALIC, "").strip()
    before, after = (
        _MARKS.sub("", beside)
        for beside in (text[max(0, found.start() - 6) : found.start()], text[found.end() : found.end() + 3])
    )
    if not raised:
        beside_number = before.rstrip(")]")[-1:].isdigit() or after[:1].isdigit()
        return content.translate(_LOWERED) if beside_number and re.search(r"\d", content) else content
    compact = "".join(content.split())
    if _RAISABLE.fullmatch(compact):
        return compact.translate(_RAISED)
    variable = ITALIC in inside and len(content) == 1
    if (variable or _POWER.match(content)) and (before[-1:].isalnum() or before[-1:] in (")", "]")):
        return f"^{content}" if _SIMPLE.fullmatch(content) else f"^({content})"
    return content


_CODE = re.compile(r"[a-z]{2,3}(?:-[A-Za-z0-9]{1,8}){0,3}")
_NUMBER = re.compile(r"([-−+]?)(\d{1,30})(?:[.,](\d{1,30}))?")
_QUOTED = ("text", "quote", "content", "lines", "Text", "texte", "texto", "testo")
QUOTE = f"0-4? {' '.join(_QUOTED)} author source title autor Autor auteur fuente autore fonte Quelle ref lang Sprache"
"""Who is quoted, and where, stands apart from the text."""


def pick(*numbers: int) -> Rule:
    """The first of these arguments that is there."""
    return lambda call: next((call[number] for number in numbers if call[number]), None)


def named_or(*names: str, position: int = 1) -> Rule:
    return lambda call: call.first_of(*names) or call[position] or None


def last(call: Call) -> str | None:
    return call.positions[-1]


def joined(call: Call) -> str | None:
    return "".join(call.positions)


def foreign_word(call: Call) -> str | None:
    """`{{lang|fr|mot}}`"""
    return call[2] if _CODE.fullmatch(call[1]) else None


def quote(call: Call) -> str | None:
    text = call.first_of(*_QUOTED) or call[1]
    return f"\n\n{text}\n\n" if text else None


def raised(call: Call) -> str | None:
    """As `<sup>` is read."""
    return f"{SUP}{call[1]}{SUP_END}"


def lowered(call: Call) -> str | None:
    """As `<sub>` is read."""
    return f"{SUB}{call[1]}{SUB_END}"


def wrapped(before: str, after: str) -> Rule:
    return lambda call: before + call[1] + after


def grouped(number: str, group: str, point: str, least: int = 4) -> str | None:
    """A number of so many digits or more with a sign between groups of three; None where it is no number, or has so
    many decimals that wikis put signs among them too."""
    found = _NUMBER.fullmatch(number)
    if found is None or len(found[3] or "") > 4:
        return None
    digits = found[2]
    if len(digits) >= least:
        digits = re.sub(r"(?<=\d)(?=(?:\d{3})+$)", group, digits)
    return found[1] + digits + (f"{point}{found[3]}" if found[3] else "")


def quantity(group: str, point: str, least: int = 4) -> Rule:
    """`{{unité|2000|m}}`: a number, and a unit that is written as it stands."""

    def rule(call: Call) -> str | None:
        number = grouped(call[1].replace(" ", ""), group, point, least)
        return None if number is None or re.search(r"\d", call[2]) else f"{number} {call[2]}".strip()

    return rule


def labelled(labels: Mapping[str, str], name: str, form: str) -> list[tuple[Rule, str, str]]:
    """Names of languages before a word: `{{lang-fr|mot}}` -> "фр. mot"."""

    def make(label: str) -> Rule:
        return lambda call: form.format(label, call[1])

    return [(make(label), "1", name.format(code)) for code, label in labels.items()]
