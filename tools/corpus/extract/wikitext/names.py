"""Names that decide what a piece of wikitext is: namespaces, tags, sections, templates; in the languages known here."""

from __future__ import annotations

import re

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

PROJECTS = frozenset({"w", "wikt", "s", "q", "b", "n", "v", "d", "c", "m", "wiktionary", "wikipedia", "wikisource"})
"""Prefixes of links to sister projects: a reader of the page sees them, a reader of prose need not."""

_NOT_LANGUAGES = frozenset({"doi", "mw", "rfc", "wmf", "hdl", "pmc", "oeis", "isbn", "issn", "usb", "who", "url"})
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z]{2,8}){0,3}|simple")


def is_hidden_link(target: str, labelled: bool) -> bool:
    """Whether `[[target]]` shows no text where it stands: a file, a category, the same article in another language."""
    space, colon, _ = target.partition(":")
    if not colon or not space.strip():  # "[[:Category:Books]]" is an ordinary link
        return False
    space = space.strip()
    name = space.casefold()
    if name in FILES or name in CATEGORIES:
        return True
    return not labelled and name not in _NOT_LANGUAGES and _LANGUAGE.fullmatch(space) is not None


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


def normal_name(name: str) -> str:
    """A template's name as the tables here have it: `{{ Template:As_of` -> "as of"."""
    name = " ".join(name.replace("_", " ").split()).casefold()
    return name.removeprefix("template:").removeprefix("safesubst:").removeprefix("subst:").strip()


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
