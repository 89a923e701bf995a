"""The tokenizer in a folder that the transformers library has written, or that was published for it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tensor3d.files import broken_links
from tools.common.files import parsed_json, read_file
from tools.corpus.tokenizers.base import FILES, Kind, TextLayout, Tokenizer, read
from tools.corpus.tokenizers.folder import install_tokenizer, open_tokenizer
from tools.corpus.tokenizers.library_rules import BERT, PROBE, RULES, contradiction, rules_of
from tools.corpus.tokenizers.tokenizer_json import JsonTokenizer
from tools.corpus.tokenizers.wordpiece import count_cased, is_cased, read_vocabulary

_log = logging.getLogger(__name__)

# --- Tokens that the transformers library keeps beside a vocabulary, in files of their own ----------------------------

CONFIG, SPECIAL_MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_ROLES = ("pad", "cls", "sep", "mask", "unk")
_EXTRA = ("additional_special_tokens", "extra_special_tokens")


def check_added(folder: Path, tokenizer: Tokenizer, file: Path, remedy: str) -> None:
    """A vocabulary by itself gives the library's ids where the files beside it name its own special tokens alone.

    Args:
        tokenizer: that of `file`.
        remedy: what to do, for the error.

    Raises:
        ValueError: a token is added to the vocabulary, or takes the place of one of its special tokens; or a damaged
            file.
    """
    ids = {**tokenizer.special_ids} | ({} if tokenizer.unknown is None else {"unk": tokenizer.unknown})
    names = dict(zip(ids, tokenizer.pieces(list(ids.values())), strict=True))
    own = {name: ids[role] for role, name in names.items()}
    for where, name, number in _added(folder):
        if name not in own or number not in (None, own[name]):
            raise ValueError(
                f"{where} adds the token {name!r}{'' if number is None else f' with the id {number}'}, which "
                f"{file.name} by itself does not have as such. {remedy}"
            )
    _check_told(folder, tokenizer, file, remedy)


def _check_told(folder: Path, tokenizer: Tokenizer, file: Path, remedy: str) -> None:
    """Raises ValueError where the folder calls a special token by another name than the file. Without [CLS] nobody
    asks: the file's template alone says what stands where."""
    ids = {**tokenizer.special_ids} | ({} if tokenizer.unknown is None else {"unk": tokenizer.unknown})
    names = dict(zip(ids, tokenizer.pieces(list(ids.values())), strict=True))
    for where, role, name in _told(folder):
        if role == "pad" and name in names.values():  # another one's too, which nobody looks at
            continue
        if role != "unk" and "cls" not in ids:
            continue
        if name != names.get(role, name):
            raise ValueError(f"{where} calls {role}_token {name!r}, and {file.name} has {names[role]!r}. {remedy}")


def padding_in(folder: Path) -> str | None:
    """What the files of a tokenizer call padding."""
    return next((name for _, role, name in _told(folder) if role == "pad"), None)


def check_named(folder: Path, tokenizer: Tokenizer, file: Path, remedy: str) -> None:
    """A tokenizer.json has the tokens that older files beside it add; the library takes those of both.

    Raises:
        ValueError: it lacks one, or a damaged file.
    """
    _check_told(folder, tokenizer, file, remedy)
    added = [(where, name, number) for where, name, number in _added(folder) if number is not None]
    known = set(tokenizer.pieces(range(tokenizer.vocab_size))) if added else set()
    for where, name, number in added:
        if name not in known:  # what is known keeps its id
            raise ValueError(
                f"{where} adds the token {name!r} with the id {number}, and {file.name} has no such token. {remedy}"
            )


def read_table(file: Path) -> dict[str, Any]:
    """Empty where there is none. Raises ValueError for one that is damaged."""
    if not file.is_file():
        return {}
    try:
        found = parsed_json(read_file(file))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}. Get the file again.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is no table of settings, but a {type(found).__name__}. Get the file again.")
    return found


def _added(folder: Path) -> Iterator[tuple[Path, str, int | None]]:
    """The file, the token and its id, where one is said."""
    for name, number in read_table(folder / ADDED).items():
        yield folder / ADDED, name, number
    for number, token in read_config(folder / CONFIG).get("added_tokens_decoder", {}).items():
        yield folder / CONFIG, _name(token), int(number) if str(number).isdecimal() else -1
    for where in (folder / CONFIG, folder / SPECIAL_MAP):
        table = read_config(where)
        for key in _EXTRA:
            tokens = table.get(key) or ()
            for token in tokens.values() if isinstance(tokens, dict) else tokens:
                yield where, _name(token), None


