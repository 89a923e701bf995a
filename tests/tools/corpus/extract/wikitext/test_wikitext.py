"""`clean_page`: every rule on a few words of wikitext."""

from __future__ import annotations

from collections import Counter

import pytest

from tools.corpus.extract.read_context import Site, keep_commonest, parse_site
from tools.corpus.extract.wikitext import ENGLISH, clean_page, is_redirect, namespaces_of

# Typographic signs, and letters of other scripts, are what some rules are about.
# ruff: noqa: RUF001


def cleaned(wikitext: str, title: str = "Title", site: Site = ENGLISH) -> str:
    text = clean_page(wikitext, title, site)
    assert text is not None
    return text


def read_in(language: str, wikitext: str) -> str:
    return cleaned(wikitext, site=Site(language=language))


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        # links
        ("The [[bus]]es of [[Paris, Texas|Paris]] ran.", "The buses of Paris ran."),
        ("On [[Star Wars: Episode I|the film]], [[Mars#Moons|moons]].", "On the film, moons."),
        ("See [[:Category:Books]] and [[:File:A.png|the map]].", "See Category:Books and the map."),
        ("A [[wikt:word]] and [[w:Rome|Rome]].", "A word and Rome."),
        ("One.[[Category:Ones]][[fr:Un]]\n[[Kategorie:Eins|1]][[zh-min-nan:It]][[be-x-old:A]]", "One."),
        ("Of <section begin=a />one<section end=a/> part.", "Of one part."),
        ("The poem [[s:fr:Titre]] and [[:fr:Lyon]].", "The poem Titre and fr:Lyon."),
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
        ("&#99999999999999999999; and &#x110000; stay.", "&#99999999999999999999; and stay."),
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
        ("{{as of|2012|5|1|df=y}}, {{as of|2012|13|x}}.", "As of 1 May 2012,."),
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
        ("ঢাকা {{x}}। नगर {{x}}॥ مدينة {{x}}، و۔ 城 {{x}}。", "ঢাকা। नगर॥ مدينة، و۔ 城。"),
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
        ("ក្រុង។\n* ဒါက ပထမ ဝါကျ ဖြစ်သည်။\n* នេះជាប្រយោគ។\n* مثلا ایک شہر کا۔",
            "ក្រុង។\n\nဒါက ပထမ ဝါကျ ဖြစ်သည်။\n\nនេះជាប្រយោគ។\n\nمثلا ایک شہر کا۔"),
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


BENGALI = Site(language="bn", namespaces=((6, "চিত্র"), (14, "বিষয়শ্রেণী"), (4, "উইকিপিডিয়া"), (10, "টেমপ্লেট"), (0, "")))
AMHARIC = Site(language="am", namespaces=((6, "ስዕል"), (14, "መደብ")))
GEORGIAN = Site(language="ka", namespaces=((6, "ფაილი"), (14, "კატეგორია")))
GERMAN = Site(language="de", namespaces=((6, "Datei"), (6, "Datei_alt")))


