"""The templates that are part of a sentence, and what a reader sees of each.

A name means one thing in one wiki and another in the next: `{{date|1|janvier|2017}}` and `{{date|2006-08-04|dmy}}`. So
there is a table for each language, of Wikipedia alone, and a rule that does not find the arguments which it knows
returns None. What has no rule, or None of it, is left out and counted: a hole is honest, a wrong text is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from tools.corpus.extract.read_context import Site
from tools.corpus.extract.wikitext.names import template_key, wiki_language, words

# Signs and letters of other scripts are meant.
# ruff: noqa: RUF001, RUF002


@dataclass(frozen=True, kw_only=True)
class Call:
    """A template as it is called, its arguments cleaned."""

    name: str
    """As `names.template_key` has it."""
    positions: tuple[str, ...]
    """Arguments without a name, or with a number as a name."""
    named: Mapping[str, str]

    def __getitem__(self, number: int) -> str:
        """The argument of a number from 1; "" where there is none."""
        return self.positions[number - 1] if number <= len(self.positions) else ""

    def first_of(self, *names: str) -> str:
        """The first of the named arguments that is there and not empty."""
        return next((self.named[name] for name in names if self.named.get(name)), "")

    def says(self, name: str) -> bool:
        return self.named.get(name, "").casefold() in ("y", "yes", "on", "1", "true", "oui", "sí", "ja")

    def has(self, most: int, *names: str) -> bool:
        """Whether there are one to `most` arguments, and no named ones but these."""
        return 1 <= len(self.positions) <= most and self.named.keys() <= set(names)


Rule = Callable[[Call], str | None]
"""What a reader sees; None where these arguments are not those that the rule knows."""

# --- In any language --------------------------------------------------------------------------------------------------

_RAISED = str.maketrans("0123456789+-−=()n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ⁿ")
_RAISABLE = re.compile(r"[0-9+\-−=()n]{1,12}")
_CODE = re.compile(r"[a-z]{2,3}(?:-[A-Za-z0-9]{1,8}){0,3}")
_NUMBER = re.compile(r"([-−+]?)(\d{1,30})(?:[.,](\d{1,30}))?")
_PLAIN_FORMULA = re.compile(r"[A-Za-z0-9]{1,40}")


def _first(call: Call) -> str | None:
    return call.first_of("text", "content") or call[1]


def _second(call: Call) -> str | None:
    return call[2] if len(call.positions) >= 2 else None


def _last(call: Call) -> str | None:
    return call.positions[-1] if call.positions else None


def _joined(call: Call) -> str | None:
    return None if call.named else "".join(call.positions)


def _lang(call: Call) -> str | None:
    """`{{lang|fr|mot}}`"""
    return call[2] if _CODE.fullmatch(call[1]) and call[2] else None


def _quote(call: Call) -> str | None:
    text = call.first_of("text", "quote", "content", "lines", "Text", "texte", "texto", "testo") or call[1]
    return f"\n\n{text}\n\n" if text else None


def _raised(call: Call) -> str | None:
    """As `<sup>` is read: signs that can be raised are, others stay."""
    if len(call.positions) != 1 or call.named:
        return None
    return call[1].translate(_RAISED) if _RAISABLE.fullmatch(call[1]) else call[1]


def _only(most: int, *names: str) -> Callable[[Rule], Rule]:
    """A rule for calls with one to `most` arguments, and no named ones but these."""
    return lambda rule: lambda call: rule(call) if call.has(most, *names) else None


def _wrapped(before: str, after: str) -> Rule:
    return lambda call: before + call[1] + after if call.has(1) and call[1] else None


def grouped(number: str, group: str, point: str, least: int = 4) -> str | None:
    """A number of so many digits or more with a sign between groups of three; None where it is no number."""
    found = _NUMBER.fullmatch(number)
    if found is None:
        return None
    digits = found[2]
    if len(digits) >= least:
        digits = re.sub(r"(?<=\d)(?=(?:\d{3})+$)", group, digits)
    return found[1] + digits + (f"{point}{found[3]}" if found[3] else "")


def _quantity(group: str, point: str, least: int = 4) -> Rule:
    """`{{unité|2000|m}}`: a number, and a unit that is written as it stands."""

    def rule(call: Call) -> str | None:
        number = grouped(call[1].replace(" ", ""), group, point, least)
        if number is None or not call.has(2) or re.search(r"\d", call[2]):
            return None
        return f"{number} {call[2]}".strip()

    return rule


def _labelled(labels: Mapping[str, str], name: str, form: str) -> dict[str, Rule]:
    """Names of languages before a word: `{{lang-fr|mot}}` -> "фр. mot"."""

    def make(label: str) -> Rule:
        return lambda call: form.format(label, call[1]) if call.has(1) and call[1] else None

    return {name.format(code): make(label) for code, label in labels.items()}


# --- English ----------------------------------------------------------------------------------------------------------

UNITS: Mapping[str, str] = MappingProxyType({
    "sqmi": "sq mi", "sqkm": "km²", "km2": "km²", "m2": "m²", "cm2": "cm²", "mm2": "mm²", "sqft": "sq ft",
    "sqin": "sq in", "sqyd": "sq yd",
    "m3": "m³", "km3": "km³", "cm3": "cm³", "cuft": "cu ft", "cuin": "cu in", "cumi": "cu mi", "cuyd": "cu yd",
    "acre": "acres", "foot": "feet", "inch": "inches", "mile": "miles", "yard": "yards", "F": "°F", "C": "°C",
    "F-change": "°F", "C-change": "°C", "nmi": "nautical miles", "kn": "knots", "impgal": "imp gal", "USgal": "US gal",
    "kph": "km/h", "m/s2": "m/s²", "/sqmi": "per sq mi", "/km2": "per km²", "PD/km2": "per km²", "PD/sqmi": "per sq mi",
    "ozt": "troy oz", "LT": "long tons", "ST": "short tons", "MT": "tonnes", "t": "tonnes", "lb": "lb", "oz": "oz",
    "ft2": "sq ft", "mi2": "sq mi", "ft3": "cu ft", "dm3": "dm³", "mpg": "mpg", "miles": "miles", "feet": "feet",
    "inches": "inches", "yards": "yards", "acres": "acres", "hectare": "hectares", "metre": "metres",
    "meter": "meters", "kilometre": "kilometres", "kilometer": "kilometers", "pound": "pounds", "kg/m3": "kg/m³",
    "USbbl": "US bbl", "oilbbl": "barrels", "impfloz": "imp fl oz", "USfloz": "US fl oz", "long ton": "long tons",
    "short ton": "short tons", "tonne": "tonnes", "lb-f": "lbf", "lbft": "lb·ft", "Nm": "N·m", "N.m": "N·m",
    **dict.fromkeys(("mi/h", "miles per hour"), "mph"), **{unit: unit for unit in re.split(r"\s+", """
    km mi m ft in cm mm nm μm µm yd dm furlong chain ha kg g mg lbs st cwt L l ml mL cl hl GL ML km/h mph km/s m/s ft/s
    knot K R kW MW GW TW W hp PS bhp shp ihp kWh MWh GWh kJ MJ J cal kcal BTU N kN kPa MPa GPa hPa Pa bar mbar psi atm
    Hz kHz MHz GHz V A s min h ly pc AU gal pt qt bbl lbf gr ct Mg Gg kt Mt""".strip())},
})  # fmt: skip
"""Codes of `{{convert}}`, as they are shown. Others (`e6m3`, currencies, combined ones) are not known here."""

_RANGES: Mapping[str, str] = MappingProxyType({
    "-": "–", "–": "–", "to": " to ", "and": " and ", "or": " or ", "by": " by ", "x": " × ", "×": " × ", "*": " × ",
    "to(-)": " to ", "and(-)": " and ", "to about": " to about ", "+/-": " ± ", "±": " ± ", "+": " + ", "/": "/",
    ",": ", ", ", and": ", and ", ", or": ", or ", "xx": " × ",
})  # fmt: skip
_LONGEST_NUMBER = 40
_AMOUNT = re.compile(r"[-−+]?[\d,.\s/+⁄e-]*\d[\d,.]*|\.\d+")
_MIXED = re.compile(r"(\d)\+(?=\d+/)")
_FLIPPED = frozenset({"out", "output only", "output number only", "number", "unit", "unit2", "tablecen", "table"})
"""Ways of `{{convert}}` that do not show what is given."""


def convert(call: Call) -> str | None:
    """The amount as given, not converted: `|5|to|10|km|mi` -> "5 to 10 km", `|6|ft|2|in|m` -> "6 ft 2 in"."""
    values = list(call.positions)
    if len(values) < 2 or call.named.get("disp") in _FLIPPED or not _is_amount(values[0]):
        return None
    text = _mixed(values.pop(0))
    while len(values) >= 2 and values[0] in _RANGES:
        if not _is_amount(values[1]):
            return None
        text += _RANGES[values[0]] + _mixed(values[1])
        values = values[2:]
    unit = UNITS.get(values[0]) if values else None
    if unit is None:
        return None
    text += " " + unit
    # "6 ft 2 in" is the amount as it is given, "5 km mi" is not.
    while (
        len(values) >= 3
        and _is_amount(values[1])
        and values[2] in ("in", "oz", "lb", "st", "yd", "ft", "furlong")
    ):  # fmt: skip
        text += f" {_mixed(values[1])} {values[2]}"
        values = values[2:]
    return text


def _is_amount(text: str) -> bool:
    # Short, for the expression tries every digit as the last.
    return len(text) <= _LONGEST_NUMBER and _AMOUNT.fullmatch(text) is not None


def _mixed(amount: str) -> str:
    """`3+1/2` -> "3 1/2"."""
    return _MIXED.sub(r"\1 ", amount).replace("//", "/")


def amount(call: Call) -> str | None:
    """`{{val|1.5|0.2|e=6|u=m/s}}` -> "1.5 ± 0.2 × 10^6 m/s"; `|10|-|20` -> "10–20"."""
    values = call.positions
    if not values or not set(call.named) <= {"e", "u", "ul", "p", "fmt"} or not _is_amount(values[0]):
        return None
    if len(values) == 3 and values[1] in _RANGES and _is_amount(values[2]):
        text = values[0] + _RANGES[values[1]] + values[2]
    elif len(values) == 1:
        text = values[0]
    elif len(values) == 2 and re.fullmatch(r"\(\d{1,9}\)", values[1]):
        text = values[0] + values[1]
    elif len(values) == 2 and re.fullmatch(r"\d[\d.]{0,29}", values[1]):
        text = " ± ".join(values)
    else:
        return None
    if exponent := call.named.get("e"):
        text += f" × 10^{exponent}"
    unit = call.named.get("u") or call.named.get("ul") or ""
    return " ".join(part for part in (call.named.get("p", ""), text, UNITS.get(unit, unit)) if part)


def fraction(call: Call) -> str | None:
    """`|1|2` -> "1/2", `|3|1|2` -> "3 1/2", `|2` -> "1/2"."""
    parts = [part for part in call.positions if part]
    if not 1 <= len(parts) <= 3:
        return None
    if len(parts) == 1:
        return f"1/{parts[0]}"
    return f"{parts[0]} {parts[1]}/{parts[2]}" if len(parts) == 3 else "/".join(parts)


def ordinal(call: Call) -> str | None:
    number = call[1]
    if not re.fullmatch(r"[\d,]{0,20}[0-9]", number):
        return None
    teen = number[-2:] in ("11", "12", "13")
    return number + ("th" if teen else {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th"))


_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_DAY = re.compile(r"(?P<d>\d{1,2}) (?P<m>[A-Z][a-z]{2,8}),? (?P<y>\d{1,4})")
_MONTH_DAY = re.compile(r"(?P<m>[A-Z][a-z]{2,8}) (?P<d>\d{1,2}),? (?P<y>\d{1,4})")
_ISO = re.compile(r"(?P<y>\d{4})-(?P<m>\d{1,2})-(?P<d>\d{1,2})")


def _month(text: str) -> str:
    if text.isascii() and text.isdecimal():
        return _MONTHS[int(text[:3]) - 1] if 1 <= int(text[:3]) <= 12 else ""
    return next((month for month in _MONTHS if text in (month, month[:3])), "")


def date(parts: tuple[str, ...], *, day_first: bool) -> str | None:
    """Year, month and day as a text: ("2010", "5", "1") -> "1 May 2010" or "May 1, 2010"; None where they are none."""
    year, month, day = (*(part.lstrip("0") for part in parts[:3]), "", "", "")[:3]
    if not re.fullmatch(r"\d{1,4}", year):
        return None
    if not month:
        return year if not day else None
    month = _month(month)
    if not month or (day and not (re.fullmatch(r"\d{1,2}", day) and int(day) <= 31)):
        return None
    if not day:
        return f"{month} {year}"
    return f"{day} {month} {year}" if day_first else f"{month} {day}, {year}"


def _dated(most: int) -> Rule:
    """`{{birth date|1990|1|2}}` -> "January 2, 1990"; of up to `most` arguments the first three are the date."""

    def rule(call: Call) -> str | None:
        if not 1 <= len(call.positions) <= most:
            return None
        return date(call.positions[:3], day_first=call.says("df"))

    return rule


def _date(call: Call) -> str | None:
    """`{{date|2006-08-04|dmy}}` -> "4 August 2006"."""
    found = _DAY.fullmatch(call[1]) or _MONTH_DAY.fullmatch(call[1]) or _ISO.fullmatch(call[1])
    style = call[2].casefold() or "dmy"
    if found is None or not call.has(2) or style not in ("dmy", "mdy", "iso"):
        return None
    text = date((found["y"], found["m"], found["d"]), day_first=style == "dmy")
    if text is None or style != "iso":
        return text
    return f"{found['y']:0>4}-{_MONTHS.index(_month(found['m'].lstrip('0'))) + 1:02d}-{found['d']:0>2}"


def _sortable_date(call: Call) -> str | None:
    """`{{dts|2006|8|4}}` -> "August 4, 2006"."""
    style = call.named.get("format", "mdy")
    if style not in ("mdy", "dmy") or not set(call.named) <= {"format", "link"} or len(call.positions) > 3:
        return None
    if len(call.positions) == 1 and (found := _ISO.fullmatch(call[1])):
        return date((found["y"], found["m"], found["d"]), day_first=style == "dmy")
    return date(call.positions, day_first=style == "dmy") if len(call.positions) == 3 else None


def _as_given(call: Call) -> str | None:
    """`{{start-date|7 December 1941}}`"""
    return call[1] if call.has(1, "df") and (_DAY.fullmatch(call[1]) or _MONTH_DAY.fullmatch(call[1])) else None


def _old_style(call: Call) -> str | None:
    """`{{OldStyleDate|2 February|1905|20 January}}` -> "2 February [O.S. 20 January] 1905"."""
    if len(call.positions) != 3 or not all(call.positions) or not re.fullmatch(r"\d{3,4}", call[2]):
        return None
    return f"{call[1]} [O.S. {call[3]}] {call[2]}"


def _old_style_years(call: Call) -> str | None:
    """`{{OldStyleDateDY|11 January|1905|29 December 1904}}` -> "11 January 1905 [O.S. 29 December 1904]"."""
    if len(call.positions) != 3 or not all(call.positions) or not re.fullmatch(r"\d{3,4}", call[2]):
        return None
    return f"{call[1]} {call[2]} [O.S. {call[3]}]"


def _as_of(call: Call) -> str | None:
    if call.first_of("alt"):
        return call.first_of("alt")
    when = date(call.positions, day_first=call.named.get("df", "").casefold() not in ("us", "mdy"))
    if when is None or len(call.positions) > 3:
        return None
    start = "since" if call.says("since") else "as of"
    start = start if call.says("lc") else start.capitalize()
    return when if call.says("bare") else f"{start} {when}"


def _circa(call: Call) -> str | None:
    mark = "C." if call.says("cap") else "c."
    years = [year for year in call.positions if year]
    return " – ".join(f"{mark} {year}" for year in years) or mark if len(years) <= 2 else None


def _marked(mark: str) -> Rule:
    """Years after a mark: `{{fl.|1900|1910}}` -> "fl. 1900–1910"."""

    def rule(call: Call) -> str | None:
        years = [year for year in call.positions if year]
        between = " – " if any(" " in year for year in years) else "–"
        return " ".join([mark, between.join(years)]).strip() if len(years) <= 2 else None

    return rule


def _foreign(call: Call) -> str | None:
    """`{{lang-fr|mot}}`, `{{langx|fr|mot}}`: the language's name, where it is known, and the word."""
    code, word = (call[1], call[2]) if call.name == "langx" else (call.name.removeprefix("lang-"), call[1])
    name = LANGUAGES.get(code, LANGUAGES.get(code.partition("-")[0], ""))
    label = call.named.get("label")
    if not word:
        return None
    return f"{label or name}: {word}" if name and label not in ("none", "no") else word