def _told(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """The file, the role of a special token and its name."""
    for where in (folder / CONFIG, folder / SPECIAL_MAP):
        table = read_table(where)
        yield from ((where, role, _name(table[key])) for role in _ROLES if table.get(key := f"{role}_token"))


def _name(token: object) -> str:
    """Older files have the name alone."""
    return str(token.get("content")) if isinstance(token, dict) else str(token)


# --- What decides how the library reads the files ---------------------------------------------------------------------


def _classes(*names: str) -> frozenset[str]:
    return frozenset(f"{name}Tokenizer{fast}" for name in names for fast in ("", "Fast"))


_OF_BERT = _classes(
    *("Bert", "DistilBert", "Electra", "LayoutLM", "Lxmert", "MobileBert", "Realm", "SqueezeBert"),
    *("DPRContextEncoder", "DPRQuestionEncoder", "DPRReader"),
)
"""Classes that make BERT's own rules out of the vocabulary and the settings, whatever a tokenizer.json says."""
_ALSO_OF_BERT = _classes("ConvBert", "RetriBert")
"""Of a vocabulary by itself they make those too; a tokenizer.json they take as it is."""
_AS_IT_IS = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
_OF_SENTENCEPIECE = _classes("BigBird")
"""Classes whose ids are those of the sentencepiece model. ALBERT's changes case, accents and quotes before."""
_OF_JSON = frozenset(f"{name}{fast}" for name in RULES for fast in ("", "Fast"))
"""Classes that a tokenizer.json gives the pieces."""
_WITHOUT_TYPES = _classes(
    *("Albert", "BigBird", "Camembert", "DistilBert", "DPRReader", "Gemma", "MPNet", "Qwen2", "Roberta", "XLMRoberta")
) | {"TokenizersBackend"}
"""Classes that give no types where `model_input_names` is not said."""
_MODEL_TYPES: MappingProxyType[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("bert", "electra", "layoutlm", "lxmert", "mobilebert", "squeezebert"), "BertTokenizer"),
        **dict.fromkeys(("ernie", "megatron-bert", "nomic_bert"), "BertTokenizer"),
        **dict.fromkeys(("roberta", "roberta-prelayernorm", "data2vec-text"), "RobertaTokenizer"),
        "distilbert": "DistilBertTokenizer",
        **{"xlm-roberta": "XLMRobertaTokenizer", "camembert": "CamembertTokenizer", "mpnet": "MPNetTokenizer"},
        "deberta-v2": "DebertaV2Tokenizer",
        **dict.fromkeys(("jina_embeddings_v3", "gte", "new"), "XLMRobertaTokenizer"),
        **dict.fromkeys(("xlm-roberta-xl", "eurobert"), "TokenizersBackend"),
        **{"gemma3_text": "GemmaTokenizer", "qwen3": "Qwen2Tokenizer"},
    }
)
"""Of config.json: where nothing names a class, the library takes this one, or one like it."""
_BOOL = (bool, int)
_TYPES: MappingProxyType[str, tuple[type, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("do_lower_case", "strip_accents", "tokenize_chinese_chars", "do_basic_tokenize"), _BOOL),
        **dict.fromkeys(("tokenizer_class", "truncation_side"), (str,)),
        **dict.fromkeys(_EXTRA, (list, dict)),
        "added_tokens_decoder": (dict,),
        "auto_map": (list, dict),
        "model_input_names": (list,),
    }
)
"""Of the settings that are read; null is as if nothing were said."""


def read_config(file: Path) -> dict[str, Any]:
    """The settings in a file that say something; empty where there is none.

    Raises:
        ValueError: a damaged file, or a setting of another type than it has in the library.
    """
    found = {name: value for name, value in read_table(file).items() if value is not None}
    for name, kinds in _TYPES.items():
        if name in found and not isinstance(found[name], kinds):
            wanted = " or ".join(dict.fromkeys(each.__name__ for each in kinds))
            raise ValueError(f"{file}: {name} must be of type {wanted}. Got {found[name]!r}.")
    return found


