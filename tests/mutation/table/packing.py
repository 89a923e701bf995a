"""Packing: planners, what a plan says of itself, balance of work."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        "plan-fill-of-one-pack-more",
        "tensor3d/packing/plan.py",
        old="return self.tokens / (self.packs * self.capacity)",
        new="return self.tokens / ((self.packs + 1) * self.capacity)",
        tests=("tests/packing/test_plan.py::test_what_a_plan_counts",),
        quick=True,
    ),
    Mutation(
        "plan-packing-factor-upside-down",
        "tensor3d/packing/plan.py",
        old="return self.sequences / self.packs",
        new="return self.packs / self.sequences",
        tests=("tests/packing/test_plan.py::test_what_a_plan_counts",),
    ),
    Mutation(
        "plan-tokens-without-repeats",
        "tensor3d/packing/plan.py",
        old="sum(strategy.repeat * sum(strategy.lengths) for strategy in self.strategies)",
        new="sum(sum(strategy.lengths) for strategy in self.strategies)",
        tests=("tests/packing/test_plan.py::test_what_a_plan_counts",),
    ),
    Mutation(
        "plan-check-leaves-the-longest-out",
        "tensor3d/packing/plan.py",
        old="for length in range(1, self.capacity + 1):",
        new="for length in range(1, self.capacity):",
        tests=("tests/packing/test_plan.py",),
    ),
    Mutation(
        "bound-of-the-floor",
        "tensor3d/packing/plan.py",
        old="needs = [-(-tokens // limits.capacity)",
        new="needs = [tokens // limits.capacity",
        tests=("tests/packing/test_plan.py::test_the_token_bound_is_rounded_up",),
    ),
    Mutation(
        "best-fit-takes-no-exact-fit",
        "tensor3d/packing/bin_groups.py",
        old="for space in self._growing if space >= length)",
        new="for space in self._growing if space > length)",
        tests=("tests/packing/test_planners_lpfhp.py",),
    ),
    Mutation(
        "best-fit-one-sequence-too-many",
        "tensor3d/packing/bin_groups.py",
        old="copies = min(free // length, limits.max_sequences - len(filling.lengths), count)",
        new="copies = min(free // length, limits.max_sequences - len(filling.lengths) + 1, count)",
        tests=("tests/packing/test_planners_lpfhp.py::test_the_number_of_sequences_is_limited",),
    ),
    Mutation(
        "best-fit-spends-no-budget",
        "tensor3d/packing/bin_groups.py",
        old="cost = filling.cost + copies * self._limits.cost_of(length)",
        new="cost = filling.cost",
        tests=("tests/packing/test_planners_lpfhp.py::test_the_budget_is_a_second_limit",),
    ),
    Mutation(
        "packs-of-a-step-rounded-down",
        "tensor3d/packing/scaling_rules.py",
        old="math.floor(sequences / packing_factor / multiple_of + 0.5)",
        new="math.floor(sequences / packing_factor / multiple_of)",
        tests=("tests/packing/test_scaling_rules.py",),
    ),
    Mutation(
        "packed-betas-of-the-root",
        "tensor3d/packing/scaling_rules.py",
        old="float(second**packing_factor)",
        new="float(second ** (1 / packing_factor))",
        tests=("tests/packing/test_scaling_rules.py::test_betas_forget_as_fast_per_sequence",),
    ),
    Mutation(
        "even-packs-longest-last",
        "tensor3d/packing/one_batch.py",
        old='np.argsort(-lengths, kind="stable")',
        new='np.argsort(lengths, kind="stable")',
        tests=("tests/packing/test_one_batch_even.py",),
    ),
    Mutation(
        "work-without-squares",
        "tensor3d/packing/balance.py",
        old="self.per_token * tokens + self.per_square * squares",
        new="self.per_token * tokens",
        tests=("tests/packing/test_balance.py::test_work_is_linear_in_tokens_and_squares",),
    ),
    Mutation(
        "window-pairs-off-by-one",
        "tensor3d/packing/balance.py",
        old="beyond * (beyond + 1))",
        new="beyond * (beyond - 1))",
        tests=("tests/models/bert/cost_model/test_flops.py::test_pairs_within_a_window_are_those_that_attend",),
    ),
    Mutation(
        "imbalance-of-the-lightest",
        "tensor3d/packing/balance.py",
        old="means = loads.mean(axis=0)",
        new="means = loads.min(axis=0)",
        tests=("tests/packing/test_balance.py::test_imbalance_is_the_worst_over_the_mean",),
        quick=True,
    ),
    Mutation(
        "stream-flushes-in-order",
        "tensor3d/packing/stream.py",
        old="self._complete(self._waiting.longest(self._limits.capacity))",
        new="self._complete(self._waiting.oldest(1, self._limits.capacity))",
        tests=("tests/packing/test_stream.py",),
    ),
)
