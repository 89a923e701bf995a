"""Names that decide what a piece of wikitext is: namespaces, redirects, sections, templates, tags."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from tools.corpus.extract.read_context import Site
from tools.corpus.sentences import ENTITY, entity_text

# Letters of other scripts are the point here.
# ruff: noqa: RUF001


def words(text: str) -> frozenset[str]:
    """The names in a block of text that a comma or a line's end separates, without case."""
    return frozenset(name.strip().casefold() for name in re.split(r"[,\n]", text) if name.strip())


FILES = words("""
    file, image, media, datei, bild, fichier, archivo, imagen, immagine, ficheiro, imagem, arquivo, bestand
    afbeelding, plik, grafika, файл, изображение, зображення, ファイル, 画像, 文件, 檔案, 图像, 圖像, fil
    billede, tiedosto, kuva, soubor, súbor, obrázok, dosya, resim, berkas, gambar, ملف, صورة, پرونده, تصویر
    קובץ, תמונה, 파일, 그림, tập tin, hình, fájl, kép, fișier, imagine, αρχείο, εικόνα, датотека, слика
    картинка, datoteka, slika, fitxer, imatge, dosiero, fitxategi, irudi, แฟ้ม, ภาพ, चित्र, mynd, failas, attēls
    pilt
""")
"""Namespaces whose links show a picture or play a sound."""

CATEGORIES = words("""
    category, kategorie, catégorie, categoría, categoria, categorie, kategoria, категория, категорія, kategori
    luokka, カテゴリ, 分类, 分類, 분류, تصنيف, رده, קטגוריה, thể loại, kategória, κατηγορία, kategorija
    категорија, kategorio, หมวดหมู่, श्रेणी, flokkur, kategoriija, kategooria
""")
"""Namespaces whose links show nothing where they stand."""

PROJECTS = words("""
    w, wikt, s, q, b, n, v, voy, d, c, m, wiktionary, wikipedia, wikisource, wikiquote, wikibooks, wikinews
    wikiversity, wikivoyage, wikidata, wikispecies, species, commons, meta, metawikipedia, mw, mediawikiwiki
    foundation, wmf, incubator
""")
"""Prefixes of links to sister projects: a reader of the page sees them, a reader of prose need not."""

_CANONICAL = {
    -2: "media", -1: "special", 1: "talk", 2: "user", 3: "user talk", 4: "project", 5: "project talk",
    6: "file, image", 7: "file talk, image talk", 8: "mediawiki", 9: "mediawiki talk", 10: "template",
    11: "template talk", 12: "help", 13: "help talk", 14: "category", 15: "category talk",
}  # fmt: skip
"""What MediaWiki takes for a namespace in every wiki, by its number."""
_MEDIA, _TEMPLATE, _FILE, _CATEGORY = -2, 10, 6, 14
_ALIASES = {
    "af": "lêer, beeld", "als": "datei, bild", "ar": "ملف, صورة", "arz": "ملف, صورة", "ast": "ficheru, imaxe, imaxen",
    "az": "fayl, şəkil", "ba": "файл, рәсем, изображение", "be": "файл, выява", "be-tarask": "файл, выява",
    "be-x-old": "файл, выява", "br": "restr, skeudenn", "gsw": "datei, bild", "ka": "ფაილი, სურათი",
    "lb": "fichier, bild", "ml": "പ്രമാണം, ചിത്രം", "oc": "fichièr, imatge", "sq": "skeda, figura", "te": "దస్త్రం, బొమ్మ",
    "tl": "talaksan, larawan", "tt": "файл, рәсем, изображение", "uz": "fayl, tasvir",
    "bg": "файл, картинка", "bn": "চিত্র, ছবি",
    "bs": "datoteka, slika", "ca": "fitxer, imatge", "cs": "soubor, obrázek", "da": "fil, billede", "de": "datei, bild",
    "el": "αρχείο, εικόνα", "eo": "dosiero", "es": "archivo, imagen", "et": "fail, pilt", "eu": "fitxategi, irudi",
    "fa": "پرونده, تصویر", "fi": "tiedosto, kuva", "fr": "fichier, image", "gl": "ficheiro, imaxe",
    "he": "קובץ, תמונה", "hi": "चित्र, छवि", "hr": "datoteka, slika", "hu": "fájl, kép", "id": "berkas, gambar",
    "is": "mynd", "it": "file, immagine", "ja": "ファイル, 画像", "ko": "파일, 그림", "la": "fasciculus, imago",
    "lt": "vaizdas, failas", "lv": "attēls", "mk": "податотека, слика", "ms": "fail, imej", "nb": "fil, bilde",
    "nl": "bestand, afbeelding", "nn": "fil, bilde", "no": "fil, bilde", "pl": "plik, grafika",
    "pt": "ficheiro, imagem, arquivo", "ro": "fișier, fişier, imagine", "ru": "файл, изображение",
    "sh": "datoteka, slika", "sk": "súbor, obrázok", "sl": "datoteka, slika",
    "sr": "датотека, слика, datoteka, slika", "sv": "fil, bild", "th": "ไฟล์, ภาพ", "tr": "dosya, resim",
    "uk": "файл, зображення, изображение", "vi": "tập tin, hình", "zh": "文件, 档案, 檔案, 图像, 圖像",
}  # fmt: skip
"""Names of files that MediaWiki knows in a language besides the one in force. A dump lists no aliases, and articles are
full of them."""

