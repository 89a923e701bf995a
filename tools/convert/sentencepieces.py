"""A sentencepiece model as a `tokenizer.json` with the same ids.

Text is normalised by the model's own table of characters, "precompiled_charsmap" (Kudo and Richardson, 2018, §3.3), cut
before each space, and each word is segmented by the scores of pieces (unigram) or by merges (BPE). Three things need
care:

- The tokenizers library looks up the table by what a reader sees as one character, marks included, and drops the marks
  of one whose first character is in the table; sentencepiece goes on behind what it has found. A control character,
  which the table deletes, in front of each mark makes the library do so too. Before that NFC composes those marks that
  the table would.
- A merge is a pair of pieces, and sentencepiece knows the result alone: every way to cut it in two is listed.
- Sums of scores are of double precision here and of single precision there: of segmentations of one word that score
  the same, such as two orders of the same pieces in a row of dashes, the two may take different ones.

What differs beside that: letters with several marks in an order that Unicode does not have them in.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.corpus.tokenizers.kinds import missing, read
from tools.corpus.tokenizers.sentencepieces import SPACE

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _USER_DEFINED = 1, 2, 4
_MARKS = r"(?=[\p{M}\u200c\u200d\uff9e\uff9f\x{1f3fb}-\x{1f3ff}])"
"""In front of what continues a character: marks, joiners, Katakana's sound marks, skin colours."""


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
        stages += [
            normalizers.NFC(),
            normalizers.Replace(Regex(_MARKS), "\u0001"),
            normalizers.Precompiled(normal.precompiled_charsmap),
        ]
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
