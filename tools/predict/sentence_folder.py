"""What a folder of sentence-transformers says of its vectors: pooling, length, prompt. It is obeyed or refused.

modules.json                            which modules follow one another, and their folders
sentence_bert_config.json               of the encoder: most tokens of a text, whether it is lowercased; older folders
                                        of other encoders have sentence_roberta_config.json and the like
1_Pooling/config.json                   from hidden states to one vector
2_Dense/config.json                     from that to another one, its weights beside it
config_sentence_transformers.json       prompts
tokenizer_config.json                   model_max_length, where nothing else limits the tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from models.bert.embedding import Activation, DenseConfig, Pooling
from models.bert.huggingface import WeightSource, read_model_config
from models.bert.huggingface.dense import with_dense
from models.bert.huggingface.model_json import MODEL_JSON
from models.bert.huggingface.reader import WEIGHT_FILES
from tools.common.files import is_unicode, parsed_json, read_file

MODULES = "modules.json"
_ENCODER, _PROMPTS = "sentence_bert_config.json", "config_sentence_transformers.json"
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_ENCODERS = tuple(f"sentence_{kind}_config.json" for kind in _KINDS)
"""The names that the first may have; the library reads the first of them that is there, whatever the encoder."""
_POOLING: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_POOLING_NAMES: Mapping[str, Pooling] = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "mean_sqrt_len": "mean_sqrt_len",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weightedmean",
    "lasttoken": "last",
}
"""Of the library's later "pooling_mode"."""
_AFTER_POOLING = ("Dense", "Normalize", "Dropout")
"""Modules that are known; dropout does nothing outside of training."""
_ACTIVATIONS: Mapping[str, Activation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
_OF_VECTORS = dict.fromkeys(("module_input_name", "module_output_name"), "sentence_embedding")
"""What modules after pooling say, from version 5 of the library on, of which vectors they read and give."""
_OF_TOKENS = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
"""What the encoder says, from version 6 of the library on, of what it is given and gives."""
_LIBRARY = "sentence_transformers."
"""Begins the types of its modules; others are code that comes with a folder, whatever their last name."""
_OF_MODULES = ("idx", "name", "path", "type")
"""What an entry of the modules has; the library's later "kwargs" name what a module is told beside each text."""
_UNLIMITED = 10**9
"""The library writes 1e30 for a tokenizer without a limit."""


@dataclass(frozen=True, kw_only=True)
class SentenceSettings:
    """How vectors are made, as the folder has it."""

    encoder: Path
    """The folder with the weights and the tokenizer."""
    pooling: Pooling = "mean"
    dense: tuple[DenseConfig, ...] = ()
    """Layers behind it."""
    dense_folders: tuple[Path, ...] = ()
    """Where each is told of; in a Hugging Face folder with its weights."""
    normalize: bool = False
    max_length: int | None = None
    """Tokens of a text, special ones included; None: as many as the encoder has positions."""
    lowercase: bool = False
    prompt: str = ""
    """What stands before each text."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Those that the folder has, by their names."""
    includes_prompt: bool = True
    """Whether pooling counts a prompt's tokens."""

    def with_prompt(self, name: str, where: Path) -> SentenceSettings:
        """The same with the prompt of this name, of the folder `where`.

        Raises:
            ValueError: there is none of this name, or pooling without its tokens is asked for.
        """
        if name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise ValueError(f"{where / _PROMPTS} has no prompt of the name {name!r:.80}. Its prompts are {known}.")
        found = replace(self, prompt=self.prompts[name])
        _check_counted(found, where)
        return found

    def prepared(self, text: str, prompt: str | None = None) -> str:
        """What the tokenizer is given of a text, behind this prompt or else its own."""
        text = (
            (self.prompt if prompt is None else prompt) + text
        ).strip()  # as the library does; byte-level pieces would have the space
        return text.lower() if self.lowercase else text

    def in_words(self) -> str:
        """For the log."""
        more = [f"dense to {layer.outputs} ({layer.activation})" for layer in self.dense]
        more += [f"at most {self.max_length} tokens"] if self.max_length is not None else []
        more += ["length 1"] if self.normalize else []
        more += ["lowercased"] if self.lowercase else []
        more += [f"behind the prompt {self.prompt!r}"] if self.prompt else []
        return ", ".join([f"pooling {self.pooling}", *more])

    def with_dense(self, weights: WeightSource) -> WeightSource:
        """The weights of the encoder's folder with those of the dense layers. Raises ValueError as `with_dense`."""
        return with_dense(weights, self.dense, self.dense_folders)

    @property
    def dense_files(self) -> list[Path]:
        """Those of a Hugging Face folder that have the dense layers' weights."""
        found = (folder / name for folder in self.dense_folders for name in WEIGHT_FILES)
        return [path for path in found if path.is_file()]


def sentence_settings(folder: Path) -> SentenceSettings | None:
    """Of a folder with a modules.json; None for another folder.

    Raises:
        ValueError: a module or a setting that would change the vectors and is not known here, or a damaged file.
    """
    if not (folder / MODULES).is_file():
        return None
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules]
    others = [kind for kind in kinds[2:] if kind not in _AFTER_POOLING]
    if kinds[:2] != ["Transformer", "Pooling"] or others:
        unknown = (others or kinds or ["nothing"])[0]
        raise ValueError(
            f"{folder / MODULES} asks for {', '.join(kinds) or unknown}. Vectors are made by Transformer, Pooling and, "
            f"after these, {' or '.join(_AFTER_POOLING)}; {unknown} is not known. Name the Transformer's own folder to "
            "get its vectors without the rest."
        )
    if "Normalize" in kinds and "Dense" in kinds[kinds.index("Normalize") :]:
        raise ValueError(
            f"{folder / MODULES} asks for {', '.join(kinds)}. A Dense after Normalize is not known here, only before "
            "it. Name the Transformer's own folder to get its vectors without the rest."
        )
    for kind, path in modules:
        if kind == "Normalize" and (path / "config.json").is_file():
            _settings(path / "config.json", set(), _OF_VECTORS)
    encoder = modules[0][1]
    pooling, width, includes_prompt = _pooling(modules[1][1] / "config.json", encoder / "config.json")
    dense_folders = tuple(path for kind, path in modules if kind == "Dense")
    dense = []
    for path in dense_folders:
        layer, inputs = _dense(path / "config.json")
        if width not in (None, inputs):
            raise ValueError(
                f"{path / 'config.json'} has in_features = {inputs}, and is given vectors of {width}: they do not "
                "belong together."
            )
        dense.append(layer)
        width = layer.outputs
    most, lowercase = _encoder_settings(encoder)
    prompt, prompts = _prompts(folder / _PROMPTS)
    settings = SentenceSettings(
        encoder=encoder,
        pooling=pooling,
        dense=tuple(dense),
        dense_folders=dense_folders,
        normalize="Normalize" in kinds,
        max_length=most,
        lowercase=lowercase,
        prompt=prompt,
        prompts=prompts,
        includes_prompt=includes_prompt,
    )
    _check_counted(settings, folder)
    return settings