@pytest.mark.parametrize(
    ("site", "wikitext", "text"),
    [
        (BENGALI, "[[চিত্র:Foo.jpg|thumb|right|ক [[ঢাকা]] ও [[গঙ্গা|নদী]]]]ঢাকা শহর।[[বিষয়শ্রেণী:ঢাকা]]", "ঢাকা শহর।"),
        (BENGALI, "[[File:A.jpg|thumb|x]][[Image:b.png]][[category:C]]ঢাকা শহর।", "ঢাকা শহর।"),
        (BENGALI, "[[ চিত্র :Foo.jpg|right]][[চিত্র_:Foo.jpg]][[\u200eচিত্র:Foo.jpg|right]]ঢাকা শহর।", "ঢাকা শহর।"),
        (BENGALI, "ঢাকা [[:চিত্র:Foo.jpg]] ও [[:বিষয়শ্রেণী:ঢাকা|ঢাকা]]।", "ঢাকা চিত্র:Foo.jpg ও ঢাকা।"),
        (BENGALI, "ঢাকা [[উইকিপিডিয়া:নীতি|নীতি]] {{টেমপ্লেট:nowrap|শহর}}।", "ঢাকা নীতি শহর।"),
        (BENGALI, "ঢাকা [[Datei:x.jpg|শহর]]।", "ঢাকা শহর।"),  # of no German wiki
        (AMHARIC, "[[ስዕል:A.jpg|thumb|200px]]ከተማ ነው።[[መደብ:ከተማ]]", "ከተማ ነው።"),
        (Site(language="my", namespaces=((6, "ဖိုင်"),)), "[[ဖိုင်:A.jpg|left|x]]မြို့ ဖြစ်သည်။", "မြို့ ဖြစ်သည်။"),
        (GEORGIAN, "[[ფაილი:a|მინი]]ქალაქი.[[კატეგორია:ა]]", "ქალაქი."),
        (GERMAN, "[[DATEI:a|b]][[Bild:a|b]][[Datei alt:c]]Ein Ort.", "Ein Ort."),
        (Site(language="el", namespaces=((6, "Αρχείο"),)), "[[ΑΡΧΕΊΟ:a|b]][[Εικόνα:a|b]]Μια πόλη.", "Μια πόλη."),
        (Site(language="xx", namespaces=((100, "tip"),)), "A [[tip:of a day]] here.[[fr:Un]]", "A tip:of a day here."),
        (Site(), "[[Datei:a|b]][[চিত্র:a|b]] One.", "b One."),  # no siteinfo: what is known here
        (Site(language="tr", namespaces=((6, "İmge"),)), "[[imge:a|b]][[İMGE:a|b]]Bir şehir.", "Bir şehir."),
        # Names of before the one that the dump lists, in languages of their own and of those that fall back to Russian.
        (Site(language="az", namespaces=((6, "Fayl"),)), "[[Şəkil:A.jpg|thumb|x]]Bakı şəhərdir.", "Bakı şəhərdir."),
        (Site(language="te", namespaces=((6, "దస్త్రం"),)), "[[బొమ్మ:A.jpg|thumb|x]]ఇది నగరం.", "ఇది నగరం."),
        (Site(language="ka", namespaces=((6, "ფაილი"),)), "[[სურათი:A.jpg|მინი|x]]ქალაქი.", "ქალაქი."),
        (Site(language="tt", namespaces=((6, "Файл"),)), "[[Изображение:A.jpg|x]]Бу шәһәр.", "Бу шәһәр."),
        (Site(language="be-tarask", namespaces=((6, "Файл"),)), "[[Выява:A.jpg|x]]Гэта горад.", "Гэта горад."),
        (ENGLISH, "Hear [[Media:a.ogg|the song]] so.[[Media:a.ogg]]", "Hear the song so."),
        (ENGLISH, "In [[w:Rome|Rome]] and [[commons:Rome]], [[:fr:Rome|Rome]].", "In Rome and Rome, Rome."),
    ],
)  # fmt: skip
def test_kind_3_namespaces_are_those_of_the_dump(site: Site, wikitext: str, text: str) -> None:
    assert cleaned(wikitext, site=site) == text


def test_kind_3_a_dump_says_what_its_wiki_is() -> None:
    head = (
        '<mediawiki xmlns="http://x" xml:lang="bn">\n<siteinfo><sitename>উইকি</sitename><dbname>bnwiki</dbname>'
        "<base>https://bn.wikipedia.org/wiki/A</base><case>first-letter</case><namespaces>"
        '<namespace key="-2" case="first-letter">মিডিয়া</namespace><namespace key="0" case="first-letter" />'
        '<namespace key="6" case="case-sensitive">চিত্র</namespace></namespaces>'
        '<namespacealiases><ns id="6">ছবি</ns></namespacealiases></siteinfo>'
    )
    names = ((-2, "মিডিয়া"), (6, "চিত্র"), (6, "ছবি"))
    assert parse_site(head) == Site(language="bn", namespaces=names, wikipedia=True)
    assert parse_site("<siteinfo><dbname>zh_yuewiki</dbname></siteinfo>").language == "zh-yue"
    assert parse_site("<siteinfo><base>https://ru.wikipedia.org/</base></siteinfo>").language == "ru"
    assert not parse_site("<siteinfo><dbname>enwiktionary</dbname></siteinfo>").wikipedia
    assert not parse_site("<siteinfo><base>https://x.example/wiki</base></siteinfo>").wikipedia
    for broken in ("", "<siteinfo>", "<siteinfo><a></siteinfo>", "<mediawiki><siteinfo/>"):
        assert parse_site(broken) == Site()
    assert namespaces_of(parse_site(head)).number("ছবি:A.jpg") == 6
    assert namespaces_of(parse_site(head)).number("ঢাকা: শহর") == 0