def _class_of(folder: Path) -> tuple[str | None, Path]:
    """The class that the library reads the tokenizer with, and the file that says so; None: it goes by the files."""
    config = folder / "config.json"
    for file in (folder / CONFIG, config):
        if name := read_config(file).get("tokenizer_class"):
            return str(name), file
    return _MODEL_TYPES.get(str(read_config(config).get("model_type"))), config


def check_class(folder: Path, kind: Kind, file: Path, remedy: str) -> None:
    """The class that the folder names reads `file` as it is read here.

    Raises:
        ValueError: it is another algorithm's, code of the folder's own, or goes by settings that contradict the file.
    """
    for where in (folder / CONFIG, folder / "config.json"):
        own = read_config(where).get("auto_map", {})
        if "AutoTokenizer" in own if isinstance(own, dict) else bool(own):
            raise ValueError(
                f"{where} names code of its own for the tokenizer (auto_map), which is never run here. {remedy}"
            )
    name, where = _class_of(folder)
    if name is None:
        return
    known = {
        "wordpiece": _OF_BERT | _ALSO_OF_BERT,
        "sentencepiece": _OF_SENTENCEPIECE | _OF_BERT,
        "json": _OF_BERT | _ALSO_OF_BERT | _OF_JSON,
    }
    if name not in known[kind] | _AS_IT_IS:
        said = f"tokenizer_class = {name!r}"
        if "tokenizer_class" not in read_config(where):
            said = f"model_type = {read_config(where)['model_type']!r}, whose class is {name}"
        raise ValueError(f"{where} has {said}, by which {file.name} alone does not give the ids. {remedy}")
    if kind == "json":
        _check_json(folder, file, name)


def _check_json(folder: Path, file: Path, name: str) -> None:
    """A tokenizer.json cuts text as its class does by the settings beside it, where that goes by those alone."""
    rules = BERT if name in _OF_BERT else rules_of(name)
    if rules is None:
        return
    made = JsonTokenizer(file)
    if rules is BERT and not made.is_wordpiece:
        # Such as XLM-R's in a BERT: the file is all that says what to do.
        _log.warning(
            "%s holds a model of type %s, and is read as it is. Its class, %s, makes a WordPiece of the pieces in "
            "version 5 of the transformers library, which finds no word with them. For the same ids there, write %s "
            "into %s.",
            file,
            made.plan["model"].get("type"),
            name,
            _AS_FILE,
            CONFIG,
        )
        return
    settings = read_config(folder / CONFIG)
    told = {key: settings.get(key, default) for key, default in rules.settings.items()}
    if problem := contradiction(made, name, rules, told):
        said = ", ".join(
            f"{key} = {json.dumps(value)}{'' if key in settings else ' (its default)'}" for key, value in told.items()
        )
        example = (
            f'Write into {CONFIG} what the model was trained with, such as {{"do_lower_case": false}}; or, for'
            if "do_lower_case" in rules.settings
            else f"Write into {CONFIG} what the model was trained with; or, for"
        )
        raise ValueError(
            f"{file} and {folder / CONFIG} contradict each other: as a {name}, the transformers library goes by "
            f"{said or 'rules of its own'}, and {file.name} has {problem}. {example} the file as it is, {_AS_FILE}."
        )


_AS_FILE = (
    '{"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "token_type_ids", '
    '"attention_mask"]}'
)
"""Settings with which the library goes by a tokenizer.json."""


