"""Which families there are, and what belongs to which."""

from __future__ import annotations

from typing import Any

import pytest

from models.bert import BertConfig
from tensor3d import CubeShape
from tensor3d.attention.relative import LogBuckets
from tests.models.toy import FAMILIES


def config(**changes: Any) -> BertConfig:
    return BertConfig(**{"layers": 1, "hidden": 64, "heads": 8, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "albert"}, "family must be one of bert, roberta, .*modernbert, eurobert, .*Got 'albert'"),
        (
            {"types": 0},
            'types must be at least 1, but of the families "mpnet", .*"eurobert", .*"deberta-v2", "gte". Got 0',
        ),
        ({"family": "modernbert", "types": 0}, 'family="modernbert" has encoder="modern". Got encoder="classic"'),
        ({"family": "modernbert", "encoder": "modern"}, "has no token types. Got types=2. Set types = 0"),
        ({"pooling": "max"}, "pooling must be one of cls, mean, last, score, late. Got 'max'"),
        ({"pooling": "mean"}, 'pooling="mean" belongs to family="modernbert" and .*"qwen3". Got family=\'bert\''),
        ({"causal": True}, "causal belongs to family=\"qwen3\". Got causal=True with family='bert'"),
        ({**FAMILIES["qwen"], "causal": True}, 'causal=True needs pooling="last" or "mean", for .* Got "cls"'),
        (
            {"family": "modernbert", "encoder": "modern", "types": 0, "pooling": "late"},
            'pooling="late" belongs to family="eurobert". Got family=\'modernbert\'',
        ),
        ({"kv_heads": 2}, 'kv_heads belongs to encoder="modern". Got kv_heads=2'),
        ({"encoder": "modern", "kv_heads": 3}, "kv_heads must divide heads=8. Got 3"),
        (
            {"family": "modernbert", "encoder": "modern", "types": 0, "kv_heads": 2},
            'family="modernbert" has as many heads of keys as of queries. Got kv_heads=2',
        ),
        ({"family": "eurobert", "types": 0}, 'family="eurobert" has encoder="modern". Got encoder="classic"'),
        ({"family": "eurobert", "types": 0, "encoder": "modern"}, "Got tied=True. Set tied = false"),
        (
            {"family": "eurobert", "types": 0, "encoder": "modern", "tied": False, "window": 4},
            'family="eurobert" has no window: all layers see whole sequences. Got window=4',
        ),
        ({"head_dim": 16}, 'head_dim belongs to family="gemma3_text" or "qwen3". Got head_dim=16 with family='),
        ({**FAMILIES["gemma"], "head_dim": 0}, "head_dim must be at least 1. Got 0"),
        ({**FAMILIES["gemma"], "head_dim": 7}, "so head_dim must be even. Got 7"),
        ({**FAMILIES["gemma"], "activation": "gelu"}, "has a gate of gelu_tanh. Got activation='gelu'"),
        ({"family": "deberta-v2"}, "has no token types. Got types=2. Set types = 0"),
        ({"family": "deberta-v2", "types": 0, "norm": "pre"}, "norms after each block. Got norm='pre'. Leave it out"),
        ({"family": "deberta-v2", "types": 0, "encoder": "modern"}, "family='deberta-v2' has encoder=\"classic\""),
        ({"family": "deberta-v2", "types": 0, "position_buckets": 0}, "position_buckets must be at least 1. Got 0"),
        ({"family": "deberta-v2", "types": 0, "positions": 3}, "position_buckets=0 with positions=3: .* Got 0"),
        ({"conv_kernel": 3}, 'conv_kernel belongs to family="deberta-v2". Got conv_kernel=3 with'),
        ({"family": "deberta-v2", "types": 0, "conv_kernel": 4}, "must be odd and at least 3. Got 4"),
        ({"family": "deberta-v2", "types": 0, "conv_kernel": 3, "layers": 1}, "needs at least 2 layers.*Got layers=1"),
        ({"position_buckets": 8}, 'position_buckets belongs to family="deberta-v2". Got position_buckets=8 with'),
        ({"local_rotary_base": 5.0}, 'local_rotary_base belongs to encoder="modern"'),
        ({"encoder": "modern", "local_rotary_base": 5.0}, "is that of layers with a window, but there is no window"),
        ({"encoder": "modern", "window": 4, "local_rotary_base": 0.0}, "local_rotary_base must be above 0"),
        ({"family": "distilbert"}, "has no token types. Got types=2. Set types = 0"),
        ({"family": "roberta"}, "first_position must be at least 1, the id of padding and one more.*Got 0"),
        (
            {"family": "xlm-roberta-xl", "first_position": 2},
            "norms before each block. Got norm='post'. Set norm = \"pre\"",
        ),
        ({"family": "megatron-bert"}, "family=\"megatron-bert\" has its norms before each block. Got norm='post'"),
        (
            {"family": "mpnet", "types": 0, "first_position": 1},
            "has first_position=2, for padding has the id 1 .*Got first_position=1",
        ),
        ({"family": "mpnet", "first_position": 2}, "has no token types. Got types=2"),
        ({"first_position": 2}, "first_position must be 0 of family='bert'. Got 2"),
        ({"first_position": -1}, "first_position must be 0 of family='bert'. Got -1"),
        ({"embedding": 32}, "embedding belongs to family=\"electra\". Got embedding=32 with family='bert'"),
        ({"family": "electra", "embedding": 0}, "embedding must be at least 1. Got 0"),
        ({"family": "electra", "encoder": "modern"}, "family='electra' has encoder=\"classic\""),
    ],
    ids=str,
)
def test_what_belongs_to_another_family(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_narrow_embeddings_divide_too() -> None:
    narrow = config(family="electra", embedding=6)
    narrow.check(CubeShape(x=4, y=2))
    with pytest.raises(ValueError, match=r"embedding must divide by z=4. Got 6"):
        narrow.check(CubeShape(z=4))


def test_heads_of_keys_divide_too() -> None:
    grouped = config(encoder="modern", kv_heads=2, inner=64)
    grouped.check(CubeShape(y=2))
    with pytest.raises(ValueError, match=r"kv_heads must divide by y=4. Got 2"):
        grouped.check(CubeShape(y=4))


def test_rows_of_positions() -> None:
    assert config(positions=512).position_rows == 512
    assert config(family="roberta", first_position=2, positions=512).position_rows == 514
    assert config(encoder="modern").position_rows == 0


def test_buckets_of_distances() -> None:
    """Of the published sizes 256; shorter models have half as many as positions, so that far ones are told apart."""
    for positions, span in ((512, 256), (8192, 256), (128, 64), (24, 12), (7, 2)):
        found = config(family="deberta-v2", types=0, positions=positions)
        assert found.distance_buckets == LogBuckets(span=span, farthest=positions)
        assert found.position_rows == 0
    assert config().distance_buckets is None
    with pytest.raises(ValueError, match=r"must divide by x \* y = 16. Got 8"):
        config(family="deberta-v2", types=0, position_buckets=4).check(CubeShape(x=4, y=4))
