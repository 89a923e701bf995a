"""Sentences of long paragraphs and of other languages."""

from __future__ import annotations

import random
import re
import time

import pytest
import sentencex

from tools.corpus.sentences import (
    BLOCK,
    _is_code,
    _segment,
    check_language,
    count_letters,
    count_letters_and_visible,
    encoding_of_file,
    has_word,
    is_blank,
    likely_encoding,
    split_sentences,
)


def is_code(text: str) -> bool:
    return _is_code(text, *count_letters_and_visible(text))


def test_a_long_paragraph_is_split_like_a_short_one() -> None:
    draw = random.Random(0)
    words = ["Words", "and more words", "go", "on, e.g.", "with Dr. Who", "ünï", "or “no”"]
    text = " ".join("It " + " ".join(draw.choices(words, k=9)) + "." for _ in range(900))
    assert len(text) > 3 * BLOCK
    assert list(_segment(text, "en")) == sentencex.segment("en", text)
    assert len(split_sentences(text)) >= 900


def test_nothing_is_lost_between_blocks() -> None:
    draw = random.Random(0)
    for words in (["a b. ", "Zed! ", "漢字。", "Mr. X ", "\nq", "“No.” ", "(e.g. "], ["word "], ["unbroken"]):
        text = "".join(draw.choices(words, k=6 * BLOCK // len(words[0])))
        assert "".join(_segment(text, "en")) == text
        if words == ["word "]:
            assert all(part.endswith("word ") for part in _segment(text, "en")), "no word is cut"


@pytest.mark.slow
def test_time_grows_with_the_text_alone() -> None:
    text = "漢字文字。" * 100_000
    start = time.perf_counter()
    assert len(split_sentences(text, "zh")) == 100_000
    assert time.perf_counter() - start < 20, "it takes a second; without blocks, half a minute and the square of it"


def test_letters_of_all_alphabets_count() -> None:
    assert [count_letters(text) for text in ("", "aZ 1.", "é漢½", "a\u0301ß_", "১২।")] == [0, 2, 3, 3, 2]
    assert [is_code(text) for text in ("Ein Maß.", "漢字かな。", "x = 1 + 2", ">>> word word", "Жил был")] == [
        False, False, True, True, False,
    ]  # fmt: skip


def test_a_code_of_a_language_is_known_by_its_form() -> None:
    for code in ("en", "zh", "ceb", "zh-yue"):
        check_language(code)
    for code in ("", "EN", "english", "e", "en_US"):
        with pytest.raises(ValueError, match="must be an ISO 639-1 code"):
            check_language(code)
    assert split_sentences("Das kostet ca. 5 Euro. Gut.", "de") == ["Das kostet ca. 5 Euro.", "Gut."]


def test_a_session_of_python_is_code_whatever_it_says() -> None:
    assert is_code(">>> all of these are letters and would be prose")
    assert not is_code("all of these are letters and would be prose")


# Two sentences each, in scripts whose vowels are signs beside the letters, or whose letters have points.
# ruff: noqa: RUF001
TWO = {
    "hi": "यह पहला वाक्य है। यह दूसरा वाक्य है।",
    "bn": "এটি প্রথম বাক্য। এটি দ্বিতীয় বাক্য।",
    "ta": "இது முதல் வாக்கியம். இது இரண்டாவது வாக்கியம்.",
    "my": "ဒါက ပထမ ဝါကျ ဖြစ်သည်။ ဒါက ဒုတိယ ဝါကျ ဖြစ်သည်။",
    "he": "בְּרֵאשִׁית בָּרָא אֱלֹהִים. וְהָאָרֶץ הָיְתָה תֹהוּ.",
    "te": "ఇది మొదటి వాక్యం. ఇది రెండవ వాక్యం.",
    "kn": "ಇದು ಮೊದಲ ವಾಕ್ಯ. ಇದು ಎರಡನೇ ವಾಕ್ಯ.",
    "ml": "ഇത് ആദ്യ വാക്യം. ഇത് രണ്ടാം വാക്യം.",
    "gu": "આ પહેલું વાક્ય છે. આ બીજું વાક્ય છે.",
    "km": "នេះជាប្រយោគទីមួយ។ នេះជាប្រយោគទីពីរ៕",
    "bo": "འདི་ནི་ཚིག་དང་པོ་ཡིན། འདི་ནི་ཚིག་གཉིས་པ་ཡིན།།",
    "ti": "እዚ፡ቀዳማይ፡እዩ። እዚ፡ካልኣይ፡እዩ።",
    "si": "මෙය පළමු වාක්‍යයයි. මෙය දෙවන වාක්‍යයයි.",
    "hy": "Սա առաջին նախադասությունն է։ Սա երկրորդն է։",
    "pa": "ਇਹ ਪਹਿਲਾ ਵਾਕ ਹੈ। ਇਹ ਦੂਜਾ ਵਾਕ ਹੈ।",
    "ar": "هٰذِهِ جُمْلَةٌ أُولَى. وَهٰذِهِ جُمْلَةٌ ثَانِيَةٌ.",
}


@pytest.mark.parametrize("language", TWO)
def test_kind_2_prose_is_prose_in_scripts_with_marks(language: str) -> None:
    assert not is_code(TWO[language])
    assert len(split_sentences(TWO[language], language)) == 2


@pytest.mark.parametrize(
    ("language", "text", "sentences"),
    [
        ("zh", "他说：“你好。”然后走了。她问：“为什么？”他笑了。", 4),  # a mark for each word
        ("ja", "「はい。」彼は言った。「いいえ。」", 3),
        (
            "ja",
            "「はい。」と彼は言った。「行く？」という声。『だめ！』と、母。「寒い。」とても寒い。「雨。」と窓の外。",
            6,
        ),
        ("en", "Yes 😀🎉! So 👨‍👩‍👧‍👦 went. Ok 🎉🎉.", 3),
        (
            "en",
            "The city lost from 30,000 to 50,000 people in 1620–21. Many died there in 1654–57, 1665 and 1691.",
            2,
        ),
        ("de", "Am 3. Mai 1945, um 5.30 Uhr, kamen 4.500 Leute an. Es waren 12 % mehr als 1939.", 2),
        ("en", "x = 1 is 5, y = 2 is 7. Then z = 3 is 9, w = 4 is 11.", 1),
        ("en", "12 34 56 ab. 78 90 12 cd. 34 56 78 ef.", 1),
        ("en", "…… —— …… 。", 0),
    ],
)
def test_kind_2_prose_of_many_marks_and_numbers_is_prose(language: str, text: str, sentences: int) -> None:
    assert len(split_sentences(text, language)) == sentences


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("fr", ["J'ai vu M. Dupont hier.", "Mme. Durand et J. Martin sont là.", "Le prof. Martin vint."]),
        ("it", ["Il sig. Rossi e G. Verdi sono qui.", "Nel sec. XX d.C. accadde questo."]),
        ("pt", ["No séc. XX a.C. isso ocorreu, p. ex. aqui.", "O Sr. J. Silva chegou."]),
        ("es", ["La Sra. López y J. Pérez llegaron.", "Fin del cuento."]),
        ("ca", ["Va venir la Sra. Pérez i J. Puig.", "Sí."]),
        ("nl", ["Toen kwam mevr. De Vries.", "Het was zo, d.w.z. anders."]),
        ("de", ["Der 1. Weltkrieg begann im 20. Jahrhundert.", "Er kam 1990.", "Ende gut."]),
        ("de", ["Sie kam auf Platz 3.", "Danach war es am 3. Oktober der 2. Versuch von J. Doe.", "Ende."]),
        ("hu", ["Az 1848. március 15. napján kitört.", "IV. Béla király volt."]),
        ("tr", ["II. Mahmud 5. yüzyılda geldi.", "Son."]),
        ("sv", ["Han föddes t.ex. i Lund.", "Slut på sagan."]),
        ("pl", ["W 1990 r. umarł król.", "Pan dr. Kowalski przyszedł."]),
        ("ru", ["Улица им. Ленина стоит тут.", "Конец рассказа."]),
        ("uk", ["Вулиця ім. Шевченка стоїть тут.", "Кінець оповідання."]),
        ("hi", ["वे डॉ. शर्मा हैं।", "यह १९९० है।"]),
        ("bn", ["তিনি ড. ইউনূস।", "এটা ১৯৯০ সাল।"]),
        ("vi", ["TP. Hồ Chí Minh là thành phố lớn.", "Ông sinh năm 1990."]),
        ("id", ["Dia lahir di Jl. Merdeka.", "Selesai."]),
        ("fr", ["Voir l'av. Foch (p. Martin) et n° 5.", "Fin de tout."]),
        ("de-at", ["Das ist z. B. der 3. Oktober in Wien.", "Dr. Müller kam an."]),
        ("pt-br", ["No séc. XX a.C. isso ocorreu.", "O Sr. J. Silva chegou."]),
        ("zh-tw", ["這是第一句。", "這是第二句。"]),
        ("xx", ["he went home.", "she stayed."]),  # of small letters alone
    ],
)
def test_kind_2_points_of_abbreviations_initials_and_ordinals_end_no_sentence(
    language: str, sentences: list[str]
) -> None:
    assert split_sentences("".join(sentences) if language == "zh-tw" else " ".join(sentences), language) == sentences


