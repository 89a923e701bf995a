# ruff: noqa: RUF001 - sentences of other alphabets
"""A small corpus of many scripts: three sentences a language, written for the tests."""

from __future__ import annotations

SCRIPTS: dict[str, tuple[str, str, str]] = {
    "de": ("Die müden Vögel schlafen früh.", "Im Süden blühen schöne Gärten!", "Größe ist für Äpfel nicht alles."),
    "pl": ("Żółw pełznie przez łąkę.", "Gdzie są moje książki?", "Źródło jest już blisko."),
    "vi": ("Hôm nay trời rất đẹp.", "Chúng tôi uống cà phê sữa.", "Bạn có khỏe không?"),
    "tr": ("Küçük çocuk bahçede koşuyor.", "Işık söndü ve gece oldu.", "Güneş yarın doğacak."),
    "el": ("Η θάλασσα είναι ήσυχη.", "Τα παιδιά παίζουν στον κήπο.", "Πού πηγαίνεις απόψε;"),
    "ru": ("Маленький ёж идёт домой.", "Йод хранится в аптечке.", "Где твой зелёный чай?"),
    "uk": ("Її їжак любить яблука.", "Сонце сходить над річкою.", "Ґанок старий, але міцний."),
    "ar": ("ذهب الولد إلى المدرسة.", "القطة تنام في البيت.", "هل تحب الشاي؟"),
    "fa": ("من کتاب‌ها را می‌خوانم.", "هوا امروز خوب است.", "آیا چای می‌خواهی؟"),
    "he": ("הילד הלך לבית הספר.", "שָׁלוֹם לְכֻלָּם הַיּוֹם.", "האם אתה אוהב תה?"),
    "hi": ("बच्चा स्कूल जाता है।", "आज मौसम अच्छा है।", "क्या तुम चाय पीते हो?"),
    "bn": ("ছেলেটি স্কুলে যায়।", "আজ আবহাওয়া ভালো।", "তুমি কি চা খাও?"),
    "ta": ("பையன் பள்ளிக்குப் போகிறான்.", "இன்று வானிலை நன்றாக உள்ளது.", "நீ தேநீர் குடிப்பாயா?"),
    "th": ("เด็กไปโรงเรียนทุกวัน", "วันนี้อากาศดีมาก", "คุณชอบดื่มชาไหม"),
    "my": ("ကလေးက ကျောင်းကို သွားတယ်။", "ဒီနေ့ ရာသီဥတု ကောင်းတယ်။", "မင်း လက်ဖက်ရည် ကြိုက်လား။"),
    "ka": ("ბავშვი სკოლაში მიდის.", "დღეს კარგი ამინდია.", "გიყვარს ჩაი?"),
    "am": ("ልጁ ወደ ትምህርት ቤት ይሄዳል።", "ዛሬ የአየር ሁኔታው ጥሩ ነው።", "ሻይ ትወዳለህ?"),
    "zh": ("孩子们去学校读书。", "今天的天气很好。", "你喜欢喝茶吗？"),
    "ja": ("子どもたちは学校へ行きます。", "今日はとても天気がいい。", "お茶が好きですか？"),
    "ko": ("아이들은 학교에 갑니다.", "오늘은 날씨가 좋습니다.", "차를 좋아하세요?"),
}
"""By the code of the language. Thai marks no end of a sentence: there each stands in a line of its own."""
UNSPACED = ("zh", "ja")
"""Those that put no space between sentences."""


def paragraph(language: str) -> str:
    """The three sentences as they stand in a text."""
    return ("\n" if language == "th" else "" if language in UNSPACED else " ").join(SCRIPTS[language])
