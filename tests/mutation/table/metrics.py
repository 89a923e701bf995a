"""What fine-tuned models are judged by: classes, numbers, answers."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

GLUE = "tests/tools/finetune/test_metrics.py"
SQUAD = "tests/tools/squad/test_scoring.py"

MUTATIONS = (
    Mutation(
        "glue-accuracy-is-its-error",
        "tools/finetune/metrics.py",
        old="accuracy = float((predicted == labels).mean())",
        new="accuracy = float((predicted != labels).mean())",
        tests=(GLUE,),
        quick=True,
    ),
    Mutation(
        "glue-f1-of-the-first-class",
        "tools/finetune/metrics.py",
        old="per_class[-1] if classes == 2",
        new="per_class[0] if classes == 2",
        tests=(GLUE,),
    ),
    Mutation(
        "glue-f1-without-two",
        "tools/finetune/metrics.py",
        old="np.divide(2.0 * right, named",
        new="np.divide(1.0 * right, named",
        tests=(GLUE,),
    ),
    Mutation(
        "glue-accuracy-f1-is-their-sum",
        "tools/finetune/metrics.py",
        old='"accuracy_f1": (accuracy + f1) / 2',
        new='"accuracy_f1": accuracy + f1',
        tests=(GLUE,),
    ),
    Mutation(
        "glue-matthews-of-one-spread",
        "tools/finetune/metrics.py",
        old="for counts in (predicted, labels)]\n    return",
        new="for counts in (labels, labels)]\n    return",
        tests=(GLUE,),
    ),
    Mutation(
        "glue-spearman-of-the-values",
        "tools/finetune/metrics.py",
        old="spearman = _correlation(_ranks(predicted), _ranks(targets))",
        new="spearman = _correlation(predicted, targets)",
        tests=(GLUE,),
    ),
    Mutation(
        "glue-ties-take-the-highest-rank",
        "tools/finetune/metrics.py",
        old="(np.cumsum(counts) - (counts - 1) / 2)[place]",
        new="np.cumsum(counts).astype(np.float64)[place]",
        tests=(GLUE,),
    ),
    Mutation(
        "glue-pearson-about-zero",
        "tools/finetune/metrics.py",
        old="a, b = a - a.mean(), b - b.mean()",
        new="a, b = a - 0.0, b - 0.0",
        tests=(GLUE,),
    ),
    Mutation(
        "glue-mse-absolute",
        "tools/finetune/metrics.py",
        old="np.square(predicted - targets).mean()",
        new="np.abs(predicted - targets).mean()",
        tests=(GLUE,),
    ),
    Mutation(
        "glue-spread-of-n",
        "tools/finetune/metrics.py",
        old="np.std(values, ddof=1)",
        new="np.std(values, ddof=0)",
        tests=(GLUE,),
    ),
    Mutation(
        "squad-exact-match-of-the-case",
        "tools/squad/scoring.py",
        old="return float(normalize(prediction) == normalize(reference))",
        new="return float(prediction == reference)",
        tests=(SQUAD,),
    ),
    Mutation(
        "squad-articles-stay",
        "tools/squad/scoring.py",
        old='re.compile(r"\\b(a|an|the)\\b")',
        new='re.compile(r"\\b(a|an)\\b")',
        tests=(SQUAD,),
    ),
    Mutation(
        "squad-f1-is-recall",
        "tools/squad/scoring.py",
        old="return 2.0 * common / (len(said) + len(wanted))",
        new="return 1.0 * common / len(wanted)",
        tests=(SQUAD,),
        quick=True,
    ),
    Mutation(
        "squad-words-count-once",
        "tools/squad/scoring.py",
        old="common = sum((Counter(said) & Counter(wanted)).values())",
        new="common = len(set(said) & set(wanted))",
        tests=(SQUAD,),
    ),
    Mutation(
        "squad-worst-reference",
        "tools/squad/scoring.py",
        old="exact[number] = max(exact_match",
        new="exact[number] = min(exact_match",
        tests=(SQUAD,),
    ),
    Mutation(
        "squad-f1-of-the-worst-reference",
        "tools/squad/scoring.py",
        old="overlap[number] = max(f1",
        new="overlap[number] = min(f1",
        tests=(SQUAD,),
    ),
    Mutation(
        "squad-threshold-strict",
        "tools/squad/scoring.py",
        old="none = odds > threshold",
        new="none = odds >= threshold",
        tests=(SQUAD,),
    ),
    Mutation(
        "squad-best-threshold-of-the-next",
        "tools/squad/scoring.py",
        old="float(odds[order[place - 1]]) if place else 0.0",
        new="float(odds[order[place - 2]]) if place else 0.0",
        tests=(SQUAD,),
    ),
)