def layout_of(folder: Path, tokenizer: Tokenizer) -> TextLayout:
    """How the library lays out what the tokenizer of such a folder gives.

    Raises:
        ValueError: it does so in a way that is not known here.
    """
    settings, (name, _) = read_config(folder / CONFIG), _class_of(folder)
    json_file = read_table(folder / FILES["json"]) if isinstance(tokenizer, JsonTokenizer) else {}
    side = settings.get("truncation_side") or (json_file.get("truncation") or {}).get("direction") or "right"
    if str(side).lower() not in ("left", "right"):
        raise ValueError(f"{folder / CONFIG}: truncation_side is left or right. Got {side!r}.")
    has_types = (
        "token_type_ids" in settings["model_input_names"]
        if "model_input_names" in settings
        else name not in _WITHOUT_TYPES
    )
    layout = TextLayout(cut_left=str(side).lower() == "left", second_type=int(has_types))
    rules = rules_of(name) if isinstance(tokenizer, JsonTokenizer) else None
    if rules is not None and rules.layout is not None:
        layout = replace(layout, between=rules.layout.between, second_type=has_types * rules.layout.second_type)
    if not isinstance(tokenizer, JsonTokenizer) or not json_file.get("post_processor"):
        return layout
    before, behind = tokenizer.before, tokenizer.behind
    if not before and (name in _OF_BERT or (rules is not None and rules.layout is not None)):
        raise ValueError(
            f"{folder / FILES['json']} puts no [CLS] before a text, and as a {name} the transformers library does, "
            f"whatever the file says. For the file as it is, write {_AS_FILE} into {CONFIG}."
        )
    if name in _OF_BERT and tokenizer.is_wordpiece:
        return layout
    ids, types = tokenizer.laid_out("a", "b")
    first, second = tokenizer.encode(["a", "b"])
    for between, again in ((1, False), (2, False), (1, True)) if before else ((1, False), (0, False)):
        if ids == [*before, *first, *behind * between, *before * again, *second, *behind]:
            of_second = set(types[-len(second) - len(behind) :])
            of_first = types[: -len(second) - len(behind) - again]
            if not has_types or (len(of_second) == 1 and not any(of_first) and not again):
                told = replace(layout, between=between, again=again, second_type=of_second.pop() if has_types else 0)
                if rules is None or rules.layout is None or told == layout:
                    return told
    if not before:
        return replace(layout, pairs=False)
    known = (
        "Known are [CLS] a [SEP] b [SEP], with one or two [SEP] between, and one type for each text, and, without "
        "types, [CLS] a [SEP] [CLS] b [SEP]."
    )
    if rules is not None and rules.layout is not None:
        known = (
            f"As a {name}, the transformers library has {layout.between} [SEP] between, and type {layout.second_type} "
            f"for the second, whatever the file says. For the file as it is, write {_AS_FILE} into {CONFIG}."
        )
    found = tokenizer.pieces(ids)
    raise ValueError(f"{folder / FILES['json']} lays out the pair 'a', 'b' as {found} with types {types}. {known}")


# --- The tokenizer in a folder that the transformers library has written, or that was published for it ----------------

_OF_DEBERTA = "spm.model"
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
OF_TOKENIZERS = (
    FILES["json"],
    FILES["wordpiece"],
    *_SENTENCEPIECE,
    CONFIG,
    SPECIAL_MAP,
    ADDED,
    "vocab.json",
    "merges.txt",
    _OF_DEBERTA,
)
"""Files of such a folder that belong to its tokenizer."""
_REWRITE = (
    'AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}") of the transformers library writes a '
    "tokenizer.json, which is read as it is."
)


@dataclass(frozen=True, kw_only=True)
class FoundTokenizer:
    """The file that decides the ids, and how to read it."""

    kind: Kind
    file: Path
    lowercase: bool = False
    strip_accents: bool | None = None
    """None: where text is lowercased, as BERT has it."""

    @property
    def has_accents_of_its_own(self) -> bool:
        """Whether accents are treated in another way than BERT does for text of that case."""
        return self.strip_accents not in (None, self.lowercase)

    def in_words(self) -> str:
        """Its file, and whether it is lowercased text that the file is for."""
        case = f", {'lowercased' if self.lowercase else 'cased'}" if self.kind == "wordpiece" else ""
        accents = f", accents {'dropped' if self.strip_accents else 'kept'}" if self.has_accents_of_its_own else ""
        return f"{self.file.name}{case}{accents}"

    def open(self) -> Tokenizer:
        """Raises ValueError for a damaged file, or one that lacks a special token."""
        return open_tokenizer(
            self.kind, self.file, lowercase=self.lowercase, strip_accents=self.strip_accents, any_case=True
        )

    def install(self, folder: Path, layout: TextLayout | None = None) -> Tokenizer:
        """Puts it into a folder of ours, which is there; `load_tokenizer` opens it."""
        return install_tokenizer(
            self.kind,
            self.file,
            folder,
            lowercase=self.lowercase,
            strip_accents=self.strip_accents,
            any_case=True,
            layout=layout,
        )


