"""What classes of the transformers library make of a tokenizer.json: they take its pieces, and cut text by rules and
settings of their own, whatever the file says of that (version 5; version 4 went by the file)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Literal

from tools.corpus.tokenizers.base import TextLayout
from tools.corpus.tokenizers.tokenizer_json import JsonTokenizer

PROBE = (
    "The FOXES, \u00c9t\u00e9 \u6f22\u5b57\u3002 na\u00efve Stra\u00dfe \u00bd!",
    "iPhone 12 of THE McDonald's",
    " two  spaces, 3,000 times: ``so'' e\u0301t\u00e9 ",
)
"""Two tokenizers that treat case, accents, ideographs, numbers, spaces and marks in another way differ in these."""
_PROBE_OF_BPE = ("IT'S;\n\n two\r\n\tlines\n\n4 \n  and\u00a0\u0939\u093f\u0928\u094d\u0926\u0940 x'\u0301\n",)
"""The same of line ends, of marks that NFC leaves alone, and of capital letters behind an apostrophe."""


@dataclass(frozen=True, kw_only=True)
class ClassRules:
    """Of a class, without its ending "Fast"."""

    model: Literal["WordPiece", "BPE", "Unigram"]
    settings: Mapping[str, bool | None]
    """Those of tokenizer_config.json that it goes by, and what they are where nothing is said."""
    byte_fallback: bool = False
    """Whether pieces of bytes stand for what has no other."""
    unknown: int | None = None
    """The id that it gives to unknown pieces; None: that of the file."""
    layout: TextLayout | None = None
    """How it lays out pairs, whatever the file says; of types see `huggingface.layout_of`. None: as the file has it."""


_SPACE = MappingProxyType({"add_prefix_space": True})
_ROBERTA = TextLayout(between=2, second_type=0)
BERT = ClassRules(
    model="WordPiece",
    settings=MappingProxyType({"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}),
)
RULES: Mapping[str, ClassRules] = MappingProxyType(
    {
        "RobertaTokenizer": ClassRules(model="BPE", settings={"add_prefix_space": False}, layout=_ROBERTA),
        "DebertaTokenizer": ClassRules(model="BPE", settings={"add_prefix_space": False}, layout=_ROBERTA),
        "MPNetTokenizer": replace(BERT, layout=_ROBERTA),
        "XLMRobertaTokenizer": ClassRules(model="Unigram", settings=_SPACE, unknown=3, layout=_ROBERTA),
        "CamembertTokenizer": ClassRules(model="Unigram", settings=_SPACE, layout=_ROBERTA),
        "AlbertTokenizer": ClassRules(
            model="Unigram",
            settings={"do_lower_case": True, "keep_accents": False, **_SPACE},
            unknown=1,
            layout=TextLayout(),
        ),
        "GemmaTokenizer": ClassRules(model="BPE", settings={}, byte_fallback=True),
        "Qwen2Tokenizer": ClassRules(model="BPE", settings={"add_prefix_space": False}),
        "BigBirdTokenizer": ClassRules(model="Unigram", settings=_SPACE, layout=TextLayout()),
        "DebertaV2Tokenizer": ClassRules(
            model="Unigram", settings={"do_lower_case": False, "split_by_punct": False, **_SPACE}, layout=TextLayout()
        ),
    }
)


_PARTS_OF_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Bai et al. 2023: endings behind an apostrophe, words, single digits, marks, line ends, spaces."""


def rules_of(name: str | None) -> ClassRules | None:
    """Of a class that takes no more than the pieces of a tokenizer.json; None for others, but BERT's."""
    return RULES.get((name or "").removesuffix("Fast"))


