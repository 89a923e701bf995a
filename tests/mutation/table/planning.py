"""The planner: times, boxes, memory; explain and the checks for one's own layers."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

BY_HAND = "tests/cost_model/test_search.py::test_latency_and_bytes_by_hand"
ADD_UP = "tests/cost_model/test_search.py::test_parts_of_the_time_add_up_and_overlap_only_hides"

MUTATIONS = (
    Mutation(
        "plan-time-of-two-passes",
        "tensor3d/cost_model/step_time.py",
        old="product.times * (3 + product.repeated)",
        new="product.times * (2 + product.repeated)",
        tests=("tests/cost_model/test_search.py::test_products_take_their_flops",),
    ),
    Mutation(
        "plan-time-without-attention",
        "tensor3d/cost_model/step_time.py",
        old="return self.products + self.attention + self.touching + self.starting + self.exposed",
        new="return self.products + self.touching + self.starting + self.exposed",
        tests=(ADD_UP,),
    ),
    Mutation(
        "plan-time-of-one-micro-batch",
        "tensor3d/cost_model/step_time.py",
        old="    attention = micro_batches * cost.attention_flops / rate",
        new="    attention = cost.attention_flops / rate",
        tests=("tests/cost_model/test_search.py::test_parts_of_the_time_by_hand",),
    ),
    Mutation(
        "plan-time-hidden-twice",
        "tensor3d/cost_model/step_time.py",
        old="hidden=micro_batches * hidden,",
        new="hidden=2 * micro_batches * hidden,",
        tests=(ADD_UP,),
    ),
    Mutation(
        "plan-time-touching-once-forgotten",
        "tensor3d/cost_model/step_time.py",
        old="(micro_batches * cost.touched + cost.once_touched) / cluster.memory_bandwidth",
        new="(micro_batches * cost.touched) / cluster.memory_bandwidth",
        tests=("tests/cost_model/test_search.py::test_parts_of_the_time_by_hand",),
    ),
    Mutation(
        "plan-time-starting-without-what-comes-once",
        "tensor3d/cost_model/step_time.py",
        old="operators = micro_batches * cost.operators + cost.once_operators",
        new="operators = micro_batches * cost.operators",
        tests=("tests/cost_model/test_search.py",),
    ),
    Mutation(
        "plan-flops-of-the-other-axis",
        "tensor3d/cost_model/step_cost.py",
        old="(self.k / shape.size(self.face)) * (self.n / shape.size(other(self.face)))",
        new="(self.k / shape.size(self.face)) * self.n",
        tests=("tests/cost_model/test_search.py::test_products_are_shared_by_all_ranks",),
        quick=True,
    ),
    Mutation(
        "plan-traffic-of-one-micro-batch",
        "tensor3d/cost_model/step_cost.py",
        old="Counter({key: number * count for key, count in micro.items()})",
        new="Counter({key: count for key, count in micro.items()})",
        tests=("tests/models/bert/cost_model/test_step_cost.py", "tests/cost_model/test_search.py"),
    ),
    Mutation(
        "plan-tokens-per-second-halved",
        "tensor3d/cost_model/search.py",
        old="return self.cost.tokens / self.time.total",
        new="return self.cost.tokens / self.time.total / 2",
        tests=("tests/cost_model/test_search.py::test_tokens_a_second_are_those_of_a_step",),
    ),
    Mutation(
        "plan-takes-the-slowest",
        "tensor3d/cost_model/search.py",
        old="way, time = min(ways, key=",
        new="way, time = max(ways, key=",
        tests=("tests/cost_model/test_search.py::test_the_best_placement_keeps_what_moves_most_inside_a_node",),
    ),
    Mutation(
        "plan-memory-limit-strict",
        "tensor3d/cost_model/search.py",
        old="limit = memory_share * cluster.memory",
        new="limit = cluster.memory",
        tests=("tests/cost_model/test_search.py::test_memory_decides_what_is_kept",),
    ),
    Mutation(
        "plan-takes-what-a-count-refuses",
        "tensor3d/cost_model/search.py",
        old="if memory.peak <= box.limit:",
        new="if True:",
        tests=("tests/cost_model/test_search.py::test_what_is_counted_decides",),
    ),
    Mutation(
        "cluster-rate-at-its-peak",
        "tensor3d/cost_model/hardware.py",
        old="return self.flops[kind] * self.efficiency",
        new="return self.flops[kind]",
        tests=("tests/cost_model/test_hardware.py::test_ranks_and_rate",),
    ),
    Mutation(
        "cluster-ring-of-n-steps",
        "tensor3d/cost_model/hardware.py",
        old='if kind == "all-reduce" else members - 1',
        new='if kind == "all-reduce" else members',
        tests=("tests/cost_model/test_hardware.py::test_a_gather_and_a_sum_inside_and_across",),
    ),
    Mutation(
        "cluster-across-not-shared",
        "tensor3d/cost_model/hardware.py",
        old="self.across.bandwidth * here)",
        new="self.across.bandwidth)",
        tests=("tests/cost_model/test_hardware.py::test_a_gather_and_a_sum_inside_and_across",),
    ),
    Mutation(
        "known-ways-hide-all",
        "tensor3d/cost_model/literature/times.py",
        old="self.blocking + max(self.compute, self.hidden)",
        new="self.blocking + max(self.compute, 0.0)",
        tests=("tests/cost_model/test_literature.py::test_seconds_under_the_products_and_beside_them",),
    ),
    Mutation(
        "known-ways-recompute-for-nothing",
        "tensor3d/cost_model/literature/times.py",
        old="passes = 4 if recomputed else 3",
        new="passes = 3",
        tests=("tests/cost_model/test_literature.py",),
    ),
    Mutation(
        "plan-table-mfu-of-one-rank",
        "tools/plan/tables.py",
        old="(cluster.flops[compute] * cluster.ranks)",
        new="cluster.flops[compute]",
        tests=("tests/tools/plan/test_plan.py",),
    ),
    Mutation(
        "plan-table-time-ratio-upside-down",
        "tools/plan/tables.py",
        old="ratio = plan.time.total / best.time.total",
        new="ratio = best.time.total / plan.time.total",
        tests=("tests/tools/plan/test_plan.py::test_how_much_longer_a_box_takes_is_told",),
    ),
    Mutation(
        "explain-sums-one-layer-of-equal-ones",
        "tensor3d/explain/report.py",
        old="received[axis] += row.times * count",
        new="received[axis] += count",
        tests=("tests/explain/test_explain.py::test_the_table_and_the_json_tell_the_same",),
    ),
    Mutation(
        "explain-kibibytes-of-1000",
        "tensor3d/explain/report.py",
        old="value, unit = value / 1024, unit + 1",
        new="value, unit = value / 1000, unit + 1",
        tests=("tests/explain/test_explain.py::test_the_table_and_the_json_tell_the_same",),
    ),
    Mutation(
        "explain-saved-without-the-last",
        "tensor3d/explain/explain.py",
        old="return sum(row.saved for row in self.rows)",
        new="return sum(row.saved for row in self.rows[:-1])",
        tests=("tests/explain/test_explain.py::test_one_device_sends_nothing_and_keeps_as_much",),
    ),
    Mutation(
        "check-layer-believes-any-factor",
        "tensor3d/testing/hints.py",
        old="<= _NEAR * float(got.abs().max())",
        new=">= _NEAR * float(got.abs().max())",
        tests=("tests/testing/test_loss_hints.py",),
    ),
)
