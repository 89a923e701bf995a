"""The tokenizer of a model as files that `transformers.AutoTokenizer` reads, with the same ids."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.bert.huggingface import model_folder_of
from tools.common.files import read_file, write_file
from tools.corpus.tokenizers import FILES, SETTINGS, Tokenizer, load_tokenizer
from tools.corpus.tokenizers.base import missing, read
from tools.corpus.tokenizers.folder import case_of, read_settings
from tools.corpus.tokenizers.huggingface import CONFIG, SPECIAL_MAP, tokenizer_files
from tools.corpus.tokenizers.model_dir import HUGGINGFACE, TOKENIZER, copy_file
from tools.corpus.tokenizers.sentencepiece import SPACE
from tools.corpus.tokenizers.tokenizer_json import JsonTokenizer
from tools.corpus.tokenizers.wordpiece import make_library, read_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library


# --- A sentencepiece model as a `tokenizer.json` with the same ids ----------------------------------------------------
#
# Text is normalised by the model's own table of characters, "precompiled_charsmap" (Kudo and Richardson, 2018, §3.3),
# cut before each space, and each word is segmented by the scores of pieces (unigram) or by merges (BPE). Three things
# need care:
#
# - The tokenizers library looks up the table by what a reader sees as one character, marks included, and drops the
#   marks of one whose first character is in the table; sentencepiece goes on behind what it has found. A control
#   character in front of each mark makes the library do so too, and is deleted then; not in front of a text, where the
#   library cannot delete it. Before that NFC composes those marks that the table would, of Katakana of half width too.
# - A merge is a pair of pieces, and sentencepiece knows the result alone: every way to cut it in two is listed.
# - Sums of scores are of double precision here and of single precision there: of segmentations of one word that score
#   the same, such as two orders of the same pieces in a row of dashes, the two may take different ones.
#
# What differs beside that: letters with several marks in an order that Unicode does not have them in.

_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _USER_DEFINED = 1, 2, 4
_MARKS = r"(?!\A)(?=[\p{M}\u200c\u200d\uff9e\uff9f\x{1f3fb}-\x{1f3ff}])"
"""In front of what continues a character: marks, joiners, Katakana's sound marks, skin colours."""
_SOUND = {"\uff9e": "\u3099", "\uff9f": "\u309a"}
"""Katakana's sound marks of half width, and those that NFC composes."""
_KATAKANA = {
    half: whole
    for half in (f"{letter}{mark}" for letter in map(chr, range(0xFF66, 0xFF9E)) for mark in _SOUND)
    if len(whole := unicodedata.normalize("NFKC", half)) == 1
}
"""Letters of half width with such a mark, and what they are in one character."""


def library_of_sentencepiece(file: Path) -> Library | str:
    """The tokenizer, without special tokens; or why there can be none with the same ids, in words.

    Raises:
        ValueError: no such file, or a package is missing.
    """
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:  # it needs protobuf
        raise missing("protobuf", error) from error
    model: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made by its import
    model.ParseFromString(read(file))
    trained, normal = model.trainer_spec, model.normalizer_spec
    kinds = {piece.type for piece in model.pieces}
    for is_so, told in (
        (trained.model_type not in (_UNIGRAM, _BPE), "segments words in another way than unigram and BPE"),
        (trained.treat_whitespace_as_suffix, "puts spaces behind words"),
        (not normal.escape_whitespaces, "keeps spaces as they are"),
        (not trained.split_by_whitespace, "has pieces across spaces"),
        (_USER_DEFINED in kinds, "has pieces that its user defined"),
    ):
        if is_so:
            return told
    return _build(model)


def _build(model: Any) -> Library:
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    normal = model.normalizer_spec
    library = Tokenizer(_unigram(model) if model.trainer_spec.model_type == _UNIGRAM else _bpe(model))
    stages: list[Any] = []
    if normal.precompiled_charsmap:
        table = normalizers.Precompiled(normal.precompiled_charsmap)
        if table.normalize_str("\uff76") == "\u30ab":
            stages += [normalizers.Replace(half, whole) for half, whole in _KATAKANA.items()]
            stages += [normalizers.Replace(Regex(f"(?<=[\u3041-\u30ff]){half}"), mark) for half, mark in _SOUND.items()]
        stages += [normalizers.NFC(), normalizers.Replace(Regex(_MARKS), "\u0001"), table]
        stages += [normalizers.Replace("\u0001", "")]
    if normal.remove_extra_whitespaces:
        stages += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex("^ | $"), "")]
    library.normalizer = normalizers.Sequence(stages)
    prepend = "always" if normal.add_dummy_prefix else "never"
    library.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=prepend)
    library.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=prepend)
    return library


def _unigram(model: Any) -> Any:
    from tokenizers import models

    unknown = next(number for number, piece in enumerate(model.pieces) if piece.type == _UNKNOWN)
    scored = [(piece.piece, piece.score) for piece in model.pieces]
    return models.Unigram(scored, unk_id=unknown, byte_fallback=model.trainer_spec.byte_fallback)


def _bpe(model: Any) -> Any:
    from tokenizers import models

    ids = {piece.piece: number for number, piece in enumerate(model.pieces)}
    merges = []
    # The best score first; sentencepiece has given none twice.
    for piece in sorted((piece for piece in model.pieces if piece.type == _NORMAL), key=lambda piece: -piece.score):
        text = piece.piece
        halves = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        merges += [(left, right) for left, right in halves if left in ids and right in ids]
    unknown = next(piece.piece for piece in model.pieces if piece.type == _UNKNOWN)
    return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.trainer_spec.byte_fallback)


# --- The tokenizer of a model as files that `transformers.AutoTokenizer` reads ----------------------------------------

