"""`clean_page`: every rule on a few words of wikitext."""

from __future__ import annotations

import pytest

from tools.corpus.extract.wikitext import clean_page

# Typographic signs are what some rules are about.
# ruff: noqa: RUF001


def cleaned(wikitext: str, title: str = "Title") -> str:
    text = clean_page(wikitext, title)
    assert text is not None
    return text


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        # links
        ("The [[bus]]es of [[Paris, Texas|Paris]] ran.", "The buses of Paris ran."),
        ("On [[Star Wars: Episode I|the film]], [[Mars#Moons|moons]].", "On the film, moons."),
        ("See [[:Category:Books]] and [[:File:A.png|the map]].", "See Category:Books and the map."),
        ("A [[wikt:word]] and [[w:Rome|Rome]].", "A word and Rome."),
        ("One.[[Category:Ones]][[fr:Un]]\n[[Kategorie:Eins|1]][[zh-min-nan:It]]", "One."),
        ("[[File:a.jpg|thumb|left|A [[dog]] of {{lang|de|[[Hund]]}}.]]The dog sat.", "The dog sat."),
        ("[[Datei:a.jpg|mini|Ein [[Hund]]\nsitzt]]Der Hund sitzt.", "Der Hund sitzt."),
        ("[[Unknown:a.jpg|thumb|A caption]] here.", "A caption here."),
        ("A [[link|with [[another]] inside]].", "A with another inside."),
        ("A [[link|that\nruns on]] here.", "A that runs on here."),
        ("See [http://a.org the [first] page], [http://b.org], [//c.org c].", "See the [first] page, c."),
        # references, comments, tags
        ("One.<ref>{{cite|a}} [[b]]</ref> Two.<ref name=a/> Three.<ref name=\"x y\" />", "One. Two. Three."),
        ("One<REF>a</REF >, two<ref>b {{c<ref>}}</ref>.", "One, two."),
        ("One<!-- {{ [[ <ref> -->, two.<!-- never closed", "One, two."),
        ("A <b>bold</b> <span style=\"color:red\">red</span><br/>word.", "A bold red word."),
        ("H<sub>2</sub>O, m<sup>2</sup>, 10<sup>−6</sup>, 19<sup>th</sup>.", "H2O, m², 10⁻⁶, 19th."),
        ("Use <nowiki>[[x]] ''y'' &lt;</nowiki> here.", "Use [[x]] ''y'' < here."),
        ("Call <code>f(x)</code> or <syntaxhighlight lang=c inline>a[[1]]</syntaxhighlight>.", "Call f(x) or a[[1]]."),
        ("One.\n<syntaxhighlight lang=c>\nint x;\n</syntaxhighlight>\nTwo.", "One.\n\nTwo."),
        ("Mass <math>m</math> and <math>\\frac{1}{2}</math>, or so.", "Mass m and, or so."),
        ("<gallery>\nFile:A.jpg|A cat\n</gallery>One.<div>Two.</div>Three.", "One.\n\nTwo.\n\nThree."),
        ("A < b, a<b and <references/> c > d.", "A < b, a<b and c > d."),
        ("__NOTOC__\nOne. __FORCETOC__", "One."),
        # tables
        ("One.\n{| class=x\n! a\n|-\n| b || [[c]]\n|}\nTwo.", "One.\n\nTwo."),
        ("One.\n:{|\n| a\n{|\n| {{b|\n|}}\n|}\n|}\nTwo.", "One.\n\nTwo."),
        ("One.\n<table><tr><td>a\n\nb</td></tr></table>\nTwo.", "One.\n\nTwo."),
        ("{{Infobox|a=\n{|\n| b\n|}\n}}\nOne.", "One."),
        ("{| class=wikitable\n! head\n| cell\nOne is never closed.", "One is never closed."),
        # bold, italic
        ("'''Bold''', ''italic'', '''''both'''''.", "Bold, italic, both."),
        ("L''''amour''' is ''love", "L'amour is love"),
        ("Of l'''amour'' so.", "Of l'amour so."),
        # entities and spaces
        ("AT&amp;T&nbsp;&ndash; R&D&#8217;s &copy, &bogus; 5&thinsp;km\u200b.", "AT&T – R&D’s &copy, &bogus; 5 km."),
        ("so  it\tis\r\nd .", "so it is d."),
        ("&#99999999999999999999; and &#x110000; stay.", "&#99999999999999999999; and � stay."),
    ],
)  # fmt: skip
def test_markup(wikitext: str, text: str) -> None:
    assert cleaned(wikitext) == text


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("Born{{cn|date={{x}}}} {{small|in}} Rome.", "Born in Rome."),
        ("{{nowrap|5&nbsp;km}} of {{ nowrap | [[a|road]] }}", "5 km of road"),
        ("{{lang|fr|''mot''}}, {{lang-fr|mot}}, {{langx|de|Wort}}, {{lang-xx|x}}", "mot, French: mot, German: Wort, x"),
        ("Is {{transl|ru|ISO|slovo}}.", "Is slovo."),
        ("A {{nihongo|word|言葉|kotoba}}.", "A word (言葉, kotoba)."),
        ("{{nihongo||言葉|kotoba}} means word.", "kotoba (言葉) means word."),
        ("{{convert|5|km|mi}}, {{convert|5|to|10|sqmi}}, {{cvt|6|ft|2|in|m}}", "5 km, 5 to 10 sq mi, 6 ft 2 in"),
        ("At {{convert|-5|C|F|abbr=on}} and {{convert|2|x|3|m|0}}.", "At -5 °C and 2 × 3 m."),
        ("{{As of|2010|5}}, {{as of|2011|lc=y}}.", "As of May 2010, as of 2011."),
        ("{{as of|2012|5|1|df=y}}, {{as of|2012|13|x}}.", "As of 1 May 2012, As of 13 x, 2012."),
        ("Half {{frac|1|2}}, {{frac|3|1|2}}, {{sfrac|4}}.", "Half 1/2, 3 1/2, 1/4."),
        ("From {{circa|1900}} ({{fl.|1900|1910}}).", "From c. 1900 (fl. 1900–1910)."),
        ("The {{ordinal|21}}, {{ordinal|112}}.", "The 21st, 112th."),
        ("Is {{val|1.5|0.2|e=6|u=m/s}}.", "Is 1.5 ± 0.2 × 10^6 m/s."),
        ("On {{birth date|1990|1|2}}, {{start date|1990|1|2|df=yes}}.", "On January 2, 1990, 2 January 1990."),
        ("1900{{ndash}}1910{{snd}}it{{'s}} {{=}} {{!}}.", "1900–1910 – it's =."),
        ("{{USS|Enterprise|CV-6}}, {{sclass|Nimitz|carrier}}, {{GBP|5}}.", "USS Enterprise, Nimitz-class carrier, £5."),
        ("{{formatnum:12345}} of {{PAGENAME}}.", "12345 of Title."),
        ("He:{{quote|text=One.\n\nTwo {{ndash}} [[three]].|author=A}}So.", "He:\n\nOne.\n\nTwo – three.\n\nSo."),
        ("{{ill|Rome|it|Roma}}, {{ill|A|de|B|lt=C}} {{abbr|no.|number}} 1.", "Rome, C no. 1."),
        ("{{nowrap|1=so=so}} {{nowrap|{{cn}}c}} {{{arg|d}}}.", "so=so c d."),
        ("{{unknown|a\n|b=[[c]]\n|{{d}}}}One.", "One."),
        ("{{lang|fr}} is left.", "is left."),
    ],
)  # fmt: skip
def test_templates(wikitext: str, text: str) -> None:
    assert cleaned(wikitext) == text


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("Angola ({{IPAc-en|a}}; {{x}}), officially (pronounced {{IPA|b}}) so.", "Angola, officially so."),
        ("Oslo ({{IPA|a}}, born 1900) is ( in {{x}} ) it.", "Oslo (born 1900) is it."),
        ("So ({{x}}; {{y}}; b; {{z}}) c.", "So (b) c."),
        ("So (({{x}})) b [{{y}}], “{{z}}” c .", "So b, c."),
        ("One {{x}}, {{y}}, two {{z}}.", "One, two."),
        ("A (!) and f(x) in .NET, a (-) and 1 .5 stay.", "A (!) and f(x) in .NET, a (-) and 1 .5 stay."),
        ("{{x}}, one is.", "one is."),
    ],
)
def test_gaps_are_closed(wikitext: str, text: str) -> None:
    assert cleaned(wikitext) == text


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("One\ntwo.\n\nThree.\n\n\n\n12 + 3\n\nFour.", "One two.\n\nThree.\n\nFour."),
        ("One.\n== Head ==\nTwo.\n===Sub=== \nThree.\n----\nFour.", "One.\n\nTwo.\n\nThree.\n\nFour."),
        ("One.\n==See also==\n* A.\n=== Sub ===\nTwo.\n==Rest==\nThree.", "One.\n\nThree."),
        ("== Culture ==\n=== Notes ===\nOf music.\n== '''Notes''' ==\nOf none.", "Of music."),
        ("== Einzelnachweise ==\nEins.\n== ссылки ==\nОдин.", ""),
        ("Of\n* tin\n* It is of iron.\n# Is it so, too?\n** No.\nEnd", "Of\n\nIt is of iron.\n\nIs it so, too?\n\nEnd"),
        ("* 東京は日本の首都である。\n* 東京", "東京は日本の首都である。"),
        ("One.\n:'''Art. 1.''' Law is law.\n; Term\n: It is a word.", "One.\n\nArt. 1. Law is law.\n\nIt is a word."),
        ("<ul><li>This is one good item.</li><li>two</li></ul>", "This is one good item."),
        ("{{never closed\n| a = b\n| c\nThe article begins.", "The article begins."),
        ("A [[never closed one. Then {{ another.", "A never closed one. Then"),
        ("A closed}} one, a]] two, |} three.", "A closed one, a two, three."),
        ("{{a|[[b}} so [[d]] e.", "so d e."),
    ],
)  # fmt: skip
def test_lines_and_sections(wikitext: str, text: str) -> None:
    assert cleaned(wikitext) == text


