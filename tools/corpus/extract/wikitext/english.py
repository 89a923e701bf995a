"""The templates of the English Wikipedia, and of the Simple English one, that are part of a sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from tools.corpus.extract.wikitext.calls import (
    APART,
    QUOTE,
    Call,
    Rule,
    grouped,
    joined,
    last,
    lowered,
    named_or,
    pick,
    quote,
    raised,
    table,
    wrapped,
)

# Signs and letters of other scripts are meant.
# ruff: noqa: RUF001

# --- Amounts ----------------------------------------------------------------------------------------------------------

UNITS: Mapping[str, str] = MappingProxyType({
    "sqmi": "sq mi", "sqkm": "km²", "km2": "km²", "m2": "m²", "cm2": "cm²", "mm2": "mm²", "sqft": "sq ft",
    "sqin": "sq in", "sqyd": "sq yd",
    "m3": "m³", "km3": "km³", "cm3": "cm³", "cuft": "cu ft", "cuin": "cu in", "cumi": "cu mi", "cuyd": "cu yd",
    "acre": "acres", "furlong": "furlongs", "chain": "chains",
    "knot": "knots", "foot": "feet", "inch": "inches", "mile": "miles", "yard": "yards", "F": "°F", "C": "°C",
    "F-change": "°F", "C-change": "°C", "nmi": "nautical miles", "kn": "knots", "impgal": "imp gal", "USgal": "US gal",
    "kph": "km/h", "m/s2": "m/s²", "/sqmi": "per sq mi", "/km2": "per km²", "PD/km2": "per km²", "PD/sqmi": "per sq mi",
    "ozt": "troy oz", "LT": "long tons", "ST": "short tons", "MT": "tonnes", "t": "tonnes", "lb": "lb", "oz": "oz",
    "ft2": "sq ft", "mi2": "sq mi", "ft3": "cu ft", "dm3": "dm³", "mpg": "mpg", "miles": "miles", "feet": "feet",
    "inches": "inches", "yards": "yards", "acres": "acres", "hectare": "hectares", "metre": "metres",
    "meter": "meters", "kilometre": "kilometres", "kilometer": "kilometers", "pound": "pounds", "kg/m3": "kg/m³",
    "USbbl": "US bbl", "oilbbl": "barrels", "impfloz": "imp fl oz", "USfloz": "US fl oz", "long ton": "long tons",
    "short ton": "short tons", "tonne": "tonnes", "lb-f": "lbf", "lbft": "lb·ft", "Nm": "N·m", "N.m": "N·m",
    **dict.fromkeys(("mi/h", "miles per hour"), "mph"), **{unit: unit for unit in re.split(r"\s+", """
    km mi m ft in cm mm nm μm µm yd dm ha kg g mg lbs st cwt L l ml mL cl hl GL ML km/h mph km/s m/s ft/s
    K R kW MW GW TW W hp PS bhp shp ihp kWh MWh GWh kJ MJ J cal kcal BTU N kN kPa MPa GPa hPa Pa bar mbar psi atm
    Hz kHz MHz GHz V A s min h ly pc AU gal pt qt bbl lbf gr ct Mg Gg kt Mt""".strip())},
})  # fmt: skip
"""Codes of `{{convert}}`, as they are shown. Others (`e6m3`, currencies, combined ones) are not known here."""

_RANGES: Mapping[str, str] = MappingProxyType({
    "-": "–", "–": "–", "to": " to ", "and": " and ", "or": " or ", "by": " by ", "x": " × ", "×": " × ", "*": " × ",
    "to(-)": " to ", "and(-)": " and ", "to about": " to about ", "+/-": " ± ", "±": " ± ", "+": " + ", "/": "/",
    ",": ", ", ", and": ", and ", ", or": ", or ", "xx": " × ",
})  # fmt: skip
_LONGEST_NUMBER = 40
_AMOUNT = re.compile(r"[-−+]?[\d,.\s/+⁄-]*\d[\d,.]*|\.\d+")
_MIXED = re.compile(r"(\d)\+(?=\d+/)")
_SHOWN = frozenset({"", "b", "br", "br()", "comma", "or", "semicolon", "slash", "sqbr", "x", "sup", "s"})
"""Ways of `{{convert}}` that show what is given, as it is given."""
_ONE: Mapping[str, str] = MappingProxyType({
    "feet": "foot", "inches": "inch", **{f"{unit}s": unit for unit in re.split(", ", (
        "acre, mile, yard, nautical mile, knot, long ton, short ton, tonne, hectare, metre, meter, kilometre, "
        "kilometer, pound, barrel, furlong, chain"
    ))},
})  # fmt: skip
"""Units that are words, and what one of them is called."""


def convert(call: Call) -> str | None:
    """The amount as given, not converted: `|5|to|10|km|mi` -> "5 to 10 km", `|6|ft|2|in|m` -> "6 ft 2 in"."""
    values = list(call.positions)
    is_shown = call.named.get("disp", "") in _SHOWN and call.named.get("order", "flip") == "flip"
    if not is_shown or not _is_amount(values[0]):
        return None
    given = values.pop(0)
    text = _mixed(given)
    while len(values) >= 2 and values[0] in _RANGES:
        if not _is_amount(values[1]):
            return None
        text += _RANGES[values[0]] + _mixed(values[1])
        given, values = "", values[2:]
    unit = UNITS.get(values[0]) if values else None
    if unit is None:
        return None
    is_adjective = call.named.get("adj", "off") != "off"
    is_word = unit in _ONE
    if is_adjective or re.fullmatch(r"[-−]?1|\d{1,4}/+\d{1,4}", given):
        unit = _ONE.get(unit, unit)
    text += ("-" if is_adjective and is_word else " ") + unit
    # "6 ft 2 in" is the amount as it is given, "5 km mi" is not.
    while (
        len(values) >= 3
        and _is_amount(values[1])
        and values[2] in ("in", "oz", "lb", "st", "yd", "ft", "furlong")
    ):  # fmt: skip
        text += f" {_mixed(values[1])} {values[2]}"
        values = values[2:]
    return text if len(values) <= 3 else None  # behind the unit: another one, and how far to round


def _is_amount(text: str) -> bool:
    # Short, for the expression tries every digit as the last.
    return len(text) <= _LONGEST_NUMBER and _AMOUNT.fullmatch(text) is not None


def _mixed(amount: str) -> str:
    """`3+1/2` -> "3 1/2"."""
    return _MIXED.sub(r"\1 ", amount).replace("//", "/")


def amount(call: Call) -> str | None:
    """`{{val|1.5|0.2|e=6|u=m/s}}` -> "1.5 ± 0.2 × 10^6 m/s"; `|10|-|20` -> "10–20"."""
    values = call.positions
    if not _is_amount(values[0]):
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
    unit = call.first_of("u", "ul")
    return " ".join(part for part in (call.named.get("p", ""), text, UNITS.get(unit, unit)) if part)


def fraction(call: Call) -> str:
    """`|1|2` -> "1/2", `|3|1|2` -> "3 1/2", `|2` -> "1/2"."""
    whole, *parts = call.positions
    if not parts:
        return f"{APART}1/{whole}"
    return f"{whole} {parts[0]}/{parts[1]}" if len(parts) == 2 else f"{APART}{whole}/{parts[0]}"


def ordinal(call: Call) -> str | None:
    number = call[1]
    if not re.fullmatch(r"[\d,]{0,20}[0-9]", number):
        return None
    teen = number[-2:] in ("11", "12", "13")
    return number + ("th" if teen else {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th"))


def _money(sign: str) -> Rule:
    return lambda call: sign + call[1] if call[1][:1].isdigit() else None


def _power_of_ten(call: Call) -> str | None:
    return f"×10^{call[1]}" if re.fullmatch(r"[-−+]?\d{1,6}", call[1]) else None


def _formula(call: Call) -> str | None:
    """Chemistry without charges: `{{chem|H|2|O}}` -> "H2O"."""
    text = "".join(call.positions)
    return text if re.fullmatch(r"[A-Za-z0-9]{1,40}", text) else None


# --- Dates ------------------------------------------------------------------------------------------------------------

_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_DAY = re.compile(r"(?P<d>\d{1,2}) (?P<m>[A-Z][a-z]{2,8}),? (?P<y>\d{1,4})")
_MONTH_DAY = re.compile(r"(?P<m>[A-Z][a-z]{2,8}) (?P<d>\d{1,2}),? (?P<y>\d{1,4})")
_ISO = re.compile(r"(?P<y>\d{4})-(?P<m>\d{1,2})-(?P<d>\d{1,2})")
_DAY_OF_MONTH = re.compile(r"\d{1,2} [A-Z][a-z]{2,8}|[A-Z][a-z]{2,8} \d{1,2},?")


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


def _dated(call: Call) -> str | None:
    """`{{birth date|1990|1|2}}` -> "January 2, 1990"; of all arguments the first three are the date."""
    return date(call.positions[:3], day_first=call.says("df"))


def _date(call: Call) -> str | None:
    """`{{date|2006-08-04|dmy}}` -> "4 August 2006"."""
    found = _DAY.fullmatch(call[1]) or _MONTH_DAY.fullmatch(call[1]) or _ISO.fullmatch(call[1])
    style = call[2].casefold() or "dmy"
    if found is None or style not in ("dmy", "mdy", "iso"):
        return None
    text = date((found["y"], found["m"], found["d"]), day_first=style == "dmy")
    if text is None or style != "iso":
        return text
    return f"{found['y']:0>4}-{_MONTHS.index(_month(found['m'].lstrip('0'))) + 1:02d}-{found['d']:0>2}"


def _sortable_date(call: Call) -> str | None:
    """`{{dts|2006|8|4}}` -> "August 4, 2006"."""
    style = call.named.get("format", "mdy")
    if style not in ("mdy", "dmy"):
        return None
    if len(call.positions) == 1 and (found := _ISO.fullmatch(call[1])):
        return date((found["y"], found["m"], found["d"]), day_first=style == "dmy")
    return date(call.positions, day_first=style == "dmy") if len(call.positions) == 3 else None


def _as_given(call: Call) -> str | None:
    """`{{start-date|7 December 1941}}`"""
    return call[1] if _DAY.fullmatch(call[1]) or _MONTH_DAY.fullmatch(call[1]) else None


def _old_style(form: str) -> Rule:
    """`{{OldStyleDate|2 February|1905|20 January}}` -> "2 February [O.S. 20 January] 1905"."""

    def rule(call: Call) -> str | None:
        known = _DAY_OF_MONTH.fullmatch(call[1]) and re.fullmatch(r"\d{3,4}", call[2]) and call[3][:1].isalnum()
        return form.format(*call.positions) if known else None

    return rule


def _as_of(call: Call) -> str | None:
    if call.first_of("alt"):
        return call.first_of("alt")
    when = date(call.positions, day_first=call.named.get("df", "").casefold() not in ("us", "mdy"))
    if when is None:
        return None
    start = "since" if call.says("since") else "as of"
    start = start if call.says("lc") else start.capitalize()
    return when if call.says("bare") else f"{start} {when}"


def _circa(call: Call) -> str:
    mark = "C." if call.says("cap") else "c."
    return " – ".join(f"{mark} {year}" for year in call.positions) or mark


def _marked(mark: str) -> Rule:
    """Years after a mark: `{{fl.|1900|1910}}` -> "fl. 1900–1910"."""

    def rule(call: Call) -> str:
        between = " – " if any(" " in year for year in call.positions) else "–"
        return " ".join([mark, between.join(call.positions)]).strip()

    return rule


# --- Words of other languages -----------------------------------------------------------------------------------------

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

ROMANIZED = "label lit translit italic italics links link size rtl script region variant cat nocat"
"""Of `{{langx}}`: what stands behind the word is left out."""


def foreign(call: Call) -> str | None:
    """`{{lang-fr|mot}}`, `{{langx|fr|mot}}`: the language's name, where it is known, and the word."""
    code, word = (call[1], call[2]) if call.name == "langx" else (call.name.removeprefix("lang-"), call[1])
    name = LANGUAGES.get(code, LANGUAGES.get(code.partition("-")[0], ""))
    label = call.named.get("label")
    if not word:
        return None
    return f"{label or name}: {word}" if name and label not in ("none", "no") else word