@pytest.mark.parametrize(
    ("text", "redirects"),
    [
        ("#REDIRECT [[A]]", True),
        (" #redirect: [[A]] {{R from move}}", True),
        ("#পুনর্নির্দেশ [[ঢাকা]]", True),
        ("#WEITERLEITUNG [[A]]\n[[Kategorie:B]]", True),
        ("#перенаправление [[А]]", True),
        ("#تغییر_مسیر [[آ]]", True),
        ("#重定向[[甲]]\n{{简繁重定向}}", True),
        ("#ទៅ [[ក]]\n\n[[Category:A]] __NOINDEX__", True),  # by its shape
        ("#See [[A]]\n\nIt is an article.", False),
        ("# [[A]]\n# [[B]]", False),
        ("#1 [[A]] is first.", False),
        ("A #REDIRECT [[A]]", False),
    ],
)
def test_redirects_are_known_in_any_language(text: str, redirects: bool) -> None:
    assert is_redirect(text) == redirects


@pytest.mark.parametrize(
    ("language", "wikitext", "text"),
    [
        ("en", "On {{OldStyleDate|2 February|1905|20 January}} so.", "On 2 February [O.S. 20 January] 1905 so."),
        ("en", "On {{OldStyleDateDY|9 January|1905|28 December 1904}}.", "On 9 January 1905 [O.S. 28 December 1904]."),
        ("en", "On {{date|2006-08-04|dmy}}, {{date|4 August 2006|mdy}}.", "On 4 August 2006, August 4, 2006."),
        ("en", "On {{date|4 August|none}} it {{dts|2006|8|4}}.", "On it August 4, 2006."),
        ("en", "Is 10{{sup|13}}, x{{sup|a}}.", "Is 10¹³, xa."),
        ("en", "At {{convert|5|e6m3|abbr=on}} or {{convert|x|km}}, {{convert|3+1/2|in}}.", "At or, 3 1/2 in."),
        ("en", "At {{convert|5|km|mi|disp=out}} is {{convert|9|to|x|km}}.", "At is."),
        ("en", "Of {{val|10|-|20|u=km}}, {{val|1.5|+0.2|-0.1}}, {{val|1.234|(5)}}.", "Of 10–20 km, 1.234(5)."),
        ("en", "See {{bibleverse|Genesis|1:1|KJV}}, {{bibleverse|1|Samuel|2:3}}.", "See Genesis 1:1, 1 Samuel 2:3."),
        ("en", "In {{flag|FRA}} and {{flag|France}}; {{deg|45}}, {{deg}}.", "In and France; °."),
        ("en", "A {{ill|Rome|it|Roma|preserve=1}} {{hover title|note|word}}.", "A Rome word."),
        ("en", "In {{chem|SO|4|2-}} and {{chem|H|2|O}}; {{ISO 639 name|fr}}.", "In and H2O; French."),
        ("en", "Two {{INS|Vikrant}} {{ins|word}} {{as of|2012|5|1}}.", "Two INS Vikrant As of 1 May 2012."),
        ("en", "He {{lc:ABC}} {{ucfirst:abc}} {{native phrase|fr|mot}}.", "He abc Abc."),
        ("fr", "Le {{Date|1|janvier|2017}} et {{date|14|juillet|1789}}.", "Le 1er janvier 2017 et 14 juillet 1789."),
        ("fr", "De {{unité|2000|m}}, {{unité|12000.5|km/h}}, {{unité|10|m|2}}.", "De 2 000 m, 12 000,5 km/h,."),
        ("fr", "Au {{s|XIX|e}}, {{XXe siècle}}, 2{{e}} {{date|2006-08-04|dmy}}.", "Au XIXe siècle, XXe siècle, 2e."),
        ("fr", "Le {{convert|5|km|mi}} {{as of|2010}} {{lang|en|word}}.", "Le word."),
        ("ru", "Город {{lang-fr|Paris}} ({{lang-en|Rome|Рим}}) {{iw|Дом|дома|en|House}}.", "Город фр. Paris дома."),
        ("ru", "Дата {{OldStyleDate|2 февраля|1905|20 января}}.", "Дата."),
        ("uk", "Місто {{lang-fr|Paris}}.", "Місто."),
        ("de", "Ort ({{enS|town}}) {{lang-fr|mot}} {{lang|fr|mot}} {{convert|5|km}}.", "Ort (englisch town) mot."),
        ("de", "Am {{birth date|1990|1|2}} {{frac|1|2}} {{formatnum:1234}} {{formatnum:1.5}}.", "Am 1234."),
        ("es", "El {{siglo|XIX||s}} y {{esd|10 km}} de {{unidad|12000|m}}.", "El siglo XIX y 10 km de 12 000 m."),
        ("ja", "これは{{読み仮名|漢字|かんじ}}と{{仮リンク|家|en|House|label=家屋}}。", "これは漢字（かんじ）と家屋。"),
        ("zh", "這是{{le|房屋|House|屋}}和{{tsl|en|House|房屋}}。", "這是屋和房屋。"),
        ("bn", "এটি {{lang-en|Dhaka}} {{convert|5|km}} {{formatnum:123}} {{nowrap|শহর}}।", "এটি শহর।"),
        ("", "Of {{convert|5|km|mi}}, {{nowrap|a word}} {{formatnum:5}}.", "Of, a word."),
    ],
)  # fmt: skip
def test_kind_4_a_template_is_the_right_text_or_a_hole(language: str, wikitext: str, text: str) -> None:
    assert read_in(language, wikitext) == text