def _language_name(call: Call) -> str | None:
    return LANGUAGES.get(call[1])


def _nihongo(call: Call) -> str | None:
    """English, Japanese, and romanised; the first in front, the others in brackets."""
    if len(call.positions) > 4 or not set(call.named) <= {"extra"}:
        return None
    english, inside = call[1], [word for word in (call[2], call[3]) if word]
    if not english and len(inside) > 1:
        english = inside.pop()
    extra = call[4] or call.first_of("extra")
    inside += [extra] if extra else []
    return f"{english} ({', '.join(inside)})" if english and inside else english or ", ".join(inside) or None


_SHIP_FORMS: Mapping[str, str] = MappingProxyType({"": "{0} {1}", "5": "{0} {1}", "6": "{1}"})


def _ship(call: Call) -> str | None:
    """`{{USS|Enterprise|CV-6}}` -> "USS Enterprise"; `{{ship|HMS|Victory}}` -> "HMS Victory"."""
    values = call.positions if call.name == "ship" else (call.name.upper(), *call.positions)
    prefix, name, _, form = (*values, "", "", "", "")[:4]
    known = _SHIP_FORMS.get(form)
    return known.format(prefix, name).strip() if known and name and len(values) <= 4 else None


def _ship_class(call: Call) -> str | None:
    return f"{call[1]}-class {call[2]}" if call[1] and call[2] and call[3] in ("", "0") else None