def _nihongo(call: Call) -> str | None:
    """English, Japanese, and romanised; the first in front, the others in brackets."""
    english, inside = call[1], [word for word in (call[2], call[3]) if word]
    if not english and len(inside) > 1:
        english = inside.pop()
    extra = call[4] or call.first_of("extra")
    inside += [extra] if extra else []
    return f"{english} ({', '.join(inside)})" if english and inside else english or ", ".join(inside) or None


def _literal(call: Call) -> str:
    return "lit. " + " or ".join(f"'{word}'" for word in call.positions)


# --- Other things -----------------------------------------------------------------------------------------------------

_SHIP_FORMS: Mapping[str, str] = MappingProxyType({"": "{0} {1}", "5": "{0} {1}", "6": "{1}"})


def _ship(call: Call) -> str | None:
    """`{{USS|Enterprise|CV-6}}` -> "USS Enterprise"; `{{ship|HMS|Victory}}` -> "HMS Victory"."""
    values = call.positions if call.name == "ship" else (call.name.upper(), *call.positions)
    prefix, name, _, form = (*values, "", "", "", "")[:4]
    known = _SHIP_FORMS.get(form)
    return known.format(prefix, name).strip() if known and name and len(values) <= 4 else None


def _ship_class(call: Call) -> str | None:
    return f"{call[1]}-class {call[2]}" if call[3] in ("", "0") else None


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
_KEY = re.compile(r"[A-Za-z0-9]|F\d{1,2}|Ctrl|Alt|Esc|Del")


