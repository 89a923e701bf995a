"""The tokenizer of a model as files that `transformers.AutoTokenizer` reads, with the same ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.bert.pretrained import model_folder_of
from tools.convert.sentencepieces import library_of_sentencepiece
from tools.corpus.tokenizers import FILES, SETTINGS, Tokenizer, load_tokenizer
from tools.corpus.tokenizers.added import CONFIG, SPECIAL_MAP
from tools.corpus.tokenizers.folder import read_settings
from tools.corpus.tokenizers.huggingface import tokenizer_files
from tools.corpus.tokenizers.wordpiece import make_library, read_vocabulary
from tools.corpus.work import draft
from tools.model_folder import HUGGINGFACE, TOKENIZER, copy_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

_ROLES = ("pad", "cls", "sep", "mask")


def write_tokenizer(source: Path, output: Path, *, max_length: int) -> str:
    """Writes the tokenizer of the model in `source` into `output`, which is there.

    Files of an imported folder are copied as they were. Others become a tokenizer.json, with the vocab.txt or the
    sentencepiece model that it was made from beside it.

    Args:
        max_length: tokens of the longest sequence that the model takes.

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
        lowercase = bool(settings["lowercase"])
        names = read_vocabulary(file.read_bytes(), file)
        library = make_library({piece: number for number, piece in enumerate(names)}, lowercase=lowercase)
        config = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": lowercase,
            "strip_accents": None,
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

        library = Library.from_buffer(file.read_bytes())
    names_of = _special_names(tokenizer)
    _add_special(library, tokenizer, names_of)
    _write(output / FILES["json"], library.to_str(pretty=True))
    config |= {"model_max_length": max_length, "model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    _write(output / CONFIG, json.dumps(config | names_of, indent=2, ensure_ascii=False))
    _write(output / SPECIAL_MAP, json.dumps(names_of, indent=2, ensure_ascii=False))
    told = f"written as {FILES['json']}, from the {kind} one"
    if kind == "sentencepiece":
        told += "; where two ways to cut a word score the same, such as a row of dashes, it may take the other one"
    return told


def _special_names(tokenizer: Tokenizer) -> dict[str, str]:
    """As tokenizer_config.json calls them: pad_token and so on."""
    names = {f"{role}_token": tokenizer.pieces([tokenizer.special_ids[role]])[0] for role in _ROLES}
    if tokenizer.unknown is not None:
        names["unk_token"] = tokenizer.pieces([tokenizer.unknown])[0]
    return names


def _add_special(library: Library, tokenizer: Tokenizer, names: dict[str, str]) -> None:
    """Makes the library know special tokens, and put [CLS] and [SEP] around texts, unless its file has done so."""
    from tokenizers import AddedToken, processors

    known = {token.content for token in library.get_added_tokens_decoder().values()}
    new = [name for name in names.values() if name not in known]
    library.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in new])
    if library.post_processor is None:
        first, last = names["cls_token"], names["sep_token"]
        library.post_processor = processors.TemplateProcessing(
            single=f"{first}:0 $A:0 {last}:0",
            pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
            special_tokens=[(first, tokenizer.special_ids["cls"]), (last, tokenizer.special_ids["sep"])],
        )


def _write(path: Path, text: str) -> None:
    with draft(path) as output:
        output.write(text.encode() + b"\n")