_NOT_LANGUAGES = frozenset({"doi", "mw", "rfc", "wmf", "hdl", "pmc", "oeis", "isbn", "issn", "usb", "who", "url"})
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z]{1,8}){0,3}|simple")
_OF_THEIR_OWN = frozenset({"zh-classical", "zh-min-nan", "zh-yue", "be-tarask", "be-x-old", "nds-nl", "nds-de"})
_DIRECTION = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def wiki_language(code: str) -> str:
    """The language of the wiki that is read for this code: a variant or a region has none of its own."""
    return code if code in _OF_THEIR_OWN else code.partition("-")[0]


def normal_space(name: str) -> str:
    """The name of a namespace as it is compared: "_" is a space, case and marks of direction say nothing."""
    if "&" in name:
        name = ENTITY.sub(lambda entity: entity_text(entity[0]), name)
    if not name.isascii():
        name = unicodedata.normalize("NFC", _DIRECTION.sub("", name))
    # A Turkish "i" is written "İ" where it is a capital, which without its point is the same letter.
    return " ".join(name.replace("_", " ").split()).casefold().replace("i\u0307", "i")


@dataclass(frozen=True, kw_only=True)
class Namespaces:
    """What the prefixes of links mean in a wiki."""

    numbers: Mapping[str, int]
    """By `normal_space` of the names."""
    guessed: frozenset[str]
    """Names that are there because the dump lists none."""

    def number(self, title: str) -> int:
        """Of the namespace that a title without leading colon lies in; 0: that of articles."""
        space, colon, _ = title.partition(":")
        return self.numbers.get(normal_space(space), 0) if colon else 0

    def hidden(self, target: str, labelled: bool) -> str:
        """What `[[target]]` is counted as where it shows no text: a file, a category, the same article in another
        language; "" where it shows some."""
        space, colon, _ = target.partition(":")
        if not colon or not space.strip():  # "[[:Category:Books]]" is an ordinary link
            return ""
        space = space.strip()
        number = self.numbers.get(normal_space(space), 0)
        if number == _FILE or (number == _MEDIA and not labelled):
            return "files_dropped"
        if number == _CATEGORY:
            return "categories_dropped"
        is_language = not number and not labelled and space not in _NOT_LANGUAGES and _LANGUAGE.fullmatch(space)
        return "language_links_dropped" if is_language else ""

    def is_guess(self, target: str) -> bool:
        return bool(self.guessed) and normal_space(target.partition(":")[0]) in self.guessed

    def template(self, name: str) -> str:
        """The name of a template without its namespace."""
        return name.partition(":")[2].strip() if ":" in name and self.number(name) == _TEMPLATE else name


@lru_cache(maxsize=64)
def namespaces_of(site: Site) -> Namespaces:
    """The namespaces of a wiki: those of every wiki, and those that its dump lists. Where it lists none, the names that
    are known here, of all languages together."""
    canonical = {name: number for number, names in _CANONICAL.items() for name in words(names)}
    if not site.namespaces:
        known = dict.fromkeys(FILES, _FILE) | dict.fromkeys(CATEGORIES, _CATEGORY) | canonical
        return Namespaces(numbers=known, guessed=frozenset(known) - frozenset(canonical))
    aliases = dict.fromkeys(words(_ALIASES.get(wiki_language(site.language), "")), _FILE)
    listed = {normal_space(name): number for number, name in site.namespaces}
    return Namespaces(numbers=aliases | canonical | listed, guessed=frozenset())


# Redirects