def _keys(call: Call) -> str | None:
    """Keys that are shown by their names, not by a sign, as that of Enter."""
    return "+".join(call.positions) if all(map(_KEY.fullmatch, call.positions)) else None


def _sic(call: Call) -> str | None:
    return None if call[1] in ("?", "!") else joined(call)


def _country(call: Call) -> str | None:
    """`{{flag|France}}`; codes, and names that tell one country from another, are shown as other names."""
    return call[1] if re.fullmatch(r"[^\W\d_](?=.*[^\W\d_A-Z])[^()\d]*", call[1]) and call[1][0].isupper() else None


CONSTANTS: Mapping[str, str] = MappingProxyType({
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


LAYOUT: Mapping[str, str] = MappingProxyType({
    "\n\n": "paragraph break, pb, poem newline, clear, -, clr, div col, end div col, div col end, col-end",
    " ": "nbsp, sp, space, spaces, thin space, thinsp, hair space, hairsp, nnbsp, br, break, crlf, pipe space",
})  # fmt: skip


_STYLE = "size style class id title role lang"


RULES: Mapping[str, Rule] = MappingProxyType(table(
    (named_or("text", "content"), f"0-1 text content {_STYLE} color bg css", """
        nowraplinks, small, smaller, big, bigger, larger, large, midsize, em, strong
        bold, bolditalic, italic, italics, underline, var, mvar, mono, monospace, tt, kbd, samp
        not a typo, typo, as written, proper name, awrap, noitalic
        no italic, normal, nonitalic, nobold, smallcaps, sc, sc1, sc2, aut, allcaps
        notatypo, math, tq, center, centre, font, polytonic
        blue, red, green, strikethrough, unicode, nastaliq
        script/arabic, script/hebrew, hebrew"""),
    (pick(1), f"1-2 {_STYLE} IPA", "code, abbr, tooltip, abbrv, ruby, highlight"),
    (named_or("text"), "0-9 text", "vanchor, visible anchor"),
    (pick(2), "2", "script, rtl-lang, plainlink, font size"),
    (pick(2), "2 help", "audio"),
    (pick(2), "2 link dotted", "hover title"),
    (last, "2", "color, colour"),
    (last, "2-3 link", "font color, fontcolor"),
    (pick(3, 2), "2-3 italic i", "wikt-lang, wiktlang"),
    (last, "1-2", "resize"),
    (last, "2-3 italic i", "transl, transliteration, translit"),
    (joined, "1-9", "gaps, linktext"),
    (_formula, "1-20", "chem, chem2, ce"),
    (_keys, "1-5", "key press, keypress"),
    (raised, "1", "sup"),
    (lowered, "1", "sub"),
    (quote, QUOTE, """
        quote, blockquote, cquote, quotation, bquote, block quote, quote text, poemquote, poem quote, bq"""),
    (quote, f"0-1 text {_STYLE} em left right", "blockindent, block indent"),
    (_nihongo, "1-4? extra", "nihongo"),
    (pick(1), "1", "nihongo2"),
    (convert, "2-12 abbr adj disp order sp lk sigfig round comma frac sortable", "convert, cvt"),
    (amount, "1-3 e u ul p fmt", "val"),
    (fraction, "1-3", "frac, fraction, sfrac"),
    (ordinal, "1 sup sups", "ordinal, ord"),
    (lambda call: grouped(call[1], ",", "."), "1", "nts"),
    (_circa, "0-2 cap lk sortable", "circa, c., ca, ca."),
    (_marked("fl."), "0-2 lk", "floruit, fl."),
    (_marked("r."), "0-2 lk", "reign, r."),
    (_marked("b."), "0-1 lk", "b."),
    (_marked("d."), "0-1 lk", "d."),
    (_as_of, "0-3 alt since lc df bare", "as of, asof"),
    (_dated, "1-3 df mf", "birth date, death date, start date, end date"),
    (_dated, "1-3 df mf p paren br", "birth date and age, start date and age, bda"),
    (_dated, "6 df mf", "death date and age"),
    (_dated, "1 df mf", "birth year and age"),
    (_as_given, "1 df mf", "birth-date, death-date, start-date, end-date"),
    (_date, "1-2", "date"),
    (_sortable_date, "1-3 format link", "dts"),
    (_old_style("{0} [O.S. {2}] {1}"), "3", "oldstyledate"),
    (_old_style("{0} {1} [O.S. {2}]"), "3", "oldstyledatedy"),
    (lambda call: LANGUAGES.get(call[1]), "1", "ISO 639 name"),
    (_ship, "1-4?", "ship, USS, HMS, SS, HMAS, HMCS, RMS, MS, MV, SMS, USNS, INS, GTS"),
    (_ship_class, "2-3", "sclass, sclass2, sclass-"),
    (_money("US$"), "1 link", "USD, US$, US dollar"),
    (_money("£"), "1 link", "GBP, £, pound sterling"),
    (_money("€"), "1 link", "EUR, €"),
    (_money("₹"), "1 link", "INR, indian rupees"),
    (_money("¥"), "1 link", "¥, yen"),
    (wrapped("⟨", "⟩"), "1", "angbr, angle brackets, angle bracket, angbr IPA"),
    (wrapped("'", "'"), "1", "gloss"),
    (_literal, "1-3", "lit, lit., literally, literal translation"),
    (wrapped("née ", ""), "1", "née, nee"),
    (wrapped("|", "|"), "1", "abs"),
    (wrapped("p. ", ""), "1", "p."),
    (wrapped("√", ""), "1", "radic, sqrt"),
    (lambda call: call.first_of("lt", "display") or call[1], "1-9 lt display preserve reasonator WD s short nobold",
        "ill, interlanguage link, interlanguage link multi"),
    (_power_of_ten, "1", "e"),
    (_verse, "2-5?", "bibleverse, bibleref, bibleref2, bibleverse-lb, bible verse"),
    (lambda call: _MUSIC.get(call[1].casefold()), "1", "music"),
    (_sic, "1-2 hide nolink reason", "sic"),
    (_country, "1-2 size variant", "flag, flagcountry, flagu"),
    (foreign, f"2-4 {ROMANIZED}", "langx"),
))  # fmt: skip
