"""The templates that are part of a sentence, and what a reader sees of each. All others are left out.

The names are those of the English Wikipedia, which most others took over. English text that a template adds ("as of",
"Portuguese:") is added here as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from tools.corpus.extract.wikitext.names import words

# --- Numbers, units and dates in templates: `{{convert|5|km|mi}}` -> "5 km" -------------------------------------------

# Signs of fractions and ranges are meant.
# ruff: noqa: RUF001


class Arguments(Protocol):
    """A template's arguments."""

    @property
    def positions(self) -> tuple[str, ...]: ...

    @property
    def named(self) -> Mapping[str, str]: ...


UNITS: Mapping[str, str] = MappingProxyType({
    "sqmi": "sq mi", "sqkm": "km²", "km2": "km²", "m2": "m²", "cm2": "cm²", "mm2": "mm²", "sqft": "sq ft",
    "sqin": "sq in",
    "m3": "m³", "km3": "km³", "cm3": "cm³", "cuft": "cu ft", "cuin": "cu in", "cumi": "cu mi", "cuyd": "cu yd",
    "acre": "acres", "foot": "feet", "inch": "inches", "mile": "miles", "yard": "yards", "F": "°F", "C": "°C",
    "F-change": "°F", "C-change": "°C", "nmi": "nautical miles", "kn": "knots", "impgal": "imp gal", "USgal": "US gal",
    "kph": "km/h", "m/s2": "m/s²", "/sqmi": "per sq mi", "/km2": "per km²", "PD/km2": "per km²", "PD/sqmi": "per sq mi",
    "ozt": "troy oz", "LT": "long tons", "ST": "short tons", "MT": "tonnes", "t": "tonnes", "lb": "lb", "oz": "oz",
})  # fmt: skip
"""Codes of `{{convert}}` that a reader would not know; others are shown as they are."""

_RANGES: Mapping[str, str] = MappingProxyType({
    "-": "–", "–": "–", "to": " to ", "and": " and ", "or": " or ", "by": " by ", "x": " × ", "×": " × ", "*": " × ",
    "to(-)": " to ", "and(-)": " and ", "to about": " to about ", "+/-": " ± ", "±": " ± ", "+": " + ", "/": "/",
    ",": ", ", ", and": ", and ", ", or": ", or ", "xx": " × ",
})  # fmt: skip
_LONGEST_NUMBER = 40
_NUMBER = re.compile(r"[-−+]?[\d,.\s/+⁄e-]*\d[\d,.]*|\.\d+")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip


def convert(call: Arguments) -> str:
    """The amount as given, not converted: `|5|to|10|km|mi` -> "5 to 10 km", `|6|ft|2|in|m` -> "6 ft 2 in"."""
    values = list(call.positions)
    if not values:
        return ""
    text = values.pop(0)
    while len(values) >= 2 and values[0] in _RANGES:
        text += _RANGES[values[0]] + values[1]
        values = values[2:]
    if values:
        text += " " + UNITS.get(values[0], values[0])
    # "6 ft 2 in" is the amount as it is given, "5 km mi" is not.
    while (
        len(values) >= 3
        and len(values[1]) <= _LONGEST_NUMBER  # the expression tries every digit as the last
        and _NUMBER.fullmatch(values[1])
        and values[2] in ("in", "oz", "lb", "st", "yd", "ft", "furlong")
    ):
        text += f" {values[1]} {values[2]}"
        values = values[2:]
    return text


def amount(call: Arguments) -> str:
    """`{{val|1.5|0.2|e=6|u=m/s}}` -> "1.5 ± 0.2 × 10^6 m/s"."""
    text = " ± ".join(value for value in call.positions[:2] if value)
    if exponent := call.named.get("e"):
        text += f" × 10^{exponent}"
    unit = call.named.get("u") or call.named.get("ul") or ""
    return " ".join(part for part in (call.named.get("p", ""), text, unit) if part)


def fraction(call: Arguments) -> str:
    """`|1|2` -> "1/2", `|3|1|2` -> "3 1/2", `|2` -> "1/2"."""
    parts = [part for part in call.positions if part]
    if len(parts) == 1:
        return f"1/{parts[0]}"
    return f"{parts[0]} {parts[1]}/{parts[2]}" if len(parts) == 3 else "/".join(parts[:2])


