"""Commands: corpus, packing report, plots, benchmarks, doctor, launchers."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

FILTERS = "tests/tools/corpus/extract/test_step.py::test_filters_at_their_bounds"
EXTRACT = "tests/tools/corpus/extract/test_step.py"
WIKITEXT = "tests/tools/corpus/extract/wikitext/test_wikitext.py"
BENCH = "tests/tools/bench/test_step.py::test_figures_by_hand"
PADDING = "tests/tools/bench/test_padding.py::test_figures_by_hand"
JUDGING = "tests/tools/doctor/test_rules.py"

MUTATIONS = (
    Mutation(
        "filters-shortest-is-too-short",
        "tools/corpus/extract/filters.py",
        old="if len(text) < self.min_characters:",
        new="if len(text) <= self.min_characters:",
        tests=(FILTERS,),
        quick=True,
    ),
    Mutation(
        "filters-longest-is-too-long",
        "tools/corpus/extract/filters.py",
        old="and len(text) > self.max_characters:",
        new="and len(text) >= self.max_characters:",
        tests=(FILTERS,),
    ),
    Mutation(
        "filters-just-enough-letters-are-few",
        "tools/corpus/extract/filters.py",
        old="count_letters(text) < self.least_letters *",
        new="count_letters(text) <= self.least_letters *",
        tests=(FILTERS,),
    ),
    Mutation(
        "filters-just-enough-of-the-language-is-another",
        "tools/corpus/extract/filters.py",
        old="_count(self._language, text) < max(",
        new="_count(self._language, text) <= max(",
        tests=(FILTERS,),
    ),
    Mutation(
        "filters-space-is-visible",
        "tools/corpus/extract/filters.py",
        old="(len(text) - _count(_SPACE, text))",
        new="len(text)",
        tests=(FILTERS,),
    ),
    Mutation(
        "duplicates-see-space",
        "tools/corpus/extract/dedup.py",
        old='" ".join(text.split()).encode()',
        new="text.encode()",
        tests=("tests/tools/corpus/extract/test_step.py::test_a_hash_takes_16_bytes_and_sees_words",),
        quick=True,
    ),
    Mutation(
        "counts-by-the-alphabet",
        "tools/corpus/pipeline/step.py",
        old="json.dumps(values, indent=1)",
        new="json.dumps(values, indent=1, sort_keys=True)",
        tests=(f"{EXTRACT}::test_every_piece_of_a_dump_knows_its_namespaces_and_language",),
    ),
    Mutation(
        "spellings-of-a-template-apart",
        "tools/corpus/extract/step.py",
        old="together.setdefault(name[:1].casefold() + name[1:], Counter())",
        new="together.setdefault(name, Counter())",
        tests=(f"{EXTRACT}::test_a_template_is_listed_by_its_commonest_spelling",),
    ),
    Mutation(
        "names-of-templates-without-limit",
        "tools/corpus/extract/read_context.py",
        old="if len(names) > 2 * MOST_NAMES:",
        new="if len(names) > 3 * MOST_NAMES:",
        tests=(f"{WIKITEXT}::test_names_of_templates_take_no_more_memory_than_a_limit",),
    ),
    Mutation(
        "guessed-namespaces-uncounted",
        "tools/corpus/extract/wikitext/strip.py",
        old='self.counts["namespaces_guessed"] += self.namespaces.is_guess(target)',
        new="pass",
        tests=(f"{WIKITEXT}::test_what_is_cut_or_written_out_is_counted",),
    ),
    Mutation(
        "templates-dropped-uncounted",
        "tools/corpus/extract/wikitext/strip.py",
        old='self.counts["templates_dropped"] += 1',
        new="pass",
        tests=(f"{WIKITEXT}::test_what_is_cut_or_written_out_is_counted",),
    ),
    Mutation(
        "another-variant-stands-in",
        "tools/corpus/extract/wikitext/__init__.py",
        old="given if self.variant in _FIRST_OF_ANY else None",
        new="given",
        tests=(f"{WIKITEXT}::test_the_variant_that_is_asked_for_stays",),
    ),
    Mutation(
        "entropy-in-bits",
        "tools/corpus/tokenize/documents.py",
        old="(shares * np.log(shares)).sum()",
        new="(shares * np.log2(shares)).sum()",
        tests=("tests/tools/corpus/samples/test_step.py",),
    ),
    Mutation(
        "code-begins-later",
        "tools/corpus/sentences.py",
        old='visible.startswith(">>>") or',
        new='visible.startswith(">>>>") or',
        tests=("tests/tools/corpus/test_sentences.py", "tests/tools/corpus/quick/test_text_sources.py"),
    ),
    Mutation(
        "bench-ratio-upside-down",
        "tools/bench/harness/figures.py",
        old='"ratio": median / statistics.median(flat(base)),',
        new='"ratio": statistics.median(flat(base)) / median,',
        tests=(BENCH,),
    ),
    Mutation(
        "bench-tokens-of-the-mean",
        "tools/bench/harness/step_trial.py",
        old="tokens_per_second=statistics.median(count",
        new="tokens_per_second=max(count",
        tests=(BENCH,),
    ),
    Mutation(
        "bench-flops-of-tokens",
        "tools/bench/harness/step_trial.py",
        old="for count, second in zip(flops, steps",
        new="for count, second in zip(tokens, steps",
        tests=(BENCH,),
    ),
    Mutation(
        "bench-memory-of-the-first-rank",
        "tools/bench/harness/step_trial.py",
        old="max(memory, key=lambda of: of.held),",
        new="min(memory, key=lambda of: of.held),",
        tests=(BENCH,),
    ),
    Mutation(
        "bench-traffic-of-any-rank",
        "tools/bench/harness/step_trial.py",
        old="traffic_equal=all(sample.received",
        new="traffic_equal=any(sample.received",
        tests=(BENCH,),
    ),
    Mutation(
        "bench-quartiles-swapped",
        "tools/bench/harness/figures.py",
        old='"seconds_quartiles": (low, high),',
        new='"seconds_quartiles": (high, low),',
        tests=(BENCH,),
    ),
    Mutation(
        "padding-ratio-upside-down",
        "tools/bench/padding.py",
        old="ratio = fill / padded_fill",
        new="ratio = padded_fill / fill",
        tests=(PADDING,),
    ),
    Mutation(
        "padding-speed-up-without-what-is-lost",
        "tools/bench/padding.py",
        old="speed_up=ratio * statistics.median(kept),",
        new="speed_up=ratio,",
        tests=(PADDING,),
    ),
    Mutation(
        "padding-tokens-are-slots",
        "tools/bench/padding.py",
        old="tokens_per_second=fill * speed,",
        new="tokens_per_second=speed,",
        tests=(PADDING,),
    ),
    Mutation(
        "corpus-rate-in-mebibytes",
        "tools/bench/corpus.py",
        old="self.input_bytes / 1e6 / self.seconds",
        new="self.input_bytes / 2**20 / self.seconds",
        tests=("tests/tools/bench/test_corpus.py::test_rates_are_of_input",),
    ),
    Mutation(
        "doctor-slow-of-the-fastest",
        "tools/doctor/rules.py",
        old="    median = statistics.median(seconds)\n",
        new="    median = max(seconds)\n",
        tests=(f"{JUDGING}::test_slow_ranks",),
    ),
    Mutation(
        "doctor-slowness-of-the-least",
        "tools/doctor/rules.py",
        old="worst = max(seconds[rank] for rank in slow) / median",
        new="worst = min(seconds[rank] for rank in slow) / median",
        tests=(f"{JUDGING}::test_slow_ranks",),
    ),
    Mutation(
        "peak-of-another-type",
        "tools/training/peak_flops.py",
        old='(r"A100|A800", (312.0, 312.0, 156.0, 19.5)),',
        new='(r"A100|A800", (312.0, 312.0, 19.5, 156.0)),',
        tests=("tests/tools/training/test_peak_flops.py",),
    ),
    Mutation(
        "ssh-every-node-is-the-first",
        "launch/ssh.py",
        old='"--node-rank", str(node)]',
        new='"--node-rank", "0"]',
        tests=("tests/launch/test_ssh.py::test_the_command_of_each_host",),
    ),
    Mutation(
        "ssh-slots-of-no-host",
        "launch/ssh.py",
        old="return hosts, None if each is None else int(each)",
        new="return hosts, None",
        tests=("tests/launch/test_ssh.py",),
    ),
    Mutation(
        "embed-positive-of-another-row-is-a-negative",
        "tools/finetune/embed_task.py",
        old="[own[0], *self._positives[int(own[0])]]",
        new="[own[0]]",
        tests=(
            "tests/tools/finetune/test_embed_data.py::test_texts_that_belong_together_are_counted_and_are_no_negatives",
        ),
    ),
    Mutation(
        "gradient-cache-draws-dropout-anew",
        "tools/finetune/gradient_cache.py",
        old="torch.set_rng_state(host)",
        new="torch.get_rng_state()",
        tests=("tests/tools/finetune/test_embed_task.py::test_dropout_is_the_same_in_both_passes",),
    ),
    Mutation(
        "nearest-forgets-the-blocks-before",
        "tools/predict/vector_search.py",
        old="torch.cat([best, keys], 1)",
        new="keys",
        tests=("tests/tools/predict/test_embed.py::test_equal_ones_keep_their_order_in_blocks",),
    ),
)