def test_kind_2_words_are_seen_in_scripts_with_marks() -> None:
    assert all(map(has_word, ("ក្រុង", "ហ៊ុន", "दिन", "ab", "汉字", "שָׁלוֹם")))
    assert not any(map(has_word, ("", "a 1", "1 2", "दी", "x = y", "१२", "a\u0301 b")))


def test_thai_is_prose() -> None:
    assert not is_code("นี่คือประโยคแรกที่มีสระและวรรณยุกต์ครบถ้วน")


def test_only_line_feeds_end_lines_of_code() -> None:
    assert split_sentences("x = 1 + 2\u2028y = 3 * 4\x0bz = 5\nw = 6") == ["x = 1 + 2 y = 3 * 4 z = 5", "w = 6"]


def test_a_line_of_spaces_of_any_kind_is_blank() -> None:
    blank = ["", " \t", "\u00a0", "\u3000", "\u2003 \u00a0", "\u0085", "\x1c", "\u1680", "\u2028"]
    assert [is_blank(text.encode() + b"\r\n") for text in blank] == [True] * len(blank)
    seen = ["x", "\u00a0x", "\u3001", "é", "\u200b"]
    assert [is_blank(text.encode() + b"\n") for text in seen] == [False] * len(seen)
    assert not is_blank(b"\xe3\x80"), "what is no UTF-8 is for others to refuse"