def ordinal(call: Arguments) -> str:
    number = call.positions[0] if call.positions else ""
    if not number[-1:].isdigit():
        return number
    teen = number[-2:] in ("11", "12", "13")
    return number + ("th" if teen else {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th"))


def date(positions: Sequence[str], named: Mapping[str, str]) -> str:
    """Year, month and day as a text: ("2010", "5", "1") -> "May 1, 2010", or "1 May 2010" under df=y."""
    year, month, day = (*positions[:3], "", "", "")[:3]
    if not month:
        return year
    if month.isdecimal() and 1 <= int(month[:3]) <= 12:
        month = _MONTHS[int(month[:3]) - 1]
    if not day:
        return f"{month} {year}"
    if named.get("df") in ("y", "yes"):
        return f"{day} {month} {year}"
    return f"{month} {day}, {year}"


# --- The templates that are part of a sentence ------------------------------------------------------------------------

# Signs that a template stands for are meant.
# ruff: noqa: RUF001


@dataclass(frozen=True, kw_only=True)
class Call:
    """A template as it is called, its arguments cleaned."""

    name: str
    """As `names.normal_name` has it."""
    spelled: str
    """As it stands in the page."""
    positions: tuple[str, ...]
    """Arguments without a name, or with a number as a name."""
    named: Mapping[str, str]

    def __getitem__(self, number: int) -> str:
        """The argument of a number from 1; "" where there is none."""
        return self.positions[number - 1] if number <= len(self.positions) else ""

    def first_of(self, *names: str) -> str:
        """The first of the named arguments that is there and not empty."""
        return next((self.named[name] for name in names if self.named.get(name)), "")


Rule = Callable[[Call], str]


def _constants() -> dict[str, str]:
    table = {
        "–": "ndash, en dash, endash",
        "—": "mdash, em dash, emdash",
        " – ": "snd, spnd, sndash, spndash, spaced ndash, spaced en dash, spaced endash, snds, mdashb, ndashb",
        " — ": "spaced mdash, spaced em dash, smdash",
        "'": "', apostrophe",
        "'s": "'s, `s",
        "' \"": "' \"",
        "\" '": "\" '",
        " ": "nbsp, sp, space, spaces, thin space, thinsp, hair space, hairsp, nnbsp, br, break, crlf, pipe space",
        " · ": "·, dot, middot, •, bull, bullet, bullet inline, \\",
        "°": "deg, degree",
        "×": "times",
        "−": "minus",
        "±": "pm, ±",
        "π": "pi",
        "ʻ": "okina, ʻ, hamza",
        "ʿ": "ayin",
        "=": "=",
        "*": "*, asterisk",
        "€": "euro",
        "₹": "rupee, indian rupee",
        "†": "dagger",
        "♯": "sharp, music sharp",
        "♭": "flat, music flat",
        "\n\n": "paragraph break, pb, poem newline, clear, -, clr, div col, end div col, div col end, col-end",
    }
    return {name: text for text, names in table.items() for name in names.split(", ")}


CONSTANTS: Mapping[str, str] = MappingProxyType(_constants())
"""Templates that show the same whatever their arguments."""

# Rules


def _first(call: Call) -> str:
    return call.first_of("text", "content") or call[1]


def _second(call: Call) -> str:
    return call[2]


def _last(call: Call) -> str:
    return call.positions[-1] if call.positions else ""


def _joined(call: Call) -> str:
    return "".join(call.positions)


def _quote(call: Call) -> str:
    return "\n\n" + (call.first_of("text", "quote", "content", "lines") or call[1]) + "\n\n"


def _foreign(call: Call) -> str:
    """`{{lang-fr|mot}}`, `{{langx|fr|mot}}`: the language's name, where it is known, and the word."""
    code, word = (call[1], call[2]) if call.name == "langx" else (call.name.removeprefix("lang-"), call[1])
    name = LANGUAGES.get(code, LANGUAGES.get(code.partition("-")[0], ""))
    label = call.named.get("label")
    if name and word and label not in ("none", "no"):
        return f"{label or name}: {word}"
    return word


def _nihongo(call: Call) -> str:
    """English, Japanese, and romanised; the first in front, the others in brackets."""
    english, inside = call[1], [word for word in (call[2], call[3]) if word]
    if not english and len(inside) > 1:
        english = inside.pop()
    extra = call[4] or call.first_of("extra")
    inside += [extra] if extra else []
    return f"{english} ({', '.join(inside)})" if english and inside else english or ", ".join(inside)


def _circa(call: Call) -> str:
    years = "–".join(year for year in call.positions[:2] if year)
    return f"c. {years}" if years else "c."


def _marked(mark: str) -> Rule:
    """Years after a mark: `{{fl.|1900|1910}}` -> "fl. 1900–1910"."""
    return lambda call: " ".join([mark, "–".join(year for year in call.positions[:2] if year)]).strip()


def _as_of(call: Call) -> str:
    start = "as of" if call.named.get("lc") in ("y", "yes", "on") else "As of"
    if call.named.get("since") in ("y", "yes"):
        start = "since" if start == "as of" else "Since"
    return call.first_of("alt") or f"{start} {date(call.positions, call.named)}"


def _dated(call: Call) -> str:
    positions = call.positions
    if call.name.startswith("death date and age"):
        positions = positions[:3]
    return date(positions, call.named)


def _ship(call: Call) -> str:
    """`{{USS|Enterprise|CV-6}}` -> "USS Enterprise"; `{{ship|HMS|Victory}}` -> "HMS Victory"."""
    words = call.positions[:2] if call.name == "ship" else (call.name.upper(), call[1])
    return " ".join(word for word in words if word)


def _ship_class(call: Call) -> str:
    return f"{call[1]}-class {call[2]}".strip()


def _money(sign: str) -> Rule:
    return lambda call: sign + call[1]


def _wrapped(before: str, after: str) -> Rule:
    return lambda call: before + call[1] + after if call[1] else ""


def _link_with_label(call: Call) -> str:
    return call.first_of("lt", "display", "preserve") or call[1]


def _power_of_ten(call: Call) -> str:
    return f"×10^{call[1]}"


def _verse(call: Call) -> str:
    return call[4] or " ".join([call[1], ":".join(part for part in call.positions[1:3] if part)]).strip()


_MUSIC = {"flat": "♭", "sharp": "♯", "natural": "♮", "b": "♭", "#": "♯", "doubleflat": "𝄫", "doublesharp": "𝄪"}


def _music(call: Call) -> str:
    return _MUSIC.get(call[1].casefold(), "")


def _sic(call: Call) -> str:
    return "".join(call.positions[:2])


def _rules() -> dict[str, Rule]:
    table: list[tuple[Rule, str]] = [
        (_first, """
            nowrap, nobr, nobreak, nowraplinks, small, smaller, big, bigger, larger, large, midsize, em, strong
            bold, bolditalic, italic, italics, underline, var, mvar, mono, monospace, code, tt, kbd, samp, keypress
            key press, abbr, tooltip, hover title, abbrv, not a typo, typo, as written, proper name, awrap, noitalic
            no italic, normal, nonitalic, nobold, smallcaps, sc, sc1, sc2, aut, allcaps, vanchor, visible anchor
            anchord, anchor text, notatypo, sup, sub, su, angle bracket, math, tmath, chem2, flag, flagcountry
            flagu, tq, nts, center, centre, font, resize text
            blue, red, green, highlight, strikethrough, unicode, nastaliq, native phrase, title language, oldstyle
            script/arabic, script/hebrew, hebrew, ruby, wiktionary link"""),
        (_second, """
            lang, wikt-lang, wiktlang, script, color, colour, font color, fontcolor, audio, rtl-lang
            native name, plainlink, wikisource link, wikisourcelang, unicode script, coloured text, polytonic
            hlist item, illm, font size, fs"""),
        (_last, "resize, transl, transliteration, translit, simplenuclide, ISO 639 name, asiantitle"),
        (_joined, "chem, gaps, ce, linktext, angbr ipa, letters"),
        (_quote, """
            quote, blockquote, cquote, quotation, bquote, block quote, cquotetxt, quote text, poemquote, poem quote
            blockindent, block indent, bq, zitat, citation bloc, cita, citazione"""),
        (_nihongo, "nihongo, nihongo2, nihongo krt"),
        (convert, "convert, cvt, conv"),
        (amount, "val, nval, ntsh"),
        (fraction, "frac, fraction, sfrac, fracs, frac2"),
        (ordinal, "ordinal, ord"),
        (_circa, "circa, c., ca, c, ca., approx"),
        (_marked("fl."), "floruit, fl., fl"),
        (_marked("r."), "reign, r."),
        (_marked("b."), "b., born"),
        (_marked("d."), "d., died"),
        (_as_of, "as of, asof, since"),
        (_dated, """
            birth date, death date, birth date and age, death date and age, start date, end date, date, dts, bda
            start date and age, film date, birth-date, death-date, start-date, end-date, birth year
            birth year and age, oldstyledate"""),
        (_ship, "ship, uss, hms, ss, hmas, hmcs, rms, ms, mv, sms, usns, ins, jds, ijn, gts"),
        (_ship_class, "sclass, sclass2, sclass-"),
        (_money("$"), "usd, us$, us dollar"),
        (_money("£"), "gbp, £, pound sterling, pounds"),
        (_money("€"), "eur, €"),
        (_money("₹"), "inr, indian rupees"),
        (_money("¥"), "jpy, cny, ¥, yen, rmb"),
        (_wrapped("⟨", "⟩"), "angbr, angle brackets"),
        (_wrapped("'", "'"), "gloss, single quote"),
        (_wrapped("lit. '", "'"), "lit, literally, literal translation"),
        (_wrapped("née ", ""), "née, nee"),
        (_wrapped("|", "|"), "abs"),
        (_wrapped("v. ", ""), "versus"),
        (_wrapped("p. ", ""), "p., page"),
        (_wrapped("√", ""), "radic, sqrt"),
        (_link_with_label, "ill, interlanguage link, interlanguage link multi, link-interwiki, ill-wd, le"),
        (_power_of_ten, "e"),
        (_verse, "bibleverse, bibleref, bibleref2, bibleverse-lb, bible verse"),
        (_music, "music"),
        (_sic, "sic"),
    ]  # fmt: skip
    return {name: rule for rule, names in table for name in words(names)}


RULES: Mapping[str, Rule] = MappingProxyType(_rules())

LANGUAGES: Mapping[str, str] = MappingProxyType({
    "af": "Afrikaans", "ang": "Old English", "ar": "Arabic", "az": "Azerbaijani", "be": "Belarusian",
    "bg": "Bulgarian", "bn": "Bengali", "ca": "Catalan", "cs": "Czech", "cy": "Welsh", "da": "Danish",
    "de": "German", "el": "Greek", "es": "Spanish", "et": "Estonian", "eu": "Basque", "fa": "Persian",
    "fi": "Finnish", "fr": "French", "ga": "Irish", "gd": "Scottish Gaelic", "grc": "Ancient Greek", "he": "Hebrew",
    "hi": "Hindi", "hr": "Croatian", "hu": "Hungarian", "hy": "Armenian", "id": "Indonesian", "is": "Icelandic",
    "it": "Italian", "ja": "Japanese", "ka": "Georgian", "ko": "Korean", "la": "Latin", "lt": "Lithuanian",
    "lv": "Latvian", "mk": "Macedonian", "nl": "Dutch", "no": "Norwegian", "nb": "Norwegian", "pl": "Polish",
    "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sa": "Sanskrit", "sk": "Slovak", "sl": "Slovene",
    "sq": "Albanian", "sr": "Serbian", "sv": "Swedish", "ta": "Tamil", "th": "Thai", "tr": "Turkish",
    "uk": "Ukrainian", "ur": "Urdu", "vi": "Vietnamese", "yi": "Yiddish", "zh": "Chinese",
})  # fmt: skip

_FOREIGN = re.compile(r"lang-[a-z]{2,3}(?:-[a-z-]{1,12})?|langx")
_FUNCTION = re.compile(r"\s*(?:formatnum|lc|uc|lcfirst|ucfirst):(.*)", re.DOTALL | re.IGNORECASE)


def rule_of(name: str) -> Rule | None:
    """The rule of the template of this normal name; None: it shows nothing worth reading."""
    return RULES.get(name) or (_foreign if _FOREIGN.fullmatch(name) else None)


def has_rule(name: str) -> bool:
    return rule_of(name) is not None or _FUNCTION.match(name) is not None


def shown(call: Call) -> str:
    """What a reader sees of a template with a rule."""
    function = _FUNCTION.match(call.spelled)
    if function is not None:
        return function[1].strip()
    rule = rule_of(call.name)
    return rule(call) if rule is not None else ""
