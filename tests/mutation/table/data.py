"""Data: pairs, masks, batches, epochs, steps."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        "masking-share-rounded-down",
        "tensor3d/data/masking.py",
        old="np.minimum(np.rint(share * lengths)",
        new="np.minimum(np.floor(share * lengths)",
        tests=("tests/data/test_masking.py",),
    ),
    Mutation(
        "masking-half-stay",
        "tensor3d/data/masking.py",
        old="np.where(fate < rules.mask_replace + rules.random_replace, other, labels)",
        new="np.where(fate < rules.mask_replace + rules.random_replace / 2, other, labels)",
        tests=("tests/data/test_masking.py",),
    ),
    Mutation(
        "masking-labels-are-what-is-seen",
        "tensor3d/data/masking.py",
        old="return Masked(ids=seen, rows=rows, labels=labels)",
        new="return Masked(ids=seen, rows=rows, labels=seen[rows])",
        tests=("tests/data/test_masking.py",),
    ),
    Mutation(
        "masking-share-of-the-first-step",
        "tensor3d/data/loader.py",
        old="content, step=plan.index)",
        new="content, step=0)",
        tests=("tests/data/test_loader.py",),
    ),
    Mutation(
        "masking-same-in-every-epoch",
        "tensor3d/data/masking.py",
        old="key = mix(seed, epoch, _STREAM)",
        new="key = mix(seed, 0, _STREAM)",
        tests=("tests/data/test_masking.py",),
    ),
    Mutation(
        "pairs-labels-swapped",
        "tensor3d/data/sampling.py",
        old="np.where(at_random, IS_RANDOM, IS_NEXT)",
        new="np.where(at_random, IS_NEXT, IS_RANDOM)",
        tests=("tests/data/test_sampling.py",),
    ),
    Mutation(
        "pairs-other-document-may-be-the-same",
        "tensor3d/data/sampling.py",
        old="rng.integers(1, max(2, total), size=count)",
        new="rng.integers(0, max(2, total), size=count)",
        tests=("tests/data/test_sampling.py",),
    ),
    Mutation(
        "pairs-one-token-too-long",
        "tensor3d/data/sampling.py",
        old="np.maximum(room - a_full, room // 2)",
        new="np.maximum(room - a_full, (room + 2) // 2)",
        tests=("tests/data/test_sampling.py",),
    ),
    Mutation(
        "batch-positions-go-on-in-a-pack",
        "tensor3d/data/packed_batch.py",
        old="positions[row, :tokens] = ranges(np.zeros_like(pack.lengths), pack.lengths)",
        new="positions[row, :tokens] = np.arange(tokens)",
        tests=("tests/data/test_packed_batch.py::test_a_plane_of_two_packs_by_hand",),
        quick=True,
    ),
    Mutation(
        "batch-masked-rows-of-the-pack",
        "tensor3d/data/packed_batch.py",
        old="masked = [row + pack.masked for row, pack",
        new="masked = [0 * row + pack.masked for row, pack",
        tests=("tests/data/test_packed_batch.py::test_a_plane_of_two_packs_by_hand",),
    ),
    Mutation(
        "batch-tail-is-no-sequence",
        "tensor3d/data/packed_batch.py",
        old="return [*lengths, tail] if tail else lengths",
        new="return lengths",
        tests=("tests/data/test_packed_batch.py",),
    ),
    Mutation(
        "batch-packs-of-the-first-member",
        "tensor3d/data/packed_batch.py",
        old="own = packs[slice_index * k : (slice_index + 1) * k]",
        new="own = packs[:k]",
        tests=("tests/data/test_packed_batch.py::test_members_of_z_own_their_packs_and_share_the_rest",),
    ),
    Mutation(
        "step-last-epoch-off-by-one",
        "tensor3d/data/step_schedule.py",
        old="return (self.first_pack(step + 1) - 1) // self._data.packs_per_epoch",
        new="return self.first_pack(step + 1) // self._data.packs_per_epoch",
        tests=("tests/data/test_step_schedule.py",),
    ),
    Mutation(
        "step-tokens-of-its-slots",
        "tensor3d/data/step_schedule.py",
        old="tokens=int(tokens.sum()),",
        new="tokens=len(number) * self._layout.capacity,",
        tests=("tests/data/test_loader.py::test_totals_are_those_of_the_whole_step",),
    ),
    Mutation(
        "step-sequences-are-targets",
        "tensor3d/data/step_schedule.py",
        old="sequences=int(sequences.sum()),",
        new="sequences=int(targets.sum()),",
        tests=("tests/data/test_loader.py::test_totals_are_those_of_the_whole_step",),
    ),
    Mutation(
        "step-squares-of-the-sum",
        "tensor3d/data/step_schedule.py",
        old="squares=int(squares.sum()),",
        new="squares=int(tokens.sum()) ** 2,",
        tests=("tests/data/test_step_schedule.py::test_squares_of_a_step_are_those_of_its_sequences",),
    ),
    Mutation(
        "step-fill-of-one-slot-more",
        "tensor3d/data/loader.py",
        old="fill=plan.tokens / (self._global_batch * plan.capacity),",
        new="fill=plan.tokens / (self._global_batch * plan.capacity + 1),",
        tests=("tests/data/test_loader.py::test_totals_are_those_of_the_whole_step",),
    ),
)