_ROLES = ("pad", "cls", "sep", "mask")


def write_tokenizer(source: Path, output: Path, *, max_length: int, types: int = 2) -> str:
    """Writes the tokenizer of the model in `source` into `output`, which is there.

    Files of an imported folder are copied as they were. Others become a tokenizer.json, with the vocab.txt or the
    sentencepiece model that it was made from beside it.

    Args:
        max_length: tokens of the longest sequence that the model takes.
        types: of its tokens; with fewer than two the library's tokenizer gives none, which the model may not take.

    Returns:
        What was done, in words.

    Raises:
        ValueError: there is no tokenizer, or it is damaged.
    """
    root = model_folder_of(source)
    original = root / TOKENIZER / HUGGINGFACE if (root / TOKENIZER / SETTINGS).is_file() else root
    if files := tokenizer_files(original):
        for file in files:
            copy_file(file, output / file.name)
        return f"as it was imported: {', '.join(file.name for file in files)}"
    folder = root / TOKENIZER
    tokenizer, (kind, settings) = load_tokenizer(folder), read_settings(folder)
    file = folder / FILES[kind]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if kind == "wordpiece":
        case = case_of(settings)
        names = read_vocabulary(read_file(file), file)
        library = make_library({piece: number for number, piece in enumerate(names)}, **case)
        config = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": case["lowercase"],
            "strip_accents": None if case["strip_accents"] == case["lowercase"] else case["strip_accents"],
            "tokenize_chinese_chars": True,
        }
        copy_file(file, output / file.name)
    elif kind == "sentencepiece":
        copy_file(file, output / file.name)
        made = library_of_sentencepiece(file)
        if isinstance(made, str):
            return (
                f"{file.name} as it is: this sentencepiece model {made}, so that no tokenizer.json gives the same ids. "
                "Read it with the sentencepiece package; AutoTokenizer cannot."
            )
        library = made
    else:
        from tokenizers import Tokenizer as Library

        library = Library.from_buffer(read_file(file))
    names_of = _special_names(tokenizer)
    replaced = _add_special(library, tokenizer, names_of, types)
    write_file(output / FILES["json"], library.to_str(pretty=True) + "\n")
    inputs = ["input_ids", *(["token_type_ids"] if types > 1 else []), "attention_mask"]
    config |= {"model_max_length": max_length, "model_input_names": inputs}
    write_file(output / CONFIG, json.dumps(config | names_of, indent=2, ensure_ascii=False) + "\n")
    write_file(output / SPECIAL_MAP, json.dumps(names_of, indent=2, ensure_ascii=False) + "\n")
    told = f"written as {FILES['json']}, from the {kind} one"
    if replaced:
        told += "; it laid out texts otherwise than the model has read them, and has the model's template now"
    if kind == "sentencepiece":
        told += (
            "; where two ways to cut a word score the same, such as a row of dashes, it may take the other one, and "
            "where marks of a letter stand in another order than Unicode's, it puts them into that order"
        )
    return told


def _special_names(tokenizer: Tokenizer) -> dict[str, str]:
    """As tokenizer_config.json calls them: pad_token and so on."""
    ids = tokenizer.special_ids
    names = {f"{role}_token": tokenizer.pieces([ids[role]])[0] for role in _ROLES if role in ids}
    if tokenizer.unknown is not None:
        names["unk_token"] = tokenizer.pieces([tokenizer.unknown])[0]
    return names


def _add_special(library: Library, tokenizer: Tokenizer, names: dict[str, str], types: int) -> bool:
    """Makes the library know special tokens, and put [CLS] and [SEP] around texts as the tokenizer's layout has it. Its
    file may have done so, or have another template, as a RoBERTa's does that was taken for pairs as BERT has them:
    whether that was replaced."""
    from tokenizers import AddedToken, processors

    known = {token.content for token in library.get_added_tokens_decoder().values()}
    new = [name for name in names.values() if name not in known]
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in new])
    if library.post_processor is not None and isinstance(tokenizer, JsonTokenizer) and _as_laid_out(tokenizer, types):
        return False
    replaced, layout = library.post_processor is not None, tokenizer.layout
    ids, second = [*tokenizer.before, *tokenizer.between, tokenizer.end], layout.second_type
    before, between, (last,) = map(tokenizer.pieces, (tokenizer.before, tokenizer.between, tokenizer.behind))
    template: Any = processors.TemplateProcessing(
        single=" ".join([*(f"{name}:0" for name in before), "$A:0", f"{last}:0"]),
        pair=" ".join(
            [
                *(f"{name}:0" for name in before),
                "$A:0",
                *(f"{name}:0" for name in between),
                f"$B:{second} {last}:{second}",
            ]
        ),
        special_tokens=list(zip(tokenizer.pieces(ids), ids, strict=True)),
    )
    if replaced and isinstance(tokenizer, JsonTokenizer) and tokenizer.plan["post_processor"].get("trim_offsets"):
        template = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])  # places without the space
    library.post_processor = template
    return replaced


def _as_laid_out(tokenizer: JsonTokenizer, types: int) -> bool:
    """Whether the file's own template gives one text and two as the tokenizer's layout does."""
    first, second = tokenizer.encode(["a", "b"])
    ids, found = tokenizer.laid_out("a", "b")
    head = [*tokenizer.before, *first, *tokenizer.between]
    of_types = [0] * len(head) + [tokenizer.layout.second_type] * (len(second) + len(tokenizer.behind))
    same_pair = ids == [*head, *second, *tokenizer.behind] and (types < 2 or found == of_types)
    return (same_pair or not tokenizer.layout.pairs) and list(tokenizer.library.encode("a").ids) == [
        *tokenizer.before,
        *first,
        *tokenizer.behind,
    ]
