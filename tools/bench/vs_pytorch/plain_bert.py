"""The classic encoder of `models.bert` with both heads of pre-training, on whole batches of sequences of one length.

B sequences, L tokens of each, H hidden size, R masked tokens of the batch, V vocabulary, h heads, d = H/h

Module and parameter names are those of `models.bert`, so weights go from one to the other by name; the projection's
weight, which it shares with the embedding, is here a parameter of two modules. Nothing here knows of ranks. A part that
PyTorch's tensor parallelism must see whole (its inputs change hands at module borders) is a module of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.bert import BertConfig
from tensor3d.ops.activations import activated

# --- Weights of `models.bert` in the plain model ----------------------------------------------------------------------


@torch.no_grad()
def copy_weights(plain: nn.Module, ours: nn.Module) -> None:
    """Gives the plain model the weights of ours, which is on one device. A tied weight comes once.

    Raises:
        ValueError: they do not have the same parameters.
    """
    theirs = dict(ours.named_parameters())
    own = dict(plain.named_parameters())
    if own.keys() != theirs.keys():
        raise ValueError(f"the models differ in {sorted(own.keys() ^ theirs.keys())}. Make them of the same config.")
    for name, parameter in own.items():
        parameter.copy_(theirs[name])


# --- The classic encoder of `models.bert` with both heads of pre-training, on whole batches of sequences --------------


class PlainAttention(nn.Module):
    """Self-attention over whole sequences. Rows of the fused QKV weight are ordered (head, q/k/v, head dimension)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.head_dim = config.head_size
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, H) to the same. A rank that holds a part of QKV's rows has fewer heads: they are counted, not told."""
        qkv = self.qkv(x)
        q, k, v = qkv.view(*qkv.shape[:2], -1, 3, self.head_dim).permute(3, 0, 2, 1, 4).unbind(0)  # (B, h, L, d)
        mixed = F.scaled_dot_product_attention(q, k, v)
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class PlainMLP(nn.Module):
    """Up, activation, down."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = nn.Linear(config.hidden, config.inner_size)
        self.down = nn.Linear(config.inner_size, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(activated(self.up(x), self.activation))
        return down


class PlainLayer(nn.Module):
    """A transformer layer with LayerNorm after each residual (Devlin et al. 2018, §3). No dropout.

    Raises:
        ValueError: a config whose mathematics this is not.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        check_plain(config)
        self.attention = PlainAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.eps)
        self.mlp = PlainMLP(config)
        self.mlp_norm = nn.LayerNorm(config.hidden, eps=config.eps)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, H) to the same."""
        x = self.attention_norm(x + self.attention(x))
        result: Tensor = self.mlp_norm(x + self.mlp(x))
        return result


class PlainEmbeddings(nn.Module):
    """Token, position and type embeddings, LayerNorm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.positions, config.hidden)
        self.types = nn.Embedding(config.types, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=config.eps)

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        """Ids (B, L), positions (L,) and types (B, L) to (B, L, H)."""
        h: Tensor = self.norm(self.tokens(ids) + self.positions(positions) + self.types(types))
        return h


class PlainEncoder(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = PlainEmbeddings(config)
        self.layers = nn.ModuleList(PlainLayer(config) for _ in range(config.layers))

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        """(B, L) ids and types to (B, L, H)."""
        h = self.embeddings(ids, torch.arange(ids.shape[1], device=ids.device), types)
        for layer in self.layers:
            h = layer(h)
        result: Tensor = h
        return result


class Chosen(nn.Module):
    """The rows that the heads look at. Has no parameters."""

    def forward(self, h: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        """(B, L, H) and row numbers (R,) of B*L to the masked rows (R, H) and the first of each sequence (B, H)."""
        return h.flatten(0, 1).index_select(0, masked), h[:, 0]


class PlainMaskedLMHead(nn.Module):
    """Dense, activation, LayerNorm, and the projection, whose weight `PlainBert` ties to the embedding's."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=config.eps)
        self.projection = nn.Linear(config.hidden, config.vocab)

    def forward(self, rows: Tensor) -> Tensor:
        """(R, H) to logits (R, V)."""
        logits: Tensor = self.projection(self.norm(activated(self.dense(rows), self.activation)))
        return logits


class PlainPooler(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)

    def forward(self, rows: Tensor) -> Tensor:
        """(B, H) to the same."""
        return torch.tanh(self.dense(rows))


class PlainBert(nn.Module):
    """The encoder with a masked-LM head on the masked tokens alone and a next-sentence head.

    Raises:
        ValueError: a config whose mathematics this is not.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        check_plain(config)
        self.bert = PlainEncoder(config)
        self.chosen = Chosen()
        self.masked_lm = PlainMaskedLMHead(config)
        self.pooler = PlainPooler(config)
        self.next_sentence = nn.Linear(config.hidden, 2)
        self.masked_loss = nn.CrossEntropyLoss()
        self.tie()

    def tie(self) -> None:
        """Makes the projection's weight the embedding's: again after something has put others in their places."""
        self.masked_lm.projection.weight = self.bert.embeddings.tokens.weight

    def forward(self, ids: Tensor, types: Tensor, masked: Tensor, masked_labels: Tensor, next_labels: Tensor) -> Tensor:
        """The loss, in nats: the mean over masked tokens and that over sequences, added up.

        Args:
            ids, types: int64 (B, L).
            masked: int64 (R,): rows of B*L.
            masked_labels: int64 (R,): what stood there.
            next_labels: int64 (B,).
        """
        masked_rows, first_rows = self.chosen(self.bert(ids, types), masked)
        loss: Tensor = self.masked_loss(_wide(self.masked_lm(masked_rows)), masked_labels)
        return loss + F.cross_entropy(_wide(self.next_sentence(self.pooler(first_rows))), next_labels)


def _wide(logits: Tensor) -> Tensor:
    """Losses are computed in fp32 at least, as ours are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def check_plain(config: BertConfig) -> None:
    """Raises ValueError unless the plain model computes what `models.bert` does."""
    if config.encoder != "classic" or config.norm != "post" or config.dropout or config.attention_dropout:
        raise ValueError(
            "the plain model is the classic encoder with norms after its blocks and no dropout. Got "
            f"encoder={config.encoder!r}, norm={config.norm!r}, dropout={config.dropout} and "
            f"attention_dropout={config.attention_dropout}."
        )


# --- BERT in plain PyTorch: what PyTorch's own parallelism splits, to be compared with `models.bert` on a cube --------
