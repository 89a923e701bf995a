"""Reading SQuAD's files, and the messages where one is not what it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tools.squad.small import digit_questions, entry, squad, write
from tools.squad.dataset import Reference, read_predictions, read_questions, subset

TEXT = "The house is red, the red house."
GOOD = entry("q1", "what is it?", ("house", 4), ("red house", 22))


def test_a_file_of_version_1(tmp_path: Path) -> None:
    found = read_questions(write(tmp_path / "f.json", squad((TEXT, [GOOD]))))
    (question,) = found.questions
    assert (question.id, question.title, question.context, question.text) == ("q1", "t", TEXT, "what is it?")
    assert question.answers == (Reference("house", 4), Reference("red house", 22))
    assert (found.impossible, found.moved, found.skipped) == (False, 0, 0)


def test_a_file_of_version_2(tmp_path: Path) -> None:
    content = squad((TEXT, [GOOD | {"is_impossible": False}, entry("q2", "why?", is_impossible=True)]))
    found = read_questions(write(tmp_path / "f.json", content))
    assert found.impossible
    assert [question.is_impossible for question in found.questions] == [False, True]


def test_a_file_that_begins_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "f.json", squad((TEXT, [GOOD])))
    plain = read_questions(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_questions(path) == plain


def test_an_answer_that_stands_elsewhere_is_taken_from_the_nearest_place(tmp_path: Path) -> None:
    content = squad(
        (TEXT, [entry("near", "?", ("red", 20)), entry("far", "?", ("red", 14)), entry("end", "?", ("red", 99))])
    )
    found = read_questions(write(tmp_path / "f.json", content))
    assert [question.answers[0].start for question in found.questions] == [22, 13, 22]
    assert found.moved == 3


def test_an_answer_that_does_not_occur_is_refused_or_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "f.json", squad((TEXT, [entry("q0", "what?", ("green", 4)), GOOD])))
    with pytest.raises(ValueError, match=r"f\.json.*'q0'.*'green'"):
        read_questions(path)
    found = read_questions(path, bad="skip")
    assert ([question.id for question in found.questions], found.skipped) == (["q1"], 1)


def test_answers_may_be_missing_where_they_are_not_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "f.json", squad((TEXT, [{"id": "q1", "question": "what?"}])))
    assert read_questions(path, answers=False).questions[0].answers == ()
    with pytest.raises(ValueError, match=r"question 'q1' has no 'answers'"):
        read_questions(path)


@pytest.mark.parametrize(
    "content, message",
    [
        ({"version": "1.1"}, "the file has no 'data'"),
        ([], "the file has no 'data'"),
        ({"data": [{"title": "t"}]}, "article 0 has no 'paragraphs'"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, "paragraph 0 of article 0 has no 'context'"),
        (squad((" \n", [GOOD])), "the context of paragraph 0 of article 0 is empty"),
        (squad((TEXT, [entry("q1", " ", ("red", 13))])), "question 'q1' is empty"),
        (
            squad((TEXT, [{**GOOD, "id": 7}])),
            "'id' of a question in paragraph 0 of article 0 must be of type str. Got 7",
        ),
        (squad((TEXT, [GOOD, GOOD])), "question 'q1' is there twice"),
        (squad((TEXT, [entry("q1", "what?")])), "question 'q1' has no answer"),
        (squad((TEXT, [{**GOOD, "is_impossible": True}])), "question 'q1' has answers and is_impossible"),
        (squad((TEXT, [entry("q1", "?", ("", 3))])), "an answer of question 'q1' is empty"),
        (squad((TEXT, [{**GOOD, "answers": [{"text": "red"}]}])), "an answer of question 'q1' has no 'answer_start'"),
        (squad((TEXT, [GOOD, entry("q2", "why?", is_impossible=True)])), "question 'q2' has is_impossible"),
        (squad(), "has no question"),
    ],
)
def test_what_is_no_such_file_is_named(content: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "f.json", content)
    with pytest.raises(ValueError, match=r"f\.json") as caught:
        read_questions(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"data": [', "line 1 column 11"),
        (b'{"data": "\xff"}', "can't decode"),
        (b"[" * 100_000, "too deep in one another"),
    ],
)
def test_bytes_that_are_no_json_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"f\.json is not valid JSON in UTF-8: .*{message}"):
        read_questions(tmp_path / "f.json")
    with pytest.raises(ValueError, match=rf"f\.json is not valid JSON in UTF-8: .*{message}"):
        read_predictions(tmp_path / "f.json")
    with pytest.raises(ValueError, match=r"other\.json does not exist"):
        read_questions(tmp_path / "other.json")


def test_a_subset_is_the_same_each_time_and_in_order(tmp_path: Path) -> None:
    questions = read_questions(write(tmp_path / "f.json", digit_questions(50))).questions
    some = subset(questions, 10)
    numbers = [int(question.id[1:]) for question in some]
    assert (len(numbers), numbers) == (10, sorted(numbers))
    assert numbers != list(range(10)), "from all over the file"
    assert subset(questions, 10) == some
    assert subset(questions, 10, seed=1) != some
    assert subset(questions, 0) is subset(questions, 50) is questions