@pytest.mark.parametrize(
    ("language", "wikitext", "text"),
    [
        # positions: too few, too many, none, an empty one
        ("en", "{{USD|5|2010}} {{ordinal|2|d}} {{nowrap|a|b}} {{color|red}} {{langx|fr}} {{birth date|1990|}} so.",
            "1990 so."),
        ("en", "{{not a typo|a|b}} {{nowrap|}} {{music|time|3|4}} {{start date|2000|1|2|10|30}} {{frac|1||2}} so.",
            "so."),
        ("en", "{{convert|5|km|mi|2|x|y}} {{lit|a||b}} {{circa|1|2|3}} {{OldStyleDate|2 May|1905|}} {{flag}} so.",
            "so."),
        ("fr", "{{unité|10|m|2}} {{s|XIX|e|av. J.-C.}} {{citation|mot|auteur}} {{date|32|mai|2017}} {{heure}} un.",
            "un."),
        ("de", "{{enS|town|Stadt}} {{\"|Wort|Autor}} {{enS}} {{lang|fr|mot|x}} Ort.", "Ort."),
        ("ru", "{{lang-en|word|перевод}} {{iw}} {{lang-fr|}} Он.", "Он."),
        ("es", "{{siglo|XIX|a|s}} {{esd|a|b}} {{unidad|1|2|m}} {{siglo}} Es.", "Es."),
        ("ja", "{{読み仮名|漢字}} {{読み仮名|漢字|かんじ|他}} {{仮リンク|家}} {{ルビ|字}} です。", "です。"),
        ("zh", "{{le|房屋}} {{tsl|en|House}} {{lang-en|x}} 文字。", "文字。"),
        ("it", "{{TA|a|b}} {{TA}} {{citazione}} Uno.", "Uno."),
        ("pt", "{{quote}} {{lang|en}} {{nowrap|a|b|c}} Um.", "Um."),
        # names
        ("en", "{{nowrap|a|foo=b}} {{convert|5|km|spell=in}} {{USD|5|round=y}} {{flag|France|name=Gaul}} so.", "so."),
        ("en", "{{convert|5|km|disp=unit}} {{frac|1|2|x=y}} {{as of|2010|url=x}} {{nowrap|a|foo=}} so.", "a so."),
        ("fr", "{{unité|10|à=20|m}} {{lang|en|word|trad=mot}} {{date|1|mai|2017|x=y}} un.", "un."),
        # templates in templates
        ("en", "{{frac|1|{{x}}}} {{nihongo|{{x}}|言葉|kotoba}} {{circa|{{x}}}} {{as of|2010|{{x}}}} so.", "so."),
        ("en", "{{frac|1|{{convert|x|km}}}} {{small|{{nowrap|{{x}}}}}} {{nowrap|5{{x}} {{frac|1|2}}}} so.",
            "5 1/2 so."),
        ("ru", "{{iw|{{x}}|дома}} {{nowrap|{{lang-en|{{x}}}}}} Он.", "Он."),
        ("en", "{{quote\n| text = One {{x}}two.\n| author = {{x}}\n}}\nThree {{nowrap\n|four\n}}.",
            "One two.\n\nThree four."),
        # values
        ("en", "{{key press|Left}} {{key press|Ctrl|C}} {{flag|USSR}} {{flag|Georgia (country)}} so.", "Ctrl+C so."),
        ("en", "{{convert|1|mile}}, {{convert|1/2|acre}}, {{convert|3|knot}}, a {{convert|5|mile|adj=on}} run.",
            "1 mile, 1/2 acre, 3 knots, a 5-mile run."),
        ("en", "{{OldStyleDate|x|1905|y}} {{val|1e6}} {{convert|1e6|km}} {{date|x}} {{sic|?}} so.", "so."),
        ("fr", "{{unité|0,123456|m}} {{s|I|e}} {{heure|8|5}} {{date|1|May|2017}} {{lien|A|en|B|le c}} un.", "le c un."),
    ],
)  # fmt: skip
def test_kind_4_calls_of_another_signature_are_holes(language: str, wikitext: str, text: str) -> None:
    assert read_in(language, wikitext) == text