def _money(sign: str) -> Rule:
    return lambda call: sign + call[1] if call[1][:1].isdigit() else None


def _literal(call: Call) -> str | None:
    return (
        "lit. " + " or ".join(f"'{word}'" for word in call.positions) if call.has(3) and all(call.positions) else None
    )


def _link_with_label(call: Call) -> str | None:
    return call.first_of("lt", "display") or call[1] or None


def _power_of_ten(call: Call) -> str | None:
    return f"×10^{call[1]}" if call.has(1) and re.fullmatch(r"[-−+]?\d{1,6}", call[1]) else None


def _verse(call: Call) -> str | None:
    """`|Genesis|1:1`, `|1|Samuel|1:2`, `||Genesis|1:1|KJV`: of a numbered book the number comes first."""
    values = call.positions
    if re.fullmatch(r"[1-4I]{0,3}", call[1]):
        values = (f"{call[1]} {call[2]}".strip(), *values[2:])
    book, verses, _, shown = (*values, "", "", "", "")[:4]
    if shown:
        return shown
    return f"{book} {verses}".strip() if book and re.fullmatch(r"[\d:–,; -]{0,40}", verses) else None


_MUSIC = {"flat": "♭", "sharp": "♯", "natural": "♮", "b": "♭", "#": "♯", "doubleflat": "𝄫", "doublesharp": "𝄪"}