def find_tokenizer(folder: Path) -> FoundTokenizer:
    """tokenizer.json where there is one; else vocab.txt, with the case that tokenizer_config.json tells; else a
    sentencepiece model.

    Without a word in tokenizer_config.json text is lowercased, as the transformers library does it, unless that would
    make most of a cased vocabulary useless: then the folder has to say which it is.

    Raises:
        ValueError: no tokenizer's file, or settings with which BERT's own rules do not hold, or tokens beside the
            vocabulary.
    """
    for kind, file in _files(folder):
        return _found(folder, kind, file)
    remedy = "Put the files of the tokenizer that the model was trained with beside its weights."
    if (folder / "merges.txt").is_file():
        remedy = f"Its merges.txt alone is not read: {_REWRITE.format(folder=folder)}"
    elif (folder / _OF_DEBERTA).is_file():
        rewrite = _REWRITE.format(folder=folder)
        remedy = f"Its {_OF_DEBERTA} alone is not read, for [MASK] is none of its pieces: {rewrite}"
    remedy = broken_links(folder, (FILES["json"], FILES["wordpiece"], *_SENTENCEPIECE)).strip() or remedy
    raise ValueError(
        f"{folder} has no tokenizer: none of {FILES['json']}, {FILES['wordpiece']} and {', '.join(_SENTENCEPIECE)} is "
        f"there. {remedy}"
    )


def with_same_ids(first: FoundTokenizer, folder: Path) -> Iterator[FoundTokenizer]:
    """Other tokenizers of a folder that give each text the ids that `first` gives. What cannot be read is left out: it
    decides nothing."""
    made = first.open()
    for kind, file in _files(folder):
        with suppress(ValueError):
            if file != first.file and _agree(made, (found := _found(folder, kind, file)).open()):
                yield found


def _files(folder: Path) -> Iterator[tuple[Kind, Path]]:
    """Those that are there, the first choice first."""
    names: list[tuple[Kind, str]] = [("json", FILES["json"]), ("wordpiece", FILES["wordpiece"])]
    names += [("sentencepiece", name) for name in _SENTENCEPIECE]
    return ((kind, folder / name) for kind, name in names if (folder / name).is_file())


def _found(folder: Path, kind: Kind, file: Path) -> FoundTokenizer:
    lowercase, strip_accents = _case(folder, file) if kind == "wordpiece" else (False, None)
    found = FoundTokenizer(kind=kind, file=file, lowercase=lowercase, strip_accents=strip_accents)
    check_class(folder, kind, file, _REWRITE.format(folder=folder))
    check = check_named if kind == "json" else check_added
    check(folder, found.open(), file, _REWRITE.format(folder=folder))
    return found


def _agree(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether they have the same pieces, and cut text alike. Two ways to cut a word that score the same are as good."""
    if one.vocab_size != other.vocab_size or one.special_ids != other.special_ids:
        return False
    ids = range(one.vocab_size)
    if one.pieces(ids) != other.pieces(ids):
        return False
    mine, theirs = ([made.pieces(found) for found in made.encode(PROBE)] for made in (one, other))
    return ["".join(pieces) for pieces in mine] == ["".join(pieces) for pieces in theirs]


def tokenizer_files(folder: Path) -> list[Path]:
    """What belongs to the tokenizer of such a folder, to be copied as it is."""
    return [folder / name for name in OF_TOKENIZERS if (folder / name).is_file()]


def _case(folder: Path, vocabulary: Path) -> tuple[bool, bool | None]:
    """Whether text is lowercased, and whether accents are dropped (None: as BERT has it)."""
    settings = read_config(folder / CONFIG)
    told, accents = settings.get("do_lower_case"), settings.get("strip_accents")
    lowercase = True if told is None else bool(told)
    if told is None and is_cased(pieces := read_vocabulary(read(vocabulary), vocabulary)):
        raise ValueError(
            f"{vocabulary} is a cased vocabulary: {count_cased(pieces)} of its {len(pieces)} pieces have capital "
            f"letters, and no do_lower_case in {folder / CONFIG} says whether text is lowercased. The transformers "
            f'library would lowercase it. Write {{"do_lower_case": false}} into that file if the model was trained '
            "on text as it is, or true."
        )
    odd: dict[str, Any] = {
        "tokenize_chinese_chars": not settings.get("tokenize_chinese_chars", True),
        "do_basic_tokenize": not settings.get("do_basic_tokenize", True),
    }
    for name, found in odd.items():
        if found:
            raise ValueError(
                f"{folder / CONFIG} has {name} = {settings[name]!r} with do_lower_case = {lowercase}, which a "
                f"vocab.txt by itself cannot say. {_REWRITE.format(folder=folder)}"
            )
    return lowercase, None if accents is None else bool(accents)