@pytest.mark.parametrize(
    ("language", "wikitext", "text"),
    [
        # what is raised
        ("en", "Is 10<sup>&minus;3</sup>, 10<sup style='x'>13</sup>, 10<sup>–3</sup>.", "Is 10⁻³, 10¹³, 10⁻³."),
        ("en", "Is 10<sup>'''13'''</sup>, 10<sup>[[13|13]]</sup>, 10{{sup|&minus;3}}.", "Is 10¹³, 10¹³, 10⁻³."),
        ("en", "Is 10<sup>1.5</sup>, x<sup>1/2</sup>, 10{{sup|1/2}}.", "Is 10^1.5, x^(1/2), 10^(1/2)."),
        ("en", "Is 2<sup>''k''</sup>, ''e''<sup>−''x''</sup>, 2<sup>2<sup>3</sup></sup>.", "Is 2^k, e^−x, 2^(2³)."),
        (
            "en",
            "The 19<sup>th</sup>, n<sup>o</sup>, ''n''<sup>''th''</sup>, a<sup>[1]</sup>.",
            "The 19th, no, nth, a[1].",
        ),
        ("en", "Is SO<sub>4</sub><sup>2&minus;</sup>, Na<sup>+</sup>, W<sup>±</sup>.", "Is SO₄²⁻, Na⁺, W±."),
        ("fr", "Soit 10{{exp|13}}, CO{{ind|2}} et 101{{ind|2}} ici.", "Soit 10¹³, CO2 et 101₂ ici."),
        # what is lowered
        ("en", "Is 101<sub>2</sub>, (101)<sub>2</sub>, log<sub>2</sub>8, 10{{sub|2}}.", "Is 101₂, (101)₂, log₂8, 10₂."),
        ("en", "Is H<sub>2</sub>O, H{{sub|2}}O, <sup>238</sup><sub>92</sub>U.", "Is H2O, H2O, ²³⁸₉₂U."),
        # fractions
        ("en", "Is 5{{frac|1|2}}, {{frac|1|2}}, 5<sup>3</sup>/<sub>4</sub>.", "Is 5 1/2, 1/2, 5 3/4."),
        ("en", "Is 5<sup>3</sup>&frasl;<sub>4</sub> and 5{{nowrap|{{frac|1|2}}}}.", "Is 5 3/4 and 5 1/2."),
        # what is left out between two numbers or words
        ("en", "In 1990{{bis}}1995, 2<math>\\cdot</math>3, word<ref>a</ref>word.", "In 1990 1995, 2 3, word word."),
        ("en", "In {{nowrap|1990{{bis}}1995}} and [[A|19{{bis}}20]].", "In 1990 1995 and 19 20."),
        ("zh", "东{{unbekannt}}京是大城市。", "东京是大城市。"),
    ],
)
def test_kind_4_numbers_beside_each_other_become_no_other_number(language: str, wikitext: str, text: str) -> None:
    assert read_in(language, wikitext) == text