def _music(call: Call) -> str | None:
    return _MUSIC.get(call[1].casefold()) if call.has(1) else None


def _sic(call: Call) -> str | None:
    return None if call[1] in ("?", "!") else "".join(call.positions[:2]) or None


def _country(call: Call) -> str | None:
    """`{{flag|France}}`; a code of a country is shown as its name, which is not known here."""
    return call[1] if call[1] and not (call[1].isupper() and len(call[1]) <= 3) and "name" not in call.named else None


def _formula(call: Call) -> str | None:
    """Chemistry without charges: `{{chem|H|2|O}}` -> "H2O"."""
    text = "".join(call.positions)
    return text if not call.named and _PLAIN_FORMULA.fullmatch(text) else None


def _keys(call: Call) -> str | None:
    return "+".join(call.positions) or None if not call.named else None


def _entry(call: Call) -> str | None:
    """`{{wikt-lang|de|Wort|Worte}}`: the word, or how it is shown."""
    return call[3] or call[2] or None


def _coloured(call: Call) -> str | None:
    return call.positions[-1] if len(call.positions) >= 2 else None


_ENGLISH_CONSTANTS: Mapping[str, str] = MappingProxyType({
    "–": "ndash, en dash, endash",
    "—": "mdash, em dash, emdash",
    " – ": "snd, spnd, sndash, spndash, spaced ndash, spaced en dash, spaced endash, snds",
    " — ": "spaced mdash, spaced em dash, smdash",
    "'": "', apostrophe",
    "'s": "'s, `s",
    "' \"": "' \"",
    "\" '": "\" '",
    " · ": "·, dot, middot",
    " • ": "•, bull, bullet, bullet inline",
    " / ": "\\",
    "°": "deg, degree",
    "×": "times",
    "−": "minus",
    "±": "pm, ±",
    "π": "pi",
    "ʻ": "okina, ʻ",
    "ʿ": "ayin",
    "*": "asterisk",
    "€": "euro",
    "₹": "rupee, indian rupee",
    "†": "dagger",
    "♯": "sharp",
    "♭": "flat",
})  # fmt: skip


