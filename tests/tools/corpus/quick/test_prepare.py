"""Text to a folder that is whole or not there, and its loading."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.tools.stories import STORIES
from tools.common.log import start_logging
from tools.corpus.__main__ import main
from tools.corpus.quick.corpus_info import REQUIRED, CorpusInfo, load_corpus
from tools.corpus.quick.prepare import draft_of, in_lines, prepare, publish, taking_turns
from tools.corpus.quick.sentencepiece_tokenizer import load_tokenizer
from tools.corpus.sentences import split_sentences

ROOT = Path(__file__).parents[4]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "stories.txt"
    path.write_text(STORIES, encoding="utf-8")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Preparing


def test_unusable_sources_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/missing.txt does not exist"):  # and not relative to a guess
        prepare("missing.txt", tmp_path / "out", vocab_size=100)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"folder holds no \*.txt file"):
        prepare(str(tmp_path / "folder"), tmp_path / "out", vocab_size=100)
    (tmp_path / "latin.txt").write_bytes("fine\ncafé\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8 in line 2"):
        prepare(str(tmp_path / "latin.txt"), tmp_path / "out", vocab_size=100)
    for nothing in ("", "\n \n", "***\n\n---\n"):
        (tmp_path / "empty.txt").write_text(nothing)
        with pytest.raises(ValueError, match=r"the corpus is empty: .* '\S+/empty.txt' has"):  # which one, of a sweep
            prepare(str(tmp_path / "empty.txt"), tmp_path / "out", vocab_size=100)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/pipe is neither a file nor a folder"):
        prepare(str(tmp_path / "pipe"), tmp_path / "out", vocab_size=100)
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "latin.txt", "empty.txt", "pipe"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_full_disk_is_told_with_the_folder_and_leaves_nothing(number: int, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def prepared() -> None:
        with draft_of(out) as draft:
            (draft / "train.bin").touch()
            raise OSError(number, os.strerror(number))  # as a write to an open file does, without a name

    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as problem:
        prepared()
    assert problem.value.filename == str(out)
    assert not list(tmp_path.iterdir())


def test_the_language_decides_where_sentences_end_and_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(("Er kam ca. Mittag an, bzw. Abends. Das war gut.\n\n") * 4, encoding="utf-8")
    made = {}
    for language in ("en", "de"):
        made[language] = prepare(str(file), tmp_path / language, vocab_size=28, held_out=0.0, language=language)
        assert made[language].sentences == 4 * len(split_sentences(file.read_text().split("\n\n")[0], language))
    assert made["en"].sentences > made["de"].sentences == 8
    assert made["en"].fingerprint != made["de"].fingerprint
    with pytest.raises(ValueError, match=r"--language must be an ISO 639-1 code.*Got 'German'"):
        prepare(str(file), tmp_path / "out", vocab_size=25, language="German")


def test_text_files_are_prepared_like_the_embedded_corpus(text: Path, tmp_path: Path) -> None:
    info = prepare(str(text), tmp_path / "out", vocab_size=60, held_out=0.2)
    assert set(contents(tmp_path / "out")) == {*REQUIRED, "train.bin", "train.idx"}
    assert (info.documents, info.sentences, info.words) == (16, 64, len(STORIES.split()))
    assert (info.train_documents, info.held_out_documents) == (13, 3)
    corpus = load_corpus(tmp_path / "out")
    tokenizer = load_tokenizer(corpus.tokenizer)
    first = [tokenizer.decode(corpus.held_out[i].tolist()) for i in range(4)]
    assert first == split_sentences(next(story for story in STORIES.split("\n\n") if story.startswith(first[0])))


def test_the_same_again_writes_nothing(text: Path, tmp_path: Path) -> None:
    info = prepare(str(text), tmp_path / "out", vocab_size=60)
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    inode = (tmp_path / "out").stat().st_ino
    assert prepare(str(text), tmp_path / "out", vocab_size=60) == info
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times
    assert (tmp_path / "out").stat().st_ino == inode


def test_the_same_elsewhere_is_the_same_byte_for_byte(text: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        prepare(str(text), tmp_path / name, vocab_size=60)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("change", [{"vocab_size": 61}, {"held_out": 0.3}, {"seed": 1}, {"shards": 2}])
def test_a_changed_setting_prepares_again(text: Path, tmp_path: Path, change: dict) -> None:
    before = prepare(str(text), tmp_path / "out", vocab_size=60)
    after = prepare(str(text), tmp_path / "out", **{"vocab_size": 60, **change})
    assert after.fingerprint != before.fingerprint
    assert load_corpus(tmp_path / "out").info == after
    assert {path.name for path in tmp_path.iterdir()} == {"out", "stories.txt"}


def test_changed_text_or_a_damaged_folder_prepares_again(text: Path, tmp_path: Path) -> None:
    before = prepare(str(text), tmp_path / "out", vocab_size=60)
    text.write_text(STORIES + "\n\nThe end. It is over.")
    after = prepare(str(text), tmp_path / "out", vocab_size=60)
    assert after.documents == before.documents + 1
    whole = contents(tmp_path / "out")
    (tmp_path / "out" / "train.bin").write_bytes(b"\x00")
    prepare(str(text), tmp_path / "out", vocab_size=60)
    assert contents(tmp_path / "out") == whole


def test_what_is_replaced_and_which_files_have_no_text_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two folders of the same name share a corpus' folder, and an empty file among others is no error."""
    start_logging()
    for place, more in (("a", ""), ("b", "More of it. And more.")):
        (tmp_path / place / "mine").mkdir(parents=True)
        (tmp_path / place / "mine" / "stories.txt").write_text(STORIES + "\n\n" + more, encoding="utf-8")
    for name in ("empty.txt", "none.txt"):
        (tmp_path / "b" / "mine" / name).write_text("\n \n")

    def told(folder: str, **more: Any) -> list[str]:
        prepare(str(tmp_path / folder / "mine"), tmp_path / "out", **{"vocab_size": 60, **more})
        return capsys.readouterr().err.splitlines()

    out, a, b = tmp_path / "out", tmp_path / "a" / "mine", tmp_path / "b" / "mine"
    replaced = f"{out} held another corpus, which is replaced: "
    assert told("a") == told("a") == []
    assert told("b") == [
        f"{b / 'empty.txt'} has no text, and 1 more: left out of the corpus.",
        f"{replaced}source was {a}, is {b}.",
    ]
    assert load_corpus(out).info.omissions == "2 files without text"
    assert "not text    2 files without text" in in_lines(load_corpus(out).info)
    assert told("a", vocab_size=61) == [f"{replaced}source was {b}, is {a}; vocab_size was 60, is 61."]
    (a / "stories.txt").write_text(STORIES[:-40])
    assert told("a", vocab_size=61) == [f"{replaced}the text of {a} has changed."]


