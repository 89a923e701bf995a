"""`python -m tools.predict`: input, output, streaming, refusals."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tools.asked import LABELS, MASKED, QUESTIONS, TEXTS, write_models
from tools.predict.__main__ import main
from tools.predict.inputs import MOST_LINE, Fields, InputProblem, LineReader, Query, query_of_line
from tools.predict.outputs import JsonOutput, OutputProgress

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("asked"))


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[list[str], str]:
    """Lines of standard output, and standard error."""
    assert main([str(argument) for argument in arguments]) == 0
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return path


@pytest.mark.slow
def test_arguments_are_answered_in_words(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, told = said(capsys, "fill-mask", models / "language", MASKED[0], "--k", "2")
    assert lines[0].startswith("the ")
    assert lines[0].endswith(" went to the hill")
    assert len(lines) == 3
    assert "%  " in lines[1]
    assert told.startswith("tools.predict: 1 text, 0 truncated, 0 skipped, ")
    assert "unknown" not in told
    assert "tokens/s" in told
    lines, _ = said(capsys, "classify", models / "classes", "a fox", "a hill")
    assert lines[0] == "> a fox"
    assert lines[1] in LABELS
    assert len(lines) == 10
    lines, _ = said(capsys, "classify", models / "classes", "a fox", "a hill", "--pairs")
    assert len(lines) == 4
    lines, _ = said(capsys, "answer", models / "answers", *QUESTIONS[0].values(), "--json")
    assert set(json.loads(lines[0])) == {"text", "start", "end", "probability", "n_best"}
    lines, _ = said(capsys, "classify", models / "number", "a fox", "--json")
    value = json.loads(lines[0])["value"]
    assert said(capsys, "classify", models / "number", "a fox")[0] == [f"{value:.6g}"]
    lines, _ = said(capsys, "embed", models / "language", "a fox")
    assert len(lines[0].split()) == 32


def test_lines_of_a_file_come_back_in_order(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = [{"text": text, "id": number} for number, text in enumerate(TEXTS * 5)]
    file = write_lines(tmp_path / "in.jsonl", *items, "a fox", {"text": "a", "text_b": "the fox", "id": ["x"]})
    lines, told = said(capsys, "classify", models / "classes", "--file", file, "--batch-tokens", "30")
    found = [json.loads(line) for line in lines]
    assert [one.get("id") for one in found] == [*range(len(items)), None, ["x"]]
    for one in found:
        assert list(one["probabilities"]) == list(LABELS)
        assert one["label"] == max(one["probabilities"], key=one["probabilities"].__getitem__)
    for one, other in zip(found[: len(TEXTS)], found[len(TEXTS) :], strict=False):
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-5)
    assert "32 texts" in told
    output = tmp_path / "out.jsonl"
    assert said(capsys, "classify", models / "classes", "--file", file, "--output", output)[0] == []
    assert [json.loads(line)["label"] for line in output.read_text().splitlines()] == [one["label"] for one in found]


def test_plain_lines_and_an_array(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_bytes('\ufeffa fox\r\n"the fox\n漢 hill'.encode())
    output = tmp_path / "v.npy"
    npy = ("--output-format", "npy", "--output", output)
    said(capsys, "embed", models / "language", "--file", plain, "--plain", *npy)
    vectors = np.load(output)
    assert (vectors.shape, vectors.dtype) == ((3, 32), np.float32)
    lines, _ = said(capsys, "embed", models / "language", "a fox", '"the fox', "漢 hill", "--json")
    np.testing.assert_allclose(vectors, [json.loads(line)["vector"] for line in lines], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.csv", "a.csv is a table by its suffix"),
        ("a.TSV", "header, labels and other columns would be texts too"),
        ("a.jsonl", "a.jsonl is JSON by its suffix, and with --plain its marks and keys would be text"),
    ],
)
def test_what_is_no_plain_text_is_refused(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("sentence,label\n")
    assert main(["classify", str(tmp_path), "--file", str(tmp_path / name), "--plain"]) == 2
    assert words in capsys.readouterr().err
    if name != "a.jsonl":  # nor does what follows from "not JSON": say --plain
        assert main(["classify", str(tmp_path), "--file", str(tmp_path / name)]) == 2
        assert words in capsys.readouterr().err


def test_lines_that_end_with_cr_alone_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mac.txt").write_bytes(b"a fox\ra hill\r")
    assert main(["classify", str(tmp_path), "--file", str(tmp_path / "mac.txt"), "--plain"]) == 2
    assert "mac.txt has lines that end with CR alone" in capsys.readouterr().err


def test_lines_of_json_are_no_plain_text() -> None:
    for line, is_text in ((b'{"text": "a fox"}\n', False), (b"{a fox}\n", True), (b'{"fox": 1}\n', True)):
        found = query_of_line(line, Fields(), 3, is_plain=True)
        assert isinstance(found, Query) is is_text
        assert is_text or "an object in JSON, and with --plain it would be text" in str(found)


@pytest.mark.parametrize(
    "line",
    [b'{"text": "a", "id": NaN}', b'{"text": "a", "id": [1e999]}', b'{"text": "a", "passages": [{"id": -Infinity}]}'],
)
def test_an_id_that_no_json_can_say_again_is_refused(line: bytes) -> None:
    fields = Fields(candidates="passages" if b"passages" in line else None)
    found = query_of_line(line, fields, 3, is_plain=False)
    assert "comes back with the result, and JSON has no such number" in str(found)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32-le"])
@pytest.mark.parametrize("is_plain", [True, False])
def test_a_line_of_another_encoding_is_refused_by_its_likely_name(encoding: str, is_plain: bool) -> None:
    line = '{"text": "Some words of plain English, and more of them."}'.encode(encoding)
    told = str(query_of_line(line, Fields(), 1, is_plain=is_plain))
    assert re.search(r"(not UTF-8 at byte 1|NUL characters), as of UTF-(16 \((little|big)-endian|32-LE).*iconv", told)


BAD = (
    b'{"text": \n',
    b"[[" * 50_000 + b"\n",
    b'"a \xff"\n',
    b"\n",
    b"7\n",
    {"id": 4},
    "\ud800",
    " ",
    {"text": "a", "context": ""},
)


def test_bad_lines_keep_their_places(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_lines(tmp_path / "in.jsonl", "a fox", *BAD, {"text": "a hill", "id": "\ud800"})
    lines, told = said(capsys, "classify", models / "classes", "--file", file, "--on-error", "skip")
    found = [json.loads(line) for line in lines]
    assert len(found) == len(BAD) + 2
    assert "11 texts, 0 truncated, 9 skipped" in told
    assert found[0]["label"] in LABELS
    assert found[-1]["id"] == "\ud800"
    problems = found[1:-1]
    assert [one["line"] for one in problems] == list(range(2, len(BAD) + 2))
    wanted = ["not JSON", "not JSON", "not UTF-8 at byte 4", "an empty line", "Got 7", "no such key", "surrogate"]
    for one, words in zip(problems, [*wanted, "has no token", "is not read here"], strict=True):
        assert words in one["error"]
    assert problems[5]["id"] == 4


@pytest.mark.parametrize(("number", "words"), list(enumerate(["not JSON", "too deep", "UTF-8", "empty", "Got 7"])))
def test_a_bad_line_stops(
    number: int, words: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "in.jsonl", "a fox", BAD[number], "a hill")
    assert main(["classify", str(models / "classes"), "--file", str(file)]) == 2
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1, "the one before it is answered"
    assert captured.err.startswith("tools.predict: line 2: ")
    assert words in captured.err
    output = tmp_path / "out.jsonl"
    message = refusal(capsys, "classify", models / "classes", "--file", file, "--output", output)
    assert f"Nothing is written to {output}; --on-error skip would" in message
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"], "nothing half-written"


def test_calls_that_cannot_be(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    language = models / "language"
    call = ("embed", language, "a fox")
    assert "--file too" in refusal(capsys, *call, "--file", "x")
    assert "no/such cannot be read" in refusal(capsys, "embed", language, "--file", "no/such")
    assert "read two by two. Got 1" in refusal(capsys, "answer", models / "answers", "who?")
    assert "--batch-tokens must be at least 1" in refusal(capsys, *call, "--batch-tokens", "0")
    assert "--wait must be at least 0" in refusal(capsys, *call, "--wait", "-1")
    assert "a file in a folder that exists" in refusal(capsys, *call, "--output", tmp_path / "no" / "such")
    assert "npy needs a file" in refusal(capsys, *call, "--output-format", "npy")
    assert "a cube is written XxYxZ" in refusal(capsys, *call, "--cube", "2x2")
    with monkeypatch.context() as alone:  # whatever is to be seen of a folder, before any process is connected
        alone.setattr("tools.predict.__main__.cube_of", None)
        assert "is no folder of a model" in refusal(capsys, "embed", tmp_path, "a fox")
        assert "Make one: python -m tools.finetune answer" in refusal(capsys, "answer", language, "who?", "a fox")
        assert "max_length=99 is more than the model's" in refusal(capsys, *call, "--max-length", "99")
        assert "heads must divide by y=3" in refusal(capsys, *call, "--cube", "1x3x1")
    assert "--nproc-per-node=4 -m tools.predict embed" in refusal(capsys, *call, "--cube", "1x2x2")
    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    assert "no text. Give texts, --file FILE" in refusal(capsys, "embed", language)


def started(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tools.predict", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    piped = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, cwd=ROOT, env=environment, **piped)


def test_results_come_before_the_input_ends(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (input_end, into), (out, output_end) = os.pipe(), os.pipe()
    told: list[Any] = []
    with (
        os.fdopen(input_end, "r") as given,
        os.fdopen(into, "wb", 0) as asking,
        os.fdopen(out, "rb", 0) as answers,
        os.fdopen(output_end, "w") as results,
    ):
        monkeypatch.setattr(sys, "stdin", given)
        monkeypatch.setattr(sys, "stdout", results)
        call = threading.Thread(target=lambda: told.append(main(["classify", str(models / "classes")])), daemon=True)
        call.start()
        for number in range(3):
            asking.write(json.dumps({"text": "a fox", "id": number}).encode() + b"\n")
            assert select.select([answers], [], [], 120)[0], "no answer while the input is open"
            assert json.loads(answers.readline())["id"] == number
        asking.write(b'"the last, without an end of line"')
        asking.close()
        assert select.select([answers], [], [], 120)[0]
        assert json.loads(answers.readline())["label"] in LABELS
        call.join(120)
    assert told == [0]


@pytest.mark.slow
def test_a_reader_that_has_gone_ends_it_quietly(models: Path) -> None:
    process = started("classify", models / "classes", "--batch-tokens", "50")
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(b'"a fox"\n' * 4_000)
    process.stdin.flush()
    process.stdout.readline()
    process.stdout.close()
    told = process.stderr.read().decode()
    assert process.wait(60) == 0
    assert told.startswith("tools.predict: ")
    assert told.count("\n") == 1
    process.stderr.close()
    process.stdin.close()


# --- lines ---------------------------------------------------------------------------------------------------------


class _Full(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_output_without_room_is_named(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system does not say of what there is no more room."""
    written = OutputProgress(JsonOutput(_Full()), "results.npy")  # type: ignore[arg-type]
    written.write([(Query(where="", number=1, first="a"), InputProblem(where="", number=1, error="none"))])
    with pytest.raises(ValueError, match=r"^results.npy cannot be written: No space left on device\. Make room, or "):
        written.is_over()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", io.TextIOWrapper(_Full()))  # type: ignore[type-var]
        assert main(["classify", str(models / "classes"), "--json", TEXTS[0]]) == 2
    assert "standard output cannot be written: No space left on device. Make room, or " in capsys.readouterr().err