_LAYOUT: Mapping[str, str] = MappingProxyType({
    "\n\n": "paragraph break, pb, poem newline, clear, -, clr, div col, end div col, div col end, col-end",
    " ": "nbsp, sp, space, spaces, thin space, thinsp, hair space, hairsp, nnbsp, br, break, crlf, pipe space",
})  # fmt: skip


def _english() -> dict[str, Rule]:
    table: list[tuple[Rule, str]] = [
        (_first, """
            nowraplinks, small, smaller, big, bigger, larger, large, midsize, em, strong
            bold, bolditalic, italic, italics, underline, var, mvar, mono, monospace, code, tt, kbd, samp
            abbr, tooltip, abbrv, not a typo, typo, as written, proper name, awrap, noitalic
            no italic, normal, nonitalic, nobold, smallcaps, sc, sc1, sc2, aut, allcaps, vanchor, visible anchor
            notatypo, sub, math, tq, center, centre, font, polytonic
            blue, red, green, highlight, strikethrough, unicode, nastaliq
            script/arabic, script/hebrew, hebrew, ruby"""),
        (_second, "script, audio, rtl-lang, plainlink, font size, hover title"),
        (_coloured, "color, colour, font color, fontcolor"),
        (_entry, "wikt-lang, wiktlang"),
        (_last, "resize, transl, transliteration, translit"),
        (_joined, "gaps, linktext"),
        (_formula, "chem, chem2, ce"),
        (_keys, "key press, keypress"),
        (_raised, "sup"),
        (_quote, """
            quote, blockquote, cquote, quotation, bquote, block quote, quote text, poemquote, poem quote
            blockindent, block indent, bq"""),
        (_nihongo, "nihongo"),
        (_first, "nihongo2"),
        (convert, "convert, cvt"),
        (amount, "val"),
        (fraction, "frac, fraction, sfrac"),
        (ordinal, "ordinal, ord"),
        (lambda call: grouped(call[1], ",", ".") if call.has(1) else None, "nts"),
        (_circa, "circa, c., ca, ca."),
        (_marked("fl."), "floruit, fl."),
        (_marked("r."), "reign, r."),
        (_marked("b."), "b."),
        (_marked("d."), "d."),
        (_as_of, "as of, asof"),
        (_dated(3), "birth date, death date, start date, end date"),
        (_dated(3), "birth date and age, start date and age, bda"),
        (_dated(6), "death date and age"),
        (_dated(1), "birth year and age"),
        (_as_given, "birth-date, death-date, start-date, end-date"),
        (_date, "date"),
        (_sortable_date, "dts"),
        (_old_style, "oldstyledate"),
        (_old_style_years, "oldstyledatedy"),
        (_language_name, "ISO 639 name"),
        (_ship, "ship, USS, HMS, SS, HMAS, HMCS, RMS, MS, MV, SMS, USNS, INS, GTS"),
        (_ship_class, "sclass, sclass2, sclass-"),
        (_money("US$"), "USD, US$, US dollar"),
        (_money("£"), "GBP, £, pound sterling"),
        (_money("€"), "EUR, €"),
        (_money("₹"), "INR, indian rupees"),
        (_money("¥"), "¥, yen"),
        (_wrapped("⟨", "⟩"), "angbr, angle brackets, angle bracket, angbr IPA"),
        (_wrapped("'", "'"), "gloss"),
        (_literal, "lit, lit., literally, literal translation"),
        (_wrapped("née ", ""), "née, nee"),
        (_wrapped("|", "|"), "abs"),
        (_wrapped("p. ", ""), "p."),
        (_wrapped("√", ""), "radic, sqrt"),
        (_link_with_label, "ill, interlanguage link, interlanguage link multi"),
        (_power_of_ten, "e"),
        (_verse, "bibleverse, bibleref, bibleref2, bibleverse-lb, bible verse"),
        (_music, "music"),
        (_sic, "sic"),
        (_country, "flag, flagcountry, flagu"),
        (_foreign, "langx"),
    ]  # fmt: skip
    return _table({}, *table)