def _check_counted(settings: SentenceSettings, folder: Path) -> None:
    if settings.prompt and not settings.includes_prompt:
        raise ValueError(
            f"the pooling of {folder} has include_prompt = false, and texts stand behind the prompt "
            f"{settings.prompt!r}: pooling without the prompt's tokens is not known here. Choose no prompt, or set it "
            "to true."
        )


def sentence_files(folder: Path) -> list[str]:
    """Those of which the settings are read, by their names in the folder; none for a folder whose settings are none, or
    are not known. Weights are not among them."""
    try:
        if sentence_settings(folder) is None:
            return []
    except ValueError:
        return []
    names = [MODULES, _PROMPTS, *(str(path.relative_to(folder) / "config.json") for _, path in _modules(folder)[1:])]
    names += [str(path.relative_to(folder) / name) for _, path in _modules(folder)[:1] for name in _ENCODERS]
    return [name for name in names if (folder / name).is_file()]


def sentence_json(settings: SentenceSettings, hidden: int) -> dict[str, Any]:
    """The files of a folder whose vectors are made so, by their names: what `sentence_settings` reads the same, and
    sentence-transformers loads once the weights are there (`tools.convert to-hf`)."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(settings.dense), *["Normalize"] * settings.normalize]
    names = {activation: name for name, activation in _ACTIVATIONS.items()}
    widths = [hidden, *(layer.outputs for layer in settings.dense)]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{kind}" if number else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]
    prompts, chosen = dict(settings.prompts), None
    if settings.prompt:
        chosen = next((name for name, text in prompts.items() if text == settings.prompt), "default")
        prompts[chosen] = settings.prompt
    return {
        MODULES: modules,
        "1_Pooling/config.json": {
            "word_embedding_dimension": hidden,
            **{name: pooling == settings.pooling for name, pooling in _POOLING.items()},
            "include_prompt": True,
        },
        **{
            f"{number}_Dense/config.json": {
                "in_features": width,
                "out_features": layer.outputs,
                "bias": layer.bias,
                "activation_function": names[layer.activation],
            }
            for number, (width, layer) in enumerate(zip(widths, settings.dense, strict=False), start=2)
        },
        _ENCODER: {"max_seq_length": settings.max_length, "do_lower_case": settings.lowercase},
        _PROMPTS: {"prompts": prompts, "default_prompt_name": chosen, "similarity_fn_name": "cosine"},
    }


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Kind and folder of each module, in their order."""
    path = folder / MODULES
    content = _json(path)
    try:
        if not isinstance(content, list):
            raise TypeError
        listed = sorted(content, key=lambda module: module["idx"])
        found = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in listed]
    except (TypeError, KeyError) as problem:
        raise ValueError(
            f'{path} must be a list of modules with "idx", "type" and "path". Got {content!r:.80}.'
        ) from problem
    for module in listed:
        more = next((key for key, value in module.items() if key not in _OF_MODULES and value), None)
        if more is not None:
            raise ValueError(
                f"{path} has {more} = {module[more]!r:.60} for the module {module['type']}, which may change the "
                f"vectors and is not known here. Known are {', '.join(_OF_MODULES)}. Take it away, or name the "
                "Transformer's own folder."
            )
    for _, name in found:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path} names the folder {name!r}, which is not inside {folder}.")
    own = next((str(module["type"]) for module in listed if not str(module["type"]).startswith(_LIBRARY)), None)
    if own is not None:
        raise ValueError(
            f"{path} asks for {own}, code that is not the library's own ({_LIBRARY}...) and is never run here. Name "
            "the Transformer's own folder to get its vectors without that."
        )
    return [(kind, folder / name) for kind, name in found]