def test_templates_of_another_kind_of_wiki_are_not_known() -> None:
    wiktionary = Site(language="en", wikipedia=False)
    assert cleaned("A {{c|en|Foods}} {{quote|en|x}} {{nowrap|a word}}.", site=wiktionary) == "A a word."


@pytest.mark.parametrize(
    ("language", "wikitext", "text"),
    [
        ("zh", "电脑是-{zh-hans:计算机; zh-hant:電腦}-的", "电脑是计算机的"),
        ("zh-hans", "电脑是-{zh-hans:计算机; zh-hant:電腦}-的", "电脑是计算机的"),
        ("zh-tw", "电脑是-{zh-hans:计算机; zh-hant:電腦}-的", "电脑是電腦的"),
        ("zh-hant-hk", "用-{zh-cn:内存;zh-tw:記憶體;zh-hk:記憶體二}-。", "用記憶體二。"),
        ("zh-sg", "用-{zh-cn:内存;zh-tw:記憶體}-。", "用内存。"),
        ("zh-mo", "用-{zh-tw:記憶體;zh-cn:内存}-。", "用記憶體。"),
        ("zh-tw", "用-{zh-hans:内存}-的。", "用的。"),  # MediaWiki says that the rule is wrong
        ("zh", "用-{zh-my:大马}-的。", "用大马的。"),
        ("zh", "-{R|原文}-和-{原文}-，-{zh-hans;zh-hant|字}-。-{N|zh-cn}--{D|zh-cn:甲;zh-tw:乙}-", "原文和原文，字。"),
        ("zh-tw", "-{A|zh-cn:甲;zh-tw:電腦}-是-{H|zh-cn:甲;zh-tw:乙}--{T|zh-cn:甲;zh-tw:乙}--{-|甲}-的", "電腦是的"),
        ("zh-tw", "一-{计算机=>zh-tw:電腦}-二-{zh-hans:甲;乙=>zh-hk:丙;zh-hant:丁;}-三", "一電腦二丁三"),
        ("zh-cn", "-{zh-hans:-{zh-cn:内;zh-tw:外}-层;zh-hant:B}-完。", "内层完。"),
        ("zh-cn", "-{zh-hans:{{lang|en|x}}}-和-{[[家|屋]]}-和-{zh-hans:[[家|屋]]&amp;;zh-hant:B}-。", "x和屋和屋&。"),
        ("zh-cn", "看 http://a.org/-{b}-c 和<nowiki>-{zh-cn:x}-</nowiki>。", "看 http://a.org/-{b}-c 和-{zh-cn:x}-。"),
        ("zh-cn", "用-{没有关，-{zh-cn:甲;zh-tw:乙}-。", "用-{没有关，甲。"),
        ("zh-cn", "时间：-{12:30}-，-{a;b}-。", "时间：12:30，a;b。"),
        ("sr", "Град -{sr-ec:Београд;sr-el:Beograd}- је.", "Град Београд је."),
        ("sr-latn", "Grad -{sr-ec:Београд;sr-el:Beograd}- i -{sr-Cyrl:а;sr-Latn:a}-.", "Grad Beograd i a."),
        ("kk-tr", "Қала -{kk-cyrl:Алматы;kk-latn:Almatı}-.", "Қала Almatı."),
        ("uz-cyrl", "Шаҳар -{uz-latn:Toshkent;uz-cyrl:Тошкент}-.", "Шаҳар Тошкент."),
        ("ku", "Bajar -{ku-latn:Amed;ku-arab:ئامەد}-.", "Bajar Amed."),
        ("iu-latn", "Nuna -{ike-cans:ᓄᓇ;ike-latn:nuna}- una.", "Nuna nuna una."),
        ("en", "In awk -{print}- stays as it is.", "In awk -{print}- stays as it is."),
        ("zh-yue", "呢個-{zh-hans:甲}-係。", "呢個-{zh-hans:甲}-係。"),  # a wiki without variants
    ],
)  # fmt: skip
def test_kind_5_the_variant_that_is_asked_for_stays(language: str, wikitext: str, text: str) -> None:
    assert read_in(language, wikitext) == text


