"""`python -m tools.squad`: windows, scores and guesses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.squad.small import digit_questions, entry, squad, write, write_vocab
from tools.squad.__main__ import main, random_spans
from tools.squad.dataset import read_questions


def test_windows_are_counted_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "f.json", digit_questions(30))
    sizes = ["--vocab", str(write_vocab(tmp_path)), "--max-length", "16", "--stride", "4", "--question-length", "8"]
    arguments = ["windows", str(file), *sizes]
    assert main([*arguments, "--histogram", str(tmp_path / "h.json")]) == 0
    counts = json.loads((tmp_path / "h.json").read_text())["counts"]
    told = capsys.readouterr().out
    assert f"{sum(counts)} windows of at most 16 tokens" in told
    assert "unknown" not in told
    assert (len(counts), sum(counts) > 30) == (17, True)
    assert main([*arguments, "--compare", str(tmp_path / "h.json")]) == 0
    counts[16] += 1
    write(tmp_path / "h.json", {"counts": counts})
    assert main([*arguments, "--compare", str(tmp_path / "h.json")]) == 1
    assert "1 bins differ, the first one at 16 tokens" in capsys.readouterr().out
    assert main([*arguments, "--compare", str(file)]) == 2
    assert "tools.squad: " in capsys.readouterr().err
    content = json.loads(file.read_text())
    content["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["text"] = "nowhere"
    write(file, content)
    assert main(arguments) == 2
    assert "or --bad skip of tools.squad windows." in capsys.readouterr().err
    assert main([*arguments, "--bad", "skip"]) == 0
    assert "1 questions left out" in capsys.readouterr().out


def test_windows_tell_what_the_tokenizer_has_no_pieces_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A context counts once, each of its questions as well."""
    qas = [entry("q0", "what zebra?", ("red", 4)), entry("q1", "what?", ("red", 4))]
    file = write(tmp_path / "f.json", squad(("the red zebras " + "a" * 101, qas)))
    assert main(["windows", str(file), "--vocab", str(write_vocab(tmp_path)), "--question-length", "8"]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("112 of 132 characters are unknown to the tokenizer, 101 of them in words of more than 100")


def test_scores_of_version_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = squad(("The red house", [entry("q0", "what?", ("red house", 4)), entry("q1", "what?", ("red", 4))]))
    arguments = [
        "score",
        str(write(tmp_path / "f.json", content)),
        str(write(tmp_path / "p.json", {"q0": "the red house."})),
    ]
    assert main(arguments) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == {"exact_match": 50.0, "f1": 50.0}
    assert "1 questions have no prediction and score 0, such as 'q1'" in told.err
    assert "no question has" not in told.err
    assert main([*arguments, "--null-odds", str(tmp_path / "p.json")]) == 2
    assert "--null-odds is about SQuAD v2.0" in capsys.readouterr().err
    answers = write(tmp_path / "p.json", {"q0": "the red house.", "q7": "red", "q9": ""})
    assert main(arguments) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == {"exact_match": 50.0, "f1": 50.0}
    assert f"warning: {answers} has 2 ids that no question has, such as 'q7'" in told.err


def test_scores_of_version_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    qas = [entry("q0", "what?", ("red", 4), is_impossible=False), entry("q1", "why?", is_impossible=True)]
    file = write(tmp_path / "f.json", squad(("The red house", qas)))
    answers = write(tmp_path / "p.json", {"q0": "red", "q1": "house"})
    odds = write(tmp_path / "o.json", {"q0": -3.0, "q1": 0.5})
    arguments = ["score", str(file), str(answers), "--null-odds", str(odds)]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["exact"], found["NoAns_f1"]) == (50.0, 0.0), "0.5 is not above 1"
    assert (found["best_f1"], found["best_f1_thresh"]) == (100.0, -3.0)
    assert main([*arguments, "--threshold", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["exact"] == 100.0
    write(odds, {"q0": -3.0, "q1": 0.5, "Q1": 0.5})
    assert main(arguments) == 0
    assert f"warning: {odds} has 1 ids that no question has, such as 'Q1'" in capsys.readouterr().err
    for number in ("NaN", "1e999", "1" + "0" * 400):
        odds.write_text(f'{{"q0": -3.0, "q1": {number}}}')
        assert main(arguments) == 2
        assert "the odds of question 'q1' must be a finite number" in capsys.readouterr().err
    answers.write_text('{"q0": "red", "q1": "house", "q1": ""}')
    assert main(arguments) == 2
    assert "the key 'q1' is there twice" in capsys.readouterr().err


def test_references_need_not_stand_in_their_contexts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What SQuAD's scripts score, `score` scores: no places, no questions, ids twice, other letters, empty answers."""
    told = [{"text": "Fox"}, {"text": ""}]
    answers = write(tmp_path / "p.json", {"q0": "the fox"})
    twice = {"id": "q0", "answers": told}
    assert main(["score", str(write(tmp_path / "f.json", squad(("a fox", [twice, twice])))), str(answers)]) == 0
    assert json.loads(capsys.readouterr().out) == {"exact_match": 100.0, "f1": 100.0}
    last = {"id": "q0", "answers": [], "is_impossible": True}
    file = write(tmp_path / "f.json", squad(("a fox", [twice | {"is_impossible": False}, last])))
    assert main(["score", str(file), str(answers)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["exact"], found["total"], found["NoAns_total"]) == (0.0, 1, 1), "the last of one id counts"
    assert main(["random", str(file)]) == 0
    capsys.readouterr()
    for content, message in (
        (squad(("", [twice | {"answers": []}])), "question 'q0' has no answer, and no question has is_impossible"),
        (squad(("", [{"id": "q0", "answers": [{}]}])), "an answer of question 'q0' has no 'text'"),
    ):
        assert main(["score", str(write(tmp_path / "f.json", content)), str(answers)]) == 2
        assert message in capsys.readouterr().err
    assert main(["random", str(write(tmp_path / "f.json", squad((" ", [twice]))))]) == 2
    assert "the context of question 'q0' has no word to guess" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, message",
    [
        ([1], "must hold one object"),
        ({"q0": 3}, "question 'q0' must have answers, which are text. Got 3"),
    ],
)
def test_predictions_that_are_none(
    content: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "f.json", digit_questions(2))
    assert main(["score", str(file), str(write(tmp_path / "p.json", content))]) == 2
    assert message in capsys.readouterr().err


def test_guesses_are_spans_that_the_seed_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "f.json", digit_questions(200))
    questions = read_questions(file).questions
    spans = random_spans(questions, longest=2, seed=3)
    assert spans == random_spans(questions, longest=2, seed=3) != random_spans(questions, longest=2, seed=4)
    assert all(spans[question.id] in question.context for question in questions)
    assert {len(span.split()) for span in spans.values()} == {1, 2}
    assert main(["random", str(file), "--output", str(tmp_path / "r.json")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main(["score", str(file), str(tmp_path / "r.json")]) == 0
    assert json.loads(capsys.readouterr().out) == told
    assert 0 < told["exact_match"] < 40
