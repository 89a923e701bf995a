"""Folders of RoBERTa, MPNet, DistilBERT and ModernBERT as the library leaves them, small, with random weights; and what
becomes of a folder that comes in and goes out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.tools.corpus.tokenized import PIECES, write_vocabulary
from tools.convert.__main__ import main as convert

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 42,
    "initializer_range": 0.3,
}


def roberta_tokenizer(texts: list[str]) -> Any:
    """Byte-level BPE, <s> A </s></s> B </s>, and a mask that takes the space before it, as the published one does."""
    import tokenizers
    import transformers

    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator(texts * 3, trainer)
    model = json.loads(made.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    mask = transformers.AddedToken("<mask>", lstrip=True)
    return transformers.RobertaTokenizer(vocab=model["vocab"], merges=merges, mask_token=mask)


def roberta(folder: Path, kind: str, tokenizer: Any, **changes: Any) -> Any:
    """The model, and a folder of it with its tokenizer."""
    import transformers

    sizes = {"vocab_size": len(tokenizer), "intermediate_size": 48, "type_vocab_size": 1, **SIZES, **changes}
    torch.manual_seed(2)
    model = getattr(transformers, kind)(transformers.RobertaConfig(**sizes)).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


OF_MPNET = ("<s>", "<pad>", "</s>", "<unk>")


def write_mpnet_tokenizer(folder: Path, pieces: Sequence[str] = PIECES) -> list[str]:
    """The files of MPNet's tokenizer: BERT's pieces with its special tokens among them, which have no role there, and
    special tokens of RoBERTa's kind. Returns all of them by their ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    every = [*OF_MPNET, *pieces, "<mask>"]
    made = Tokenizer(models.WordPiece({piece: number for number, piece in enumerate(every)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix="##")
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), True, False)
    names = ("<s>", "<pad>", "</s>", "[UNK]", "<mask>")
    made.add_special_tokens([AddedToken(name, lstrip=name == "<mask>", special=True) for name in names])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    roles = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "[UNK]", "mask": "<mask>"}
    told = {"tokenizer_class": "MPNetTokenizer", "do_lower_case": True, "model_max_length": 512}
    told |= {f"{role}_token": name for role, name in roles.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return every


OF_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|box_start|>")


def write_qwen_tokenizer(
    folder: Path,
    *,
    pair: str = "$A:0 $B:1",
    name: str | None = "Qwen2Tokenizer",
    change: Callable[[dict[str, Any]], None] = lambda plan: None,
    **settings: Any,
) -> Any:
    """The files of a small tokenizer as Qwen3-Embedding's: bytes, NFC, a template that puts <|endoftext|> behind a text
    and nothing before it. Returns it as the tokenizers library has it.

    Args:
        pair: template of pairs; the library's own by default, as of a template that was written for single texts.
        name: of the class; None: it is not told.
        change: what else is to be in the tokenizer.json.
        settings: of the tokenizer_config.json.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    parts = Regex(words + r"|\s*[\r\n]+|\s+(?!\S)|\s+")
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "\u0120the"]
    merges = [("t", "h"), ("th", "e"), ("\u0120", "the")]
    made: Any = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    made.normalizer, made.decoder = normalizers.NFC(), decoders.ByteLevel()
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(parts, "isolated"), of_bytes])
    made.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in OF_QWEN])
    made.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    end = [(OF_QWEN[0], len(pieces))]
    template = processors.TemplateProcessing(single=f"$A {OF_QWEN[0]}", pair=pair, special_tokens=end)
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    plan = json.loads(made.to_str())
    change(plan)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(plan))
    told = {
        **{"tokenizer_class": name, "add_bos_token": False, "add_prefix_space": False, "model_max_length": 131072},
        **{"bos_token": None, "eos_token": OF_QWEN[2], "pad_token": OF_QWEN[0], "unk_token": None},
        "added_tokens_decoder": {token.pop("id"): token for token in json.loads(made.to_str())["added_tokens"]},
        "additional_special_tokens": OF_QWEN[1:],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**told, **settings}))
    return Tokenizer.from_str(json.dumps(plan))


def mpnet(folder: Path, kind: str, **changes: Any) -> tuple[Any, Any]:
    """The model, its tokenizer, and a folder of both."""
    import transformers

    sizes = {"vocab_size": len(write_mpnet_tokenizer(folder)), "intermediate_size": 48, **SIZES, **changes}
    torch.manual_seed(2)
    model = getattr(transformers, kind)(transformers.MPNetConfig(**sizes)).eval()
    model.save_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def distilbert(folder: Path, kind: str, **changes: Any) -> tuple[Any, Any]:
    """The model, its tokenizer, and a folder of both."""
    import transformers

    sizes = {"vocab_size": len(PIECES), "hidden_dim": 48, **SIZES, **changes}
    torch.manual_seed(2)
    model = getattr(transformers, kind)(transformers.DistilBertConfig(**sizes)).eval()
    return model, _with_word_pieces(folder, model)


def modernbert(folder: Path, kind: str, **changes: Any) -> tuple[Any, Any]:
    """The same, with windows of 4 to each side."""
    import transformers

    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
    sizes = {"vocab_size": len(PIECES), "intermediate_size": 48, "pad_token_id": 0, "local_attention": 8, **SIZES}
    torch.manual_seed(2)
    model = getattr(transformers, kind)(transformers.ModernBertConfig(**{**sizes, **ids, **changes})).eval()
    return model, _with_word_pieces(folder, model)


def _with_word_pieces(folder: Path, model: Any) -> Any:
    import transformers

    model.save_pretrained(folder)
    tokenizer = transformers.DistilBertTokenizer(str(write_vocabulary(folder / "vocab.txt")), do_lower_case=True)
    tokenizer.save_pretrained(folder)
    return tokenizer


def there_and_back(folder: Path) -> Path:
    """The folder as one of ours; what is written of that is what it was."""
    import transformers

    ours, back = folder.with_name(f"{folder.name}-ours"), folder.with_name(f"{folder.name}-back")
    assert convert(["from-hf", str(folder), str(ours)]) == 0
    assert convert(["to-hf", str(ours), str(back)]) == 0
    weights, again = load_file(folder / "model.safetensors"), load_file(back / "model.safetensors")
    assert weights.keys() == again.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (back / name).read_bytes() == (folder / name).read_bytes()
    kind = json.loads((back / "config.json").read_text())["architectures"][0]
    _, told = getattr(transformers, kind).from_pretrained(back, output_loading_info=True)
    assert not any(told.values()), told
    return ours