def test_what_is_cut_or_written_out_is_counted() -> None:
    counts: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    text = clean_page(
        "{{Infobox city|a={{b}}}}甲{{lang|en|x}}{{cn}}<ref>{{cite}}</ref><!-- c -->\x01-{zh-cn:乙;zh-tw:丙}-"
        "-{H|zh-cn:乙}- [[文件:A]][[分类:A]][[fr:A]]乙丙丁。\n{|\n|a\n|}\n== 参见 ==\n* 戊\n== 己 ==\n* 庚辛\n* 辛庚 ]]"
        "\n\n1 2 {{Cn}}{{#if:x|y}}<gallery>a</gallery>",
        "T",
        Site(language="zh"),
        counts,
        dropped,
    )  # fmt: skip
    assert text == "甲x乙 乙丙丁。"
    assert {name: count for name, count in counts.items() if count} == {
        "templates_written": 1, "templates_dropped": 4, "variants_written": 1, "variants_dropped": 1,
        "tables_dropped": 1, "references_dropped": 1, "tags_dropped": 1, "comments_dropped": 1, "files_dropped": 1,
        "categories_dropped": 1, "language_links_dropped": 1, "namespaces_guessed": 2, "headings_dropped": 2,
        "sections_dropped": 1, "list_items_dropped": 2, "paragraphs_without_words": 1, "brackets_unclosed": 1,
        "characters_dropped": 1,
    }  # fmt: skip
    assert dropped == {"Infobox city": 1, "cn": 1, "Cn": 1, "#if:": 1}
    assert clean_page("{{x}}{{disambiguation}}", "T", ENGLISH, counts, dropped) is None
    assert dropped.total() == 4


def test_what_closed_gaps_lose_is_counted() -> None:
    counts: Counter[str] = Counter()
    assert clean_page("Angola ({{x}}; ) is here.", "T", ENGLISH, counts) == "Angola is here."
    assert counts["gap_characters_dropped"] == len("(;)")


def test_names_of_templates_take_no_more_memory_than_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.corpus.extract.read_context.MOST_NAMES", 2)
    names = Counter({"a": 1, "b": 5, "c": 3, "d": 1})
    keep_commonest(names)
    assert names == {"a": 1, "b": 5, "c": 3, "d": 1}
    names["e"] += 1
    keep_commonest(names)
    assert names == {"b": 5, "c": 3}