_REDIRECTS = words("""
    redirect, weiterleitung, redirection, redirección, redireccion, rinvia, rinvio, rimando, redirecionamento
    redirecionar, doorverwijzing, patrz, przekieruj, tam, перенаправление, перенапр, перенаправлення
    перанакіраванне, пренасочване, виж, преусмери, preusmeri, пренасочување, пренасочи, види, preusmjeri
    preusmeritev, přesměruj, presmeruj, átirányítás, redirecteaza, ανακατευθυνση, yönlendirme, yönlendi̇rme, ohjaus
    uudelleenohjaus, omdirigering, tilvísun, suuna, novirzīt, peradresavimas, 転送, リダイレクト, 重定向, 重新導向
    넘겨주기, đổi, เปลี่ยนทาง, alih, lencong, تحويل, تغییر مسیر, تغییرمسیر, הפניה, पुनर्प्रेषित, अनुप्रेषित
    পুনর্নির্দেশ, পুনঃনির্দেশ, पुनर्निर्देशन, पुर्ननिर्देशन, வழிமாற்று, దారిమార్పు, തിരിച്ചുവിടുക, ಪುನರ್ನಿರ್ದೇಶನ
    رجوع مکرر, გადამისამართება, վերահղում, istiqamətləndirmə, айдау, yönaltirish, alidirekti, redirecció
    birzuzendu, birbideratu, ailgyfeirio, athsheoladh, aanstuur, adkas
""")
_REDIRECT = re.compile(
    r"\s*#(?P<word>[^\s\[\]#*:;|{}<>]{1,40})(?P<link>\s*:?\s*\[\[[^\[\]\n]{1,300}\]\])?(?P<rest>.{0,2000})", re.DOTALL
)
_NO_TEXT = re.compile(r"\[\[[^\[\]]{1,300}\]\]|\{\{[^{}]{1,300}\}\}|<!--.{0,300}?-->|__\w{3,40}__", re.DOTALL)


def is_redirect(text: str) -> bool:
    """Whether a page does nothing but lead to another one, by a word of any language: `#WEITERLEITUNG [[Ziel]]`.

    Where the word is not known here, nothing may stand beside the link but categories and templates: a list of one
    link, at worst, which is no prose either.
    """
    found = _REDIRECT.match(text) if text.lstrip()[:1] == "#" else None
    if found is None:
        return False
    word = normal_space(found["word"])
    if word in _REDIRECTS:
        return word == "redirect" or found["link"] is not None
    return found["link"] is not None and len(found["rest"]) < 2000 and not _NO_TEXT.sub("", found["rest"]).strip()


END_MATTER = words("""
    references, references and notes, references and further reading, reference list, cited references, notes
    note, notes and references, notes and citations, notes and sources, footnotes, endnotes, explanatory notes
    see also, further reading, further reading and references, recommended reading, additional reading
    reading list, suggested reading, external links, external link, web links, bibliography, select bibliography
    selected bibliography, general bibliography, annotated bibliography, sources and further reading
    works cited, citations, citations and references, general references, literature cited, gallery
    image gallery, photo gallery, external references, references cited, references and sources
    footnotes and references, bibliography and further reading, einzelnachweise, weblinks, siehe auch, literatur
    quellen, anmerkungen, belege, fußnoten, références, notes et références, liens externes, voir aussi
    bibliographie, articles connexes, lien externe, annexes, sources et références, référence, referencias
    véase también, enlaces externos, bibliografía, notas y referencias, notas, fuentes, note e riferimenti
    bibliografia, voci correlate, collegamenti esterni, altri progetti, fonti, referências, ver também
    ligações externas, notas e referências, leitura adicional, referenties, zie ook, externe links, literatuur
    bronnen, bronnen noten en/of referenties, noten, externe link, przypisy, zobacz też, linki zewnętrzne, uwagi
    примечания, см. также, ссылки, литература, источники, примітки, див. також, посилання, література, джерела
    вижте също, външни препратки, източници, бележки, литература и източници, 脚注, 注釈, 出典, 関連項目
    外部リンク, 参考文献, 脚註, 参考资料, 参见, 外部链接, 外部連結, 參考資料, 參考文獻, 參見, 注释, 각주
    같이 보기, 외부 링크, 참고 문헌, 참고문헌, referenser, se även, externa länkar, källor, noter, henvisninger
    se også, eksterne henvisninger, eksterne lenker, referanser, kilder, litteratur, lähteet, katso myös
    aiheesta muualla, viitteet, kirjallisuutta, poznámky, související články, externí odkazy, odkazy, reference
    súvisiace články, externé odkazy, referencie, jegyzetek, források, további információk, kapcsolódó szócikkek
    irodalom, vezi și, legături externe, bibliografie, referințe, note bibliografice, kaynakça, ayrıca bakınız
    dış bağlantılar, notlar, referensi, lihat pula, pranala luar, catatan kaki, παραπομπές, δείτε επίσης
    εξωτερικοί σύνδεσμοι, βιβλιογραφία, πηγές, σημειώσεις, הערות שוליים, לקריאה נוספת, קישורים חיצוניים, ראו גם
    مراجع, انظر أيضا, وصلات خارجية, المراجع, پانویس, منابع, جستارهای وابسته, پیوند به بیرون, tham khảo, xem thêm
    liên kết ngoài, chú thích, референце, види још, спољашње везе, извори, izvori, vanjske poveznice
    povezani članki, viri, zunanje povezave, referències, vegeu també, enllaços externs, erreferentziak
    kanpo estekak, อ้างอิง, ดูเพิ่ม, แหล่งข้อมูลอื่น, सन्दर्भ, इन्हें भी देखें, बाहरी कड़ियाँ
""")
"""Titles of the sections at the end of an article that hold works and links, no prose. Not those that often head
prose ("Sources", "Literature", "Discography"): the lists under them go as lists."""