@pytest.mark.parametrize(
    ("wikitext", "title"),
    [
        ("It may be:\n* [[A]]\n{{disambiguation}}", "It"),
        ("It may be:\n* [[A]]\n{{Disambig|geo}}", "It"),
        ("{{hndis|Smith, John}}", "It"),
        ("{{Geodis}}", "It"),
        ("{{Template:Station_disambiguation}}", "It"),
        ("{{Begriffsklärung}}", "It"),
        ("{{неоднозначность}}", "It"),
        ("Text.", "It (disambiguation)"),
        ("Text.", "Es (Begriffsklärung)"),
    ],
)
def test_disambiguations_are_none(wikitext: str, title: str) -> None:
    assert clean_page(wikitext, title) is None


@pytest.mark.parametrize(
    ("wikitext", "title"),
    [
        ("It is.<nowiki>{{disambiguation}}</nowiki>", "It (film)"),
        ("It is.<!--{{disambiguation}}-->", "disambiguation"),
        ("{{other uses|It (disambiguation)}}It is.", "It"),
        ("{{disambiguation needed}}It is.", "It"),
        ("{{surname}}It is a name.", "It"),
    ],
)
def test_articles_are_not(wikitext: str, title: str) -> None:
    assert cleaned(wikitext, title).startswith("It is")


def test_a_page_without_prose_is_empty() -> None:
    assert cleaned("") == ""
    assert cleaned("{{Infobox}}\n[[Category:A]]\n* b") == ""