def contradiction(made: JsonTokenizer, name: str, rules: ClassRules, told: Mapping[str, Any]) -> str:
    """How the file cuts text otherwise than the class, in words; empty where it does not.

    Args:
        made: the tokenizer of the file.
        name: of the class.
        told: the settings that the class goes by.
    """
    model, plan = made.plan["model"], made.plan
    if model.get("type", rules.model) != rules.model:
        return f"a model of type {model['type']} where the class makes one of type {rules.model}"
    odd = {
        "BPE": ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"),
        "Unigram": (),
        "WordPiece": (),
    }
    if rules.model != "WordPiece" and bool(model.get("byte_fallback")) != rules.byte_fallback:
        said = f"byte_fallback = {model.get('byte_fallback')}"
        return f"{said} where the class has {'pieces of bytes' if rules.byte_fallback else 'none'}"
    if found := next((key for key in odd[rules.model] if model.get(key)), None):
        return f"{found} = {model[found]!r} where the class has none"
    if rules.unknown is not None and made.unknown != rules.unknown:
        return f"unk_id = {made.unknown} where the class has {rules.unknown}"
    if rules.model == "WordPiece" and made.of_other_words_than_bert:
        return made.of_other_words_than_bert
    normalizer, pre_tokenizer = _rebuilt(name.removesuffix("Fast"), rules, told, plan)
    for text in (*PROBE, *(_PROBE_OF_BPE if rules.model == "BPE" else ())):
        clean = text if normalizer is None else normalizer.normalize_str(text)
        wanted, parts = [part for part, _ in pre_tokenizer.pre_tokenize_str(clean)], made.cut(text)
        if wanted != parts:
            at = next(place for place, (one, other) in enumerate(zip_longest(wanted, parts)) if one != other)
            return f"{' '.join(parts[at : at + 2])!r} where the settings give {' '.join(wanted[at : at + 2])!r}"
    return ""


def _rebuilt(name: str, rules: ClassRules, told: Mapping[str, Any], plan: Mapping[str, Any]) -> tuple[Any, Any]:
    """The normalizer (None: there is none) and the pre-tokenizer of the class."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    if rules.model == "WordPiece":
        accents = told["strip_accents"]
        clean = normalizers.BertNormalizer(
            lowercase=bool(told["do_lower_case"]),
            strip_accents=None if accents is None else bool(accents),
            handle_chinese_chars=bool(told["tokenize_chinese_chars"]),
        )
        return clean, pre_tokenizers.BertPreTokenizer()
    if name == "GemmaTokenizer":
        return normalizers.Replace(" ", "\u2581"), pre_tokenizers.Split(" ", "merged_with_previous")
    space = bool(told["add_prefix_space"])
    if name == "Qwen2Tokenizer":
        parts_of = pre_tokenizers.Split(Regex(_PARTS_OF_QWEN2), "isolated")
        of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)
        return normalizers.NFC(), pre_tokenizers.Sequence([parts_of, of_bytes])
    if rules.model == "BPE":
        return None, pre_tokenizers.ByteLevel(add_prefix_space=space)
    otherwise: Literal["first", "never"] = "first" if name == "DebertaV2Tokenizer" else "never"
    marks = pre_tokenizers.Metaspace(prepend_scheme="always" if space else otherwise)
    if name == "BigBirdTokenizer":
        return normalizers.Replace(Regex(" {2,}"), "\u2581"), marks
    lower = [normalizers.Lowercase()] if told.get("do_lower_case") else []
    if name == "DebertaV2Tokenizer":
        spaces = [normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "), normalizers.NFC()]
        steps = [pre_tokenizers.Punctuation("isolated"), marks] if told["split_by_punct"] else [marks]
        stripped = normalizers.Strip(left=False, right=True)
        return normalizers.Sequence([*lower, *spaces, stripped]), pre_tokenizers.Sequence(steps)
    parts: list[Any] = []
    if name == "AlbertTokenizer":
        parts = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        parts += [] if told["keep_accents"] else [normalizers.NFKD(), normalizers.StripAccents()]
    parts += [*lower, *_charsmap(plan)]
    words = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marks])
    return (normalizers.Sequence(parts) if parts else None), words


def _charsmap(plan: Mapping[str, Any]) -> list[Any]:
    """The table of characters of a sentencepiece model, which these classes take from the file's normalizer."""
    from base64 import b64decode

    from tokenizers import normalizers

    told = plan.get("normalizer") or {}
    steps = told["normalizers"] if told.get("type") == "Sequence" else [told]
    found = next((step["precompiled_charsmap"] for step in steps if step.get("type") == "Precompiled"), None)
    return [] if found is None else [normalizers.Precompiled(b64decode(found))]