# --- Other languages: what is known of a few --------------------------------------------------------------------------


_FRENCH_MONTHS = frozenset({
    "janvier", "février", "mars", "avril", "mai", "juin", "juillet", "août", "septembre", "octobre", "novembre",
    "décembre",
})  # fmt: skip


def _french_date(call: Call) -> str | None:
    """`{{date|1|janvier|2017}}` -> "1er janvier 2017"; what else is said is a calendar or a subject."""
    day, month, year = (*call.positions, "", "", "")[:3]
    if (
        month not in _FRENCH_MONTHS
        or call.named
        or not re.fullmatch(r"\d{1,4}|", year)
        or not re.fullmatch(r"\d{1,2}|1er|", day)
    ):
        return None
    return " ".join(filter(None, ["1er" if day in ("1", "01") else day.lstrip("0"), month, year]))


def _french_century(call: Call) -> str | None:
    """`{{s|XIX|e}}` -> "XIXe siècle"."""
    known = call.has(2) and re.fullmatch(r"[IVX]{1,6}", call[1]) and call[2] in ("e", "er")
    return f"{call[1]}{call[2]} siècle" if known else None


def _french_hour(call: Call) -> str | None:
    """`{{heure|10|30}}` -> "10 h 30"."""
    known = call.has(2) and all(re.fullmatch(r"\d{1,2}", part) for part in call.positions)
    return f"{call[1]} h {call[2]}".strip() if known else None