_DISAMBIGUATIONS = words("""
    disambig, disamb, dab, hndis, hndab, geodis, numberdis, roaddis, schooldis, stationdis, hospitaldis
    letterdis, mildis, mathdab, shipindex, disambiguation cleanup, disambiguation-cleanup, disambig-cleanup
    disambig cleanup, dabclean, letter-numbercombdisambig, letter–numbercombdisambig, begriffsklärung, homonymie
    homonymie de personnes, patronymie, toponymie, paronymie, desambiguación, desambiguacion, disambigua
    desambiguação, desambig, doorverwijspagina, dp, ujednoznacznienie, неоднозначность, многозначност, пояснение
    багатозначність, aimai, 曖昧さ回避, 消歧义, 消歧義, 동음이의, 동명이인, förgrening, gren, flertydig, peker
    pekerside, täsmennyssivu, rozcestník, rozlišovacia stránka, egyért, egyértelműsítő lap, dezambiguizare
    anlam ayrımı, αποσαφήνιση, פירושונים, توضيح, ابهام‌زدایی, trang định hướng, disambiguasi, desambiguació
    argipen, вишезначна одредница, razdvojba, apartigilo, แก้กำกวม, बहुविकल्पी शब्द
""")
_DISAMBIGUATION_TITLES = words("""
    disambiguation, begriffsklärung, homonymie, desambiguación, disambigua, desambiguação, doorverwijspagina
    ujednoznacznienie, значения, значення, 曖昧さ回避, 消歧义, 消歧義, 동음이의, olika betydelser, flertydig
    täsmennyssivu, rozcestník, egyértelműsítő lap, dezambiguizare, anlam ayrımı, αποσαφήνιση, פירושונים, توضيح
    ابهام‌زدایی, định hướng, disambiguasi, desambiguació, argipena, вишезначна одредница, razdvojba, apartigilo
    แก้ความกำกวม
""")


def is_disambiguation_template(name: str) -> bool:
    """Whether a page with the template of this (normal) name only lists the pages that its title can mean."""
    return name in _DISAMBIGUATIONS or name.endswith((" disambiguation", " disambig")) or name == "disambiguation"


def is_disambiguation_title(title: str) -> bool:
    _, bracket, suffix = title.rpartition("(")
    return bool(bracket) and suffix.endswith(")") and suffix[:-1].strip().casefold() in _DISAMBIGUATION_TITLES


_LONGEST_EXACT = 4


def plain_name(name: str, namespaces: Namespaces) -> str:
    """A template's name as it would be written alone: `{{ Template:As_of` -> "As of"."""
    name = " ".join(name.replace("_", " ").split())
    if ":" in name:
        lowered = name.casefold()
        for prefix in ("safesubst:", "subst:"):
            if lowered.startswith(prefix):
                name = name[len(prefix) :].strip()
        name = namespaces.template(name)
    return name


def template_key(name: str) -> str:
    """A template's (plain) name as the tables here have it. Case tells short names apart, but for the first letter:
    `{{INS}}` is a ship and `{{ins}}` an underlined word. Of longer names wikis have both forms."""
    return name.casefold() if len(name) > _LONGEST_EXACT else name[:1].casefold() + name[1:]


HIDDEN_TAGS = words("""
    ref, references, gallery, timeline, score, syntaxhighlight, source, pre, imagemap, templatedata, graph
    hiero, mapframe, maplink, indicator, templatestyles, categorytree, inputbox, phonos, includeonly, rt, rp
    script, style, del, chem, ce, math, listing-hide, noscript, video, audio, iframe, object, poll, charinsert
    languages
""")
"""Tags whose content is no prose: it is left out with them."""

LITERAL_TAGS = frozenset({"nowiki"})
"""Tags whose content is text, whatever markup it looks like."""

BREAKING_TAGS = words("""
    p, div, blockquote, center, poem, ul, ol, dl, dd, dt, h1, h2, h3, h4, h5, h6, hr, section, article, aside
    header
""")
"""Tags that begin or end a paragraph."""