def test_a_failure_leaves_the_older_corpus(text: Path, tmp_path: Path) -> None:
    prepare(str(text), tmp_path / "out", vocab_size=60)
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match="too small for a vocabulary"):
        prepare(str(text), tmp_path / "out", vocab_size=5000)
    assert contents(tmp_path / "out") == before
    assert {path.name for path in tmp_path.iterdir()} == {"out", "stories.txt"}


def test_what_is_no_corpus_is_not_overwritten(text: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("x")
    for name in ("mine", "mine/precious", "stories.txt"):
        with pytest.raises(ValueError, match=f"{name} exists and is no prepared corpus"):
            prepare(str(text), tmp_path / name, vocab_size=60)
    assert (tmp_path / "mine" / "precious").read_text() == "x"
    (tmp_path / "empty").mkdir()
    assert prepare(str(text), tmp_path / "empty", vocab_size=60).documents == 16


@pytest.mark.slow
def test_two_processes_at_once_make_one_corpus(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "tools.corpus", "prepare", "--source", str(text), "--output", str(out)]
    processes = [
        subprocess.Popen([*command, "--vocab-size", "60"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert all("16 documents" in output for output in outputs)
    assert load_corpus(out).info.documents == 16
    assert {path.name for path in tmp_path.iterdir()} == {"out", "stories.txt"}


def test_whoever_comes_second_keeps_what_the_first_has_made(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def make(mark: str, current: str) -> None:
        with draft_of(out) as draft:
            (draft / "mark").write_text(mark)
            publish(draft, out, is_current=lambda: out.is_dir() and (out / "mark").read_text() == current)

    make("older", "older")
    make("new", "new")
    assert contents(out) == {"mark": b"new"}
    make("never seen", "new")
    assert contents(out) == {"mark": b"new"}
    assert list(tmp_path.iterdir()) == [out]


def test_a_preparation_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    """As a launcher stops one: the ids of a large corpus are as large as the corpus."""

    def stopped() -> None:
        with draft_of(tmp_path / "out") as draft:
            (draft / "ids").touch()
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        stopped()
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not list(tmp_path.iterdir())


def test_a_handler_of_signals_stays_and_threads_have_none(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with draft_of(tmp_path / "out"):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    made: list[bool] = []

    def make() -> None:
        with draft_of(tmp_path / "out") as draft:
            made.append(draft.is_dir())

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert made == [True]


def test_processes_that_want_one_folder_take_turns(tmp_path: Path) -> None:
    order: list[str] = []
    entered, leave = threading.Event(), threading.Event()

    def first() -> None:
        with taking_turns(tmp_path / "out"):
            entered.set()
            leave.wait(20)
            order.append("first")

    def second() -> None:
        with taking_turns(tmp_path / "out"):
            order.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert entered.wait(20)
    threads[1].start()
    threads[1].join(0.2)
    leave.set()
    for thread in threads:
        thread.join(20)
    assert order == ["first", "second"]
    assert list(tmp_path.iterdir()) == []


def test_the_tokenizer_does_not_see_what_is_held_out(text: Path, tmp_path: Path) -> None:
    # The shortest document is held out where the share is too small for any.
    text.write_text(STORIES + "\n\nßßß ßß.")
    info = prepare(str(text), tmp_path / "out", vocab_size=60, held_out=1e-6)
    assert info.held_out_documents == 1
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer.model")
    assert tokenizer.piece_to_id("ß") == tokenizer.unk_id()
    assert tokenizer.piece_to_id("o") != tokenizer.unk_id()


def test_settings_out_of_range_are_named(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"from 0 to below 1. Got 1.0"):
        prepare(str(text), tmp_path / "out", vocab_size=60, held_out=1.0)
    with pytest.raises(ValueError, match=r"seed.*0.*-1"):
        prepare(str(text), tmp_path / "out", vocab_size=60, seed=-1)
    with pytest.raises(ValueError, match=r"shards.*1.*0"):
        prepare(str(text), tmp_path / "out", vocab_size=60, shards=0)


# Loading


def test_a_folder_that_is_no_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.*corpus.*python -m tools.corpus"):
        load_corpus(tmp_path / "nowhere")


def test_a_damaged_corpus_is_named(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    info = prepare(str(text), out, vocab_size=60)
    whole = contents(out)
    values = json.loads(whole["corpus.json"])
    assert CorpusInfo(**values) == info
    for name, content, message in (
        ("corpus.json", b"{", r"corpus.json is damaged"),
        ("corpus.json", b"[]", r"corpus.json does not hold exactly the entries"),
        ("corpus.json", json.dumps({**values, "more": 1}).encode(), r"corpus.json does not hold exactly the entries"),
        ("corpus.json", json.dumps({**values, "vocab_size": 61}).encode(), r"has 60 pieces where .* speaks of 61"),
        ("tokenizer.model", b"", r"tokenizer.model is missing or no sentencepiece model"),
        ("train.idx", whole["train.idx"][:50], r"train.idx has 50 bytes"),
        ("heldout.bin", None, r"incomplete: heldout.bin is missing"),
        ("train.bin", None, r"incomplete: train.bin is missing, though train.idx is there"),
    ):
        if content is None:
            (out / name).unlink()
        else:
            (out / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_corpus(out)
        (out / name).write_bytes(whole[name])
    assert load_corpus(out).info == info


def test_a_corpus_of_an_older_form_is_prepared_again(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    info = prepare(str(text), out, vocab_size=60)
    values = json.loads((out / "corpus.json").read_text())
    del values["shards"]
    (out / "corpus.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="exactly the entries"):
        load_corpus(out)
    assert prepare(str(text), out, vocab_size=60) == info == load_corpus(out).info


# The command


def test_the_command_says_what_is_wrong_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A file, below which there can be no folder.")
    for source, output in ((tmp_path / "none", tmp_path / "out"), (text, text / "out" / "below")):
        monkeypatch.setattr(sys, "argv", ["corpus", "prepare", "--source", str(source), "--output", str(output)])
        assert main() == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1


def test_what_a_kill_has_left_is_removed_the_day_after(tmp_path: Path) -> None:
    """A corpus has gigabytes, and nobody looks for them under such names."""
    old, young, other = (tmp_path / f".{name}.{digit * 32}.tmp" for name, digit in (("c", "a"), ("c", "b"), ("d", "a")))
    for folder in (old, young, other):
        folder.mkdir()
        (folder / "train.bin").write_bytes(b"ids")
    for path in (old, old / "train.bin", young, other, other / "train.bin"):
        os.utime(path, (0, 0))
    with draft_of(tmp_path / "c"):
        pass
    assert sorted(tmp_path.iterdir()) == [young, other], (
        "in one somebody wrote today, and the other is of another corpus"
    )