def _spanish_century(call: Call) -> str | None:
    """`{{siglo|XIX||s}}` -> "siglo XIX"."""
    start = {"": "", "s": "siglo ", "S": "Siglo "}.get(call[3])
    return None if start is None or call[2] or not re.fullmatch(r"[IVX]{1,6}", call[1]) else start + call[1]


def _pick(*numbers: int) -> Rule:
    """The first of these arguments that is there."""
    return lambda call: next((call[number] for number in numbers if call[number]), None)


def _named_or(*names: str) -> Rule:
    return lambda call: call.first_of(*names) or call[1] or None


def _reading(call: Call) -> str | None:
    """`{{読み仮名|漢字|かんじ}}` -> "漢字（かんじ）"."""
    return f"{call[1]}（{call[2]}）" if len(call.positions) == 2 and not call.named and all(call.positions) else None


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


def _others() -> dict[str, dict[str, Rule]]:
    french = _quantity(" ", ",")
    return {
        "de": _table(
            _labelled(_GERMAN, "{}S", "{} {}"),
            (_quote, "Zitat"),
            (_wrapped("„", "“"), '"'),
        ),
        "fr": _table(
            {},
            (_french_date, "date, date-"),
            (french, "unité, nombre, nb"),
            (_french_century, "s, s-"),
            (_french_hour, "heure"),
            (_raised, "exp"),
            (_only(1)(_first), "ind, petit"),
            (_wrapped("« ", " »"), "citation"),
            (_quote, "citation bloc"),
            (_named_or("texte", "fr"), "lien"),
        ),
        "es": _table(
            {},
            (_spanish_century, "siglo"),
            (_only(1)(_first), "esd"),
            (_quantity(" ", ",", 5), "unidad"),
            (_quote, "cita"),
        ),
        "it": _table({}, (_quote, "citazione"), (_only(1)(_first), "TA")),
        "pt": _table({}, (_quote, "quote")),
        "ru": _table(_labelled(_RUSSIAN, "lang-{}", "{} {}"), (_pick(2, 1), "iw, нп5, не переведено 5, не переведено")),
        "ja": _table(
            _labelled(_JAPANESE, "lang-{}", "{}: {}"),
            (_reading, "読み仮名"),
            (_named_or("label"), "仮リンク"),
            (_pick(1), "ルビ"),
        ),
        "zh": _table({}, (_pick(3, 1), "le, link-en"), (_pick(4, 3), "tsl")),
    }