def test_reading_is_never_far_ahead() -> None:
    out, into = os.pipe()
    os.set_blocking(into, False)
    line = b"x" * 99 + b"\n"
    with os.fdopen(out, "rb") as file:
        lines = LineReader(file, wait=0.01)
        written, quiet = 0, 0
        while quiet < 20:
            try:
                written += os.write(into, line * 100)
                quiet = 0
            except BlockingIOError:
                quiet += 1
                time.sleep(0.01)
        assert written < 2 << 20
        os.close(into)
        taken = []
        while (found := lines.take(5000)) is not None:
            assert sum(map(len, found)) <= 5100
            taken += found
        assert sum(map(len, taken)) == written
        assert lines.take(5000) is None


def test_a_pause_gives_what_has_come() -> None:
    out, into = os.pipe()
    with os.fdopen(out, "rb") as file:
        lines = LineReader(file, wait=0.05)
        assert lines.take(100, idle=0.01) == []
        os.write(into, b"a\nb\nbegin")
        assert lines.take(100) == [b"a\n", b"b\n"]
        os.write(into, b"ning\n\nend")
        assert lines.take(100) == [b"beginning\n", b"\n"]
        os.close(into)
        assert lines.take(100) == [b"end"]
        assert lines.take(100) is None


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"short\n" + b"x" * (MOST_LINE + (1 << 17)))
    with path.open("rb") as file:
        lines = LineReader(file, wait=0.1)
        assert lines.take(100) == [b"short\n"]
        with pytest.raises(ValueError, match="line 2: longer than 16 MiB"):
            lines.take(100)