def _pooling(path: Path, config: Path) -> tuple[Pooling, int | None, bool]:
    """How hidden states become one vector, how wide it is if that is said, and whether a prompt's tokens count."""
    known = {*_POOLING, "pooling_mode", "word_embedding_dimension", "embedding_dimension"}
    settings = _settings(path, {*known, "include_prompt"})
    name = settings.get("pooling_mode")
    if name is None:
        # The library's own default, of files that lack the key.
        modes = {"pooling_mode_mean_tokens": True, **settings}
        chosen = [key for key in _POOLING if modes.get(key)]
    else:
        chosen = [name] if isinstance(name, str) else list(map(str, name if isinstance(name, list) else [name]))
    poolings = [pooling for key in chosen if (pooling := _POOLING.get(key) or _POOLING_NAMES.get(key)) is not None]
    if len(chosen) != 1 or len(poolings) != 1:
        raise ValueError(
            f"{path} asks for the pooling {' and '.join(chosen) or 'none'}. Known is one of {', '.join(_POOLING)}."
        )
    width = settings.get("word_embedding_dimension", settings.get("embedding_dimension"))
    hidden = read_model_config(config.parent).hidden if config.is_file() else None
    if None not in (width, hidden) and width != hidden:
        raise ValueError(f"{path} is of vectors of {width}, and {config} of {hidden}: they do not belong together.")
    return poolings[0], hidden if width is None else width, bool(settings.get("include_prompt", True))