def _centuries() -> list[str]:
    tens, ones = ("", "X", "XX"), ("", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX")
    return [f"{ten}{one}{'er' if ten + one == 'I' else 'e'}" for ten in tens for one in ones if ten + one]


def _constants(*tables: Mapping[str, str]) -> dict[str, str]:
    """Texts by the names of the templates that stand for them."""
    return {
        template_key(name): text for table in tables for text, names in table.items() for name in names.split(", ")
    }  # fmt: skip


def _table(rules: Mapping[str, Rule], *more: tuple[Rule, str]) -> dict[str, Rule]:
    """Rules by the names of their templates, which commas or line ends separate."""
    listed = {name.strip(): rule for rule, names in more for name in re.split(r"[,\n]", names) if name.strip()}
    return {template_key(name): rule for name, rule in {**rules, **listed}.items()}


COMMON: Mapping[str, Rule] = MappingProxyType(_table({}, (_first, "nowrap, nobr, nobreak"), (_lang, "lang")))
"""Templates that are the same in every wiki which has them."""
RULES: Mapping[str, Mapping[str, Rule]] = MappingProxyType({"en": _english(), **_others()})
"""By the language of the Wikipedia."""
CONSTANTS: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "en": _constants(_ENGLISH_CONSTANTS),
    "fr": _constants({text: text for text in ("e", "er", "re", "1er", *(f"{of} siècle" for of in _centuries()))}),
})  # fmt: skip
"""Templates that show this where they are called without arguments; by the language of the Wikipedia."""

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

_FOREIGN = re.compile(r"lang-[a-z]{2,3}(?:-[a-z-]{1,12})?")
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
        layout=_constants(_LAYOUT) if language == "en" else {},
        language=wiki_language(site.language),
        foreign=language == "en",
    )