def test_what_bytes_with_nuls_are() -> None:
    text = "Some words of plain English, and a line.\nAnother one.\n"
    assert "UTF-16LE" in likely_encoding(text.encode("utf-16-le"))
    assert "UTF-16BE" in likely_encoding(text.encode("utf-16-be"))
    assert likely_encoding(text.encode() + b"\0") == "binary data"
    for some in (text, "孩子们去学校"):
        assert likely_encoding(some.encode("utf-32-le")) == "UTF-32-LE"
        assert likely_encoding(some.encode("utf-32-be")) == "UTF-32-BE"
    assert likely_encoding(bytes(400)) == "binary data"
    assert likely_encoding(b"\xff few") == "", "too little to tell"


def test_what_a_file_begins_with() -> None:
    text = "Some words of plain English, and a line.\n"
    for encoding, said in (
        ("utf-16-le", r"its byte order mark is another.*UTF-16 \(little"),
        ("utf-16-be", r"its byte order mark is another.*UTF-16 \(big"),
        ("utf-32-le", r"its byte order mark is another.*UTF-32 \(little"),
        ("utf-32-be", r"its byte order mark is another.*UTF-32 \(big"),
        ("gb18030", "its byte order mark is another.*GB18030"),
        ("utf-7", "its byte order mark is another.*UTF-7"),
    ):
        assert re.search(said, encoding_of_file(f"\ufeff{text}".encode(encoding)))
    assert "NUL characters, as of UTF-16 (big-endian" in encoding_of_file(text.encode("utf-16-be"))
    for head in (b"", b"\xff", text.encode("utf-8-sig"), text.encode(), b"a\0b\0", bytes(400), "été".encode("latin-1")):
        assert not encoding_of_file(head)