def _dense(path: Path) -> tuple[DenseConfig, int]:
    """A dense layer, and the width of what it reads."""
    sizes = ("in_features", "out_features")
    settings = _settings(path, {*sizes, "bias", "activation_function"}, _OF_VECTORS)
    for key in sizes:
        if type(settings.get(key)) is not int or settings[key] < 1:
            raise ValueError(f"{path}: {key} must be a number of columns, at least 1. Got {settings.get(key)!r:.80}.")
    bias = settings.get("bias", True)
    if type(bias) is not bool:
        raise ValueError(f"{path}: bias must be true or false. Got {bias!r:.80}.")
    name = settings.get("activation_function", "torch.nn.modules.activation.Tanh")  # the library's own default
    activation = _ACTIVATIONS.get(name) if isinstance(name, str) else None
    if activation is None:
        raise ValueError(
            f"{path} asks for the activation_function {name!r:.80}. Known are {', '.join(_ACTIVATIONS)}. Name the "
            "Transformer's own folder to get its vectors without the rest."
        )
    return DenseConfig(outputs=settings["out_features"], bias=bias, activation=activation), settings["in_features"]


def _encoder_settings(encoder: Path) -> tuple[int | None, bool]:
    """Most tokens, and whether texts are lowercased before the tokenizer."""
    there = (encoder / name for name in _ENCODERS)
    path, settings = next((path for path in there if path.is_file()), encoder / _ENCODER), {}
    if path.is_file():
        # Whether the library computes without padding, as is done here, changes no vector.
        settings = _settings(path, {"max_seq_length", "do_lower_case", "unpad_inputs"}, _OF_TOKENS)
    most = settings.get("max_seq_length")
    if most is None:  # as the library does: the lower of both
        limits = [
            _object(encoder / name).get("model_max_length")
            for name in (
                "tokenizer_config.json",
                "tokenizer/huggingface/tokenizer_config.json",  # of a folder that was imported
            )
            if (encoder / name).is_file()
        ]
        if any((encoder / name).is_file() for name in ("config.json", MODEL_JSON)):
            limits.append(read_model_config(encoder).positions)  # a RoBERTa's config.json counts rows of padding too
        given = [int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < _UNLIMITED]
        most = min(given, default=None)
    if most is not None and (type(most) is not int or most < 5):
        raise ValueError(f"{path}: max_seq_length must be a number of tokens, at least 5. Got {most!r:.80}.")
    return most, bool(settings.get("do_lower_case", False))


def _prompts(path: Path) -> tuple[str, dict[str, str]]:
    """The one that stands before each text, and those that have a name."""
    if not path.is_file():
        return "", {}
    known = {"prompts", "default_prompt_name", "similarity_fn_name", "__version__"}
    settings = _settings(path, known, harmless={"model_type": "SentenceTransformer"})
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts") or {}
    named = {}
    if isinstance(prompts, dict):
        named = {each: text for each, text in prompts.items() if isinstance(text, str) and is_unicode(text)}
    if name is None:
        return "", named
    if not isinstance(name, str) or name not in named:
        raise ValueError(f"{path}: default_prompt_name = {name!r} is none of its prompts, {prompts!r:.80}.")
    return named[name], named


def _settings(path: Path, known: set[str], harmless: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """An object whose every key is known, or is empty, or has the value that changes nothing."""
    settings = _object(path)
    same = harmless or {}
    unknown = [
        key for key, value in settings.items() if key not in known and value and same.get(key, not value) != value
    ]
    if unknown:
        raise ValueError(
            f"{path} has the setting {unknown[0]} = {settings[unknown[0]]!r:.60}, which may change the vectors and is "
            f"not known here. Known are {', '.join(sorted({*known, *same}))}."
        )
    return settings


def _object(path: Path) -> dict[str, Any]:
    settings = _json(path)
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is no object of settings. Got {settings!r:.80}.")
    return settings


def _json(path: Path) -> Any:
    try:
        return parsed_json(read_file(path))
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror}. {MODULES} needs it.") from problem
    except ValueError as problem:
        raise ValueError(f"{path} is damaged: {problem}.") from problem
