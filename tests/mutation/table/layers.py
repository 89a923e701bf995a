"""Products, layers, losses, attention."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

GROUPS = "tests/layers/test_weight_groups.py"
LINEAR = "tests/layers/test_layers.py::test_linear[2x2x2]"
NORMS = "tests/layers/test_layers.py::test_norms[2x2x2]"
TOKENS = "tests/layers/test_layers.py::test_token_model[2x2x2-67]"
LOOKUPS = "tests/layers/test_lookup_ways.py::test_every_way_gives_the_same[2x2x2]"
# Against plain PyTorch: a break that the twin on one device shares is no difference from it.
PLAIN = "tests/test_sabotage.py::test_the_sound_library_agrees[tied_model]"

DRAWN = "tests/layers/test_sampling.py::test_any_cube_draws_the_same_also_where_a_slice_is_empty"
REPLACED = "tests/models/bert/test_electra.py::test_both_compute_what_the_librarys_do"

MUTATIONS = (
    Mutation(
        "drawn-entry-in-slices-of-another-size",
        "tensor3d/layers/sampling.py",
        old="winner[0] * -(-vocab // axis.size)",
        new="winner[0] * (vocab // axis.size)",
        tests=(DRAWN,),
    ),
    Mutation(
        "replaced-where-the-generator-saw-another-token",
        "models/bert/electra.py",
        old="local_rows(seen != original, self.cube)",
        new="local_rows(seen != batch.ids, self.cube)",
        tests=(REPLACED,),
    ),
    Mutation(
        "discriminator-learns-of-unused-slots",
        "models/bert/electra.py",
        old="found = torch.where(counts, losses, 0.0).sum() / tokens",
        new="found = losses.sum() / tokens",
        tests=(REPLACED,),
    ),
    Mutation(
        "matmul-gathers-over-the-other-axis-backward",
        "tensor3d/sharding/matmul.py",
        old="gathering_dc = all_gather(dc, columns)",
        new="gathering_dc = all_gather(dc, rows)",
        tests=(LINEAR,),
    ),
    Mutation(
        "matmul-bias-subtracted",
        "tensor3d/sharding/matmul.py",
        old="                c += shift",
        new="                c -= shift",
        tests=(LINEAR,),
    ),
    Mutation(
        "matmul-bias-gradient-summed-over-the-other-axis",
        "tensor3d/sharding/matmul.py",
        old="cube.over(*vector(other(face)).sum_over)",
        new="cube.over(*vector(face).sum_over)",
        tests=(LINEAR,),
    ),
    Mutation(
        "onednn-without-bias",
        "tensor3d/ops/products.py",
        old="(a, b.t(), bias, ",
        new="(a, b.t(), None, ",
        tests=("tests/ops/test_products.py",),
    ),
    Mutation(
        "onednn-for-small-products",
        "tensor3d/ops/products.py",
        old="rows * inner * columns < _LEAST",
        new="rows * inner * columns < _LEAST_SIDE",
        tests=("tests/ops/test_products.py",),
    ),
    Mutation(
        "matmul-chunks-of-the-floor",
        "tensor3d/sharding/weight_slabs.py",
        old="chunk = -(-dw.shape[0] // x.size)",
        new="chunk = dw.shape[0] // x.size",
        tests=(TOKENS,),
    ),
    Mutation(
        "weight-group-places-overlap",
        "tensor3d/sharding/weight_slabs.py",
        old="        first += member.slab.shard",
        new="        first += member.slab.chunk",
        tests=(GROUPS,),
    ),
    Mutation(
        "weight-group-never-complete",
        "tensor3d/sharding/weight_slabs.py",
        old="            cube.ledger.accumulate_grads(self._sent(task))",
        new="            pass",
        tests=(f"{GROUPS}::test_sums_leave_before_the_pass_ends",),
    ),
    Mutation(
        "kept-weight-not-freed",
        "tensor3d/sharding/matmul.py",
        old="            free_storage(saved_w)",
        new="            pass",
        tests=(f"{GROUPS}::test_a_kept_weight_is_freed_and_gathered_again_for_a_second_pass",),
    ),
    Mutation(
        "matmul-keeps-gathered-weights",
        "tensor3d/sharding/matmul.py",
        old="w_full if ctx.keeps_w else weight",
        new="w_full",
        tests=("tests/layers/test_saved_bytes.py::test_a_product_keeps_exactly_its_share",),
    ),
    Mutation(
        "layout-vector-summed-over-too-few",
        "tensor3d/sharding/param_layout.py",
        old='return Layout(cut=((face, 0),), sum_over=("data", "x", other(face)))',
        new='return Layout(cut=((face, 0),), sum_over=("data", "x"))',
        tests=(NORMS,),
    ),
    Mutation(
        "layout-every-rank-counts",
        "tensor3d/sharding/param_layout.py",
        old="cube.axis(axis).index == 0 or not placements[axis].is_replicate()",
        new="cube.axis(axis).index >= 0 or not placements[axis].is_replicate()",
        tests=("tests/optim/test_clip_grad.py::test_each_block_counts_once",),
    ),
    Mutation(
        "norm-without-eps",
        "tensor3d/layers/norm.py",
        old="rrms = (squares / (x.shape[1] * axis.size) + eps).rsqrt()",
        new="rrms = (squares / (x.shape[1] * axis.size)).rsqrt()",
        tests=("tests/layers/test_narrow_types.py::test_a_row_of_zeros_stays_zero",),
    ),
    Mutation(
        "norm-mean-of-own-columns",
        "tensor3d/layers/norm.py",
        old="means = summing.wait() / (x.shape[1] * axis.size)",
        new="means = summing.wait() / x.shape[1]",
        tests=(NORMS,),
    ),
    Mutation(
        "norm-shift-subtracted",
        "tensor3d/layers/norm.py",
        old="result.add_(local(bias))",
        new="result.sub_(local(bias))",
        tests=(NORMS,),
    ),
    Mutation(
        "norm-sums-of-squares-not-about-the-mean",
        "tensor3d/layers/norm_kernels.py",
        old="squares - columns * rests.square()",
        new="squares",
        tests=("tests/layers/test_narrow_types.py::test_moments_are_about_the_mean_though_it_was_rounded",),
    ),
    Mutation(
        "embedding-chunk-of-the-neighbour",
        "tensor3d/layers/embedding.py",
        old="chunk_bounds(weight.shape[0], y.size, y.index)[0]",
        new="chunk_bounds(weight.shape[0], y.size, y.index)[0] + 1",
        tests=(PLAIN,),
    ),
    Mutation(
        "embedding-gradient-never-handed-in",
        "tensor3d/layers/embedding.py",
        old="        if all(asked_for(ctx, weight)):\n            local_rows, owned = ctx.saved_tensors",
        new="        if not all(asked_for(ctx, weight)):\n            local_rows, owned = ctx.saved_tensors",
        tests=(PLAIN,),
    ),
    Mutation(
        "lookup-ids-by-plane-then-member-of-y",
        "tensor3d/layers/embedding.py",
        old="every.transpose(0, 1).reshape(-1)",
        new="every.reshape(-1)",
        tests=(LOOKUPS,),
    ),
    Mutation(
        "lookup-in-the-first-block-of-the-slab",
        "tensor3d/layers/embedding.py",
        old="self.slab_start + sum(self.heights[: self.x.index])",
        new="self.slab_start",
        tests=(LOOKUPS,),
    ),
    Mutation(
        "lookup-by-the-rows-of-the-own-plane-alone",
        "tensor3d/layers/embedding.py",
        old="largest(ids.shape[0], self.cube.hosts_along_x)",
        new="ids.shape[0]",
        tests=(LOOKUPS,),
    ),
    Mutation(
        "lookup-of-all-planes-without-a-place-in-the-order",
        "tensor3d/layers/embedding.py",
        old="        if position is not PassPosition.UNORDERED:",
        new="        if position is None:",
        tests=("tests/distributed/test_weight_prefetch.py::test_nothing_is_gathered_ahead_of_a_lookup_before_it",),
    ),
    Mutation(
        "gather-beside-weights-that-are-kept",
        "tensor3d/sharding/weight_slabs.py",
        old="        cube.ahead.pass_kept(weight, rows, dtype)",
        new="        pass",
        tests=(
            "tests/distributed/test_weight_prefetch.py::test_nothing_is_gathered_while_kept_weights_have_their_turn",
        ),
    ),
    Mutation(
        "loss-label-of-the-next-slice",
        "tensor3d/layers/loss.py",
        old="places_in(labels, first, last - first)",
        new="places_in(labels, first, last - first + 1)",
        tests=(TOKENS,),
    ),
    Mutation(
        "loss-gradient-upside-down",
        "tensor3d/layers/loss.py",
        old="result.scatter_add_(1, target, -owned.to(result.dtype))",
        new="result.scatter_add_(1, target, owned.to(result.dtype))",
        tests=("tests/layers/test_layers.py::test_cross_entropy_equals_torchs",),
        quick=True,
    ),
    Mutation(
        "loss-ignored-rows-count",
        "tensor3d/layers/loss.py",
        old="return losses.masked_fill(ignored, 0), ignored",
        new="return losses, ignored",
        tests=("tests/layers/test_layers.py::test_cross_entropy_equals_torchs",),
    ),
    Mutation(
        "loss-prediction-inside-the-slice",
        "tensor3d/layers/loss.py",
        old=".long() + winner * -(-vocab // statistics.shape[0])",
        new=".long() + winner * (vocab // statistics.shape[0])",
        tests=(TOKENS,),
    ),
    Mutation(
        "likeliest-logit-instead-of-probability",
        "tensor3d/layers/heads.py",
        old="best[:, :k] - log_sum",
        new="best[:, :k]",
        tests=("tests/models/bert/test_text_batches.py::test_in_fp32_too", "tests/tools/predict/test_predictor.py"),
    ),
    Mutation(
        "narrow-head-without-bias",
        "tensor3d/layers/heads.py",
        old="        if self.bias is None:\n            return logits\n",
        new="        return logits\n",
        tests=(TOKENS,),
    ),
    Mutation(
        "attention-heads-by-the-wrong-axis",
        "tensor3d/layers/attention.py",
        old="q, k, v = qkv.unbind(2)",
        new="k, q, v = qkv.unbind(2)",
        tests=("tests/layers/test_mlp.py::test_attention_equals_plain_pytorch", "tests/models/test_gpt.py"),
    ),
    Mutation(
        "attention-drops-in-evaluation",
        "tensor3d/layers/attention.py",
        old="dropout=self.dropout if self.training else 0.0",
        new="dropout=self.dropout",
        tests=("tests/attention/test_attention.py::test_the_layer_drops_in_training_alone",),
        quick=True,
    ),
    Mutation(
        "rotary-turns-back",
        "tensor3d/ops/rotary.py",
        old="return _turned(x, positions, base, 1.0)",
        new="return _turned(x, positions, base, -1.0)",
        tests=("tests/ops/test_rotary.py",),
    ),
    Mutation(
        "rotary-gradient-turns-on",
        "tensor3d/ops/rotary.py",
        old="_turned(gradient, positions, ctx.base, -1.0)",
        new="_turned(gradient, positions, ctx.base, 1.0)",
        tests=("tests/ops/test_rotary.py::test_the_gradient_is_exact",),
    ),
    Mutation(
        "sequences-positions-go-on",
        "tensor3d/batches/sequences.py",
        old="(torch.arange(self.rows) - starts)",
        new="torch.arange(self.rows)",
        tests=("tests/ops/test_rotary.py::test_positions_start_again_in_each_sequence",),
    ),
    Mutation(
        "dropout-keeps-its-share",
        "tensor3d/ops/dropout.py",
        old=">= _bound(p) - _VALUES // 2",
        new="< _bound(p) - _VALUES // 2",
        tests=("tests/ops/test_dropout.py::test_it_leaves_its_share",),
    ),
    Mutation(
        "dropout-without-gain",
        "tensor3d/ops/dropout.py",
        old="return 0.0 if p == 1 else _VALUES / (_VALUES - _bound(p))",
        new="return 0.0 if p == 1 else 1.0",
        tests=("tests/ops/test_dropout.py::test_the_mean_stays_exactly",),
    ),
    Mutation(
        "attention-block-sees-less-than-its-window",
        "tensor3d/batches/length_groups.py",
        old="first = np.maximum(0, low - near)",
        new="first = np.maximum(0, low - near + 1)",
        tests=("tests/attention/test_windows.py",),
    ),
    Mutation(
        "block-pre-norm-without-residual",
        "tensor3d/layers/transformer.py",
        old="return self._added(x, self.mlp(self.mlp_norm(x)), self.dropout)",
        new="return self._added(x, self.mlp(x), self.dropout)",
        tests=(
            "tests/models/bert/test_model_modern.py::test_single_device_equals_plain_pytorch",
            "tests/models/test_gpt.py",
        ),
    ),
)
