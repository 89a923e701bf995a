"""Torch's order of rows in a fused weight, and ours."""

from __future__ import annotations

import pytest
import torch

from tensor3d import Attention3D, Cube, GatedMLP3D, Sequences, from_fused_rows, to_fused_rows


def test_two_heads_by_eye_and_back() -> None:
    """Rows of q are 0 to 3, two heads of two each; those of k 4 to 7, of v 8 to 11."""
    order = to_fused_rows(torch.arange(12), parts=3, groups=2)
    assert order.tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    weight = torch.randn(12, 5)
    fused = to_fused_rows(weight, parts=3, groups=2)
    assert torch.equal(fused, weight[order])
    assert torch.equal(from_fused_rows(fused, parts=3, groups=2), weight)


def test_attention_and_gated_mlp_compute_what_torch_does_from_mapped_weights() -> None:
    cube, h = Cube(1, 1, 1), torch.randn(6, 8)
    twin, ours = torch.nn.MultiheadAttention(8, 2), Attention3D(8, 2, cube)
    gate, up, down = torch.nn.Linear(8, 12, False), torch.nn.Linear(8, 12, False), torch.nn.Linear(12, 8, False)
    mlp = GatedMLP3D(8, cube, 12)
    with torch.no_grad():
        twin.in_proj_bias.uniform_()
        ours.qkv.weight.copy_(to_fused_rows(twin.in_proj_weight, parts=3, groups=2))
        ours.qkv.bias.copy_(to_fused_rows(twin.in_proj_bias, parts=3, groups=2))
        mlp.gate_up.weight.copy_(to_fused_rows(torch.cat([gate.weight, up.weight]), parts=2, groups=12))
        mlp.down.weight.copy_(down.weight)
    ours.out.load_state_dict(twin.out_proj.state_dict())
    torch.testing.assert_close(ours(h, Sequences.from_lengths([6])), twin(h, h, h)[0])
    torch.testing.assert_close(mlp(h), down(torch.nn.functional.silu(gate(h)) * up(h)))


def test_groups_of_queries_by_eye_and_back() -> None:
    """Rows of q are 0 to 7, four heads of two each; those of k 8 to 11, two heads, of v 12 to 15."""
    order = to_fused_rows(torch.arange(16), parts=(2, 1, 1), groups=2)
    assert order.tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]
    weight = torch.randn(16, 5)
    fused = to_fused_rows(weight, parts=(2, 1, 1), groups=2)
    assert torch.equal(fused, weight[order])
    assert torch.equal(from_fused_rows(fused, parts=(2, 1, 1), groups=2), weight)
    with pytest.raises(ValueError, match=r"parts=\(3, 1, 1\) and groups=2.*kv_heads"):
        to_fused_rows(weight, parts=(3, 1, 1), groups=2)


def test_attention_with_fewer_heads_of_keys_computes_what_torch_does_from_mapped_weights() -> None:
    h, ours = torch.randn(6, 8), Attention3D(8, 4, Cube(1, 1, 1), kv_heads=2, bias=False)
    q, k, v = (torch.nn.Linear(8, columns, False) for columns in (8, 4, 4))
    with torch.no_grad():
        stacked = torch.cat([q.weight, k.weight, v.weight])
        ours.qkv.weight.copy_(to_fused_rows(stacked, parts=(2, 1, 1), groups=2))
    heads = [t.unflatten(-1, (-1, 2)).transpose(0, 1) for t in (q(h), k(h), v(h))]
    mixed = torch.nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True).transpose(0, 1).flatten(1)
    torch.testing.assert_close(ours(h, Sequences.from_lengths([6])), mixed @ ours.out.weight.t())


@pytest.mark.parametrize("groups", [5, 0])
def test_rows_that_do_not_divide_are_refused(groups: int) -> None:
    with pytest.raises(ValueError, match=rf"shape \(12, 4\).*parts=3 and groups={groups}.*groups=heads of Attention3D"):
        to_fused_rows(torch.ones(12, 4), parts=3, groups=groups)
