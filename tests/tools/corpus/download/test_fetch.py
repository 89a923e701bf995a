"""`download` against a server that cuts, lies and changes its mind: the files are right in the end, or it says why."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import multiprocessing
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from urllib3 import HTTPResponse

from tests.tools.corpus.pipeline_steps import ROOT, command
from tests.tools.corpus.web import Fault, Web, serving
from tools.common.log import start_logging
from tools.corpus.download import http
from tools.corpus.download.fetch import Partial
from tools.corpus.download.http import Retries
from tools.corpus.download.sources import Download, Patience
from tools.corpus.download.step import DownloadOptions, ThreadTeam, download
from tools.corpus.pipeline import BadInput, Manifest, local_team, read_manifest

CONTENT = random.Random(0).randbytes(1_000_000)
HASTY = Patience(retries=3, first_wait=0.0, timeout=5.0)


@pytest.fixture
def web() -> Iterator[Web]:
    with serving() as web:
        yield web


def fetch(output: Path, *urls: str, workers: int = 1, **options: Any) -> Manifest:
    return download(DownloadOptions(output=output, urls=urls, **{"patience": HASTY, **options}), ThreadTeam(workers))


def write_list(folder: Path, *lines: str) -> Path:
    path = folder / "list.txt"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def kept(output: Path) -> Path:
    """Where the files of a run lie that has not come to its end."""
    return output.with_name(f".{output.name}.partial")


def begin_file(output: Path, web: Web, path: str) -> None:
    """A run that fails after 400,000 bytes and keeps them."""
    web.files[path].faults = [Fault(cut=400_000), *[Fault(status=503)] * 2]
    with pytest.raises(ConnectionError):
        fetch(output, web.url(path), patience=dataclasses.replace(HASTY, retries=2))
    web.log.clear()


# --- what works ----------------------------------------------------------------------------------------------------


def test_files_come_as_they_are(tmp_path: Path, web: Web) -> None:
    urls = [web.add(f"/some/file-{i}.bin", CONTENT[: 1000 * i]) for i in range(4)]
    manifest = fetch(tmp_path / "out", *urls, workers=3)
    assert manifest.counts == {"files": 4, "bytes": 6000, "checked": 0}
    assert manifest.files == {f"file-{i}.bin": 1000 * i for i in range(4)}
    for i in range(4):
        assert (tmp_path / "out" / f"file-{i}.bin").read_bytes() == CONTENT[: 1000 * i]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_what_is_there_is_not_asked_for_again(tmp_path: Path, web: Web) -> None:
    url = web.add("/a", CONTENT)
    first = fetch(tmp_path / "out", url)
    web.log.clear()
    assert fetch(tmp_path / "out", url) == first
    assert web.log == []
    with pytest.raises(ValueError, match=r"step 'download'.*other settings"):
        fetch(tmp_path / "out", web.add("/b", CONTENT))


def test_the_tool_names_itself_and_asks_for_plain_bytes(tmp_path: Path, web: Web) -> None:
    fetch(tmp_path / "out", web.add("/a", CONTENT))
    for _, _, headers in web.log:
        assert headers["User-Agent"].startswith("tensor3d")
        assert "corpus" in headers["User-Agent"]
        assert headers["Accept-Encoding"] == "identity"


def test_a_compressed_file_stays_compressed(tmp_path: Path, web: Web) -> None:
    # Some servers call a .gz file an encoding of something else.
    url = web.add("/a.gz", CONTENT[:5000], faults=[Fault(headers={"Content-Encoding": "gzip"})])
    fetch(tmp_path / "out", url)
    assert (tmp_path / "out" / "a.gz").read_bytes() == CONTENT[:5000]


def test_a_file_of_unknown_length(tmp_path: Path, web: Web) -> None:
    assert fetch(tmp_path / "out", web.add("/a", CONTENT, length=False)).files == {"a": len(CONTENT)}


@pytest.mark.parametrize("kind", ["md5", "sha1", "sha256", "sha512"])
def test_size_and_checksum_of_a_list_are_checked(tmp_path: Path, web: Web, kind: str) -> None:
    url = web.add("/a", CONTENT)
    listed = write_list(
        tmp_path, "# all of it", f"{url} {kind}:{hashlib.new(kind, CONTENT).hexdigest()} {len(CONTENT)}"
    )
    assert fetch(tmp_path / "out", listed=listed).counts == {"files": 1, "bytes": len(CONTENT), "checked": 1}


def test_processes_can_be_the_workers(tmp_path: Path, web: Web) -> None:
    urls = tuple(web.add(f"/{i}", CONTENT) for i in range(3))
    manifest = download(DownloadOptions(output=tmp_path / "out", urls=urls, patience=HASTY), local_team(2))
    assert manifest.files == {str(i): len(CONTENT) for i in range(3)}


def test_progress_ends_at_the_size_of_the_file_whatever_happened(tmp_path: Path, web: Web) -> None:
    from tools.corpus.download.fetch import fetch as fetch_file

    url = web.add("/a", CONTENT, ranges=False, faults=[Fault(cut=300_000), Fault(status=503), Fault(cut=500_000)])
    told: list[int] = []
    partial = Partial(tmp_path / "unit", url)
    fetch_file(Download(url=url), tmp_path / "a", partial, HASTY, told.append)
    assert sum(told) == len(CONTENT)
    assert min(told) < -100_000


def test_without_requests_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.corpus.download.step.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'tensor3d\[corpus\]'"):
        fetch(tmp_path / "out", "http://a.org/x")


def test_a_server_sends_no_more_than_two_files_at_once(tmp_path: Path, web: Web) -> None:
    urls = [web.add(f"/{number}", CONTENT[:1000], faults=[Fault(delay=0.1)]) for number in range(6)]
    with serving() as other:
        urls += [other.add(f"/other-{number}", CONTENT[:1000], faults=[Fault(delay=0.1)]) for number in range(3)]
        assert fetch(tmp_path / "out", *urls, workers=8).counts["files"] == 9
        assert (web.most_at_once, other.most_at_once) == (2, 2)


def test_more_workers_than_a_server_allows_are_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start_logging()
    DownloadOptions(output=tmp_path / "out").team()
    assert capsys.readouterr().err == ""
    assert DownloadOptions(output=tmp_path / "out", workers=16).team().workers == 16
    assert capsys.readouterr().err == "of one server at most 2 files are fetched at once\n"
    with pytest.raises(ValueError, match=r"workers.*1.*0"):
        DownloadOptions(output=tmp_path / "out", workers=0).team()


@pytest.mark.slow
def test_under_mpirun_the_first_rank_fetches_for_all(tmp_path: Path, web: Web) -> None:
    urls = [web.add(f"/{number}", CONTENT[:1000], faults=[Fault(delay=0.1)]) for number in range(6)]
    arguments = ["download", "--output", str(tmp_path / "out"), *urls]
    done = subprocess.run(command(arguments, ranks=4), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_manifest(tmp_path / "out", "download").counts["files"] == 6
    assert 1 <= web.most_at_once <= 2


# --- cuts ----------------------------------------------------------------------------------------------------------


def test_a_cut_connection_is_taken_up_where_it_ended(tmp_path: Path, web: Web) -> None:
    url = web.add("/a", CONTENT, faults=[Fault(cut=300_000), Fault(cut=300_000), Fault(cut=10)])
    fetch(tmp_path / "out", url)
    assert (tmp_path / "out" / "a").read_bytes() == CONTENT
    starts = [int(asked.removeprefix("bytes=").removesuffix("-")) for asked in web.ranges("/a")[1:]]
    assert len(starts) == 3
    assert 200_000 < starts[0] <= 300_000
    assert 400_000 < starts[1] <= starts[2] <= 600_010
    assert web.log[-1][2]["If-Range"] == '"first"'


def test_many_cuts_are_no_reason_to_give_up_while_bytes_come(tmp_path: Path, web: Web) -> None:
    url = web.add("/a", CONTENT, faults=[Fault(cut=100_000)] * 9)
    fetch(tmp_path / "out", url)
    assert (tmp_path / "out" / "a").read_bytes() == CONTENT


def test_a_killed_run_is_taken_up_by_the_next(tmp_path: Path, web: Web) -> None:
    url = web.add("/a", CONTENT)
    begin_file(tmp_path / "out", web, "/a")
    fetch(tmp_path / "out", url)
    assert (tmp_path / "out" / "a").read_bytes() == CONTENT
    (asked,) = web.ranges("/a")
    assert int(asked.removeprefix("bytes=").removesuffix("-")) > 300_000


def test_kill_minus_9(tmp_path: Path, web: Web) -> None:
    url = web.add("/a", CONTENT, faults=[Fault(cut=400_000, stall=True)])
    run = multiprocessing.get_context("forkserver").Process(target=fetch, args=(tmp_path / "out", url))
    run.start()
    part = kept(tmp_path / "out") / "scratch" / "00000.part"
    end = time.monotonic() + 30
    while not (part.exists() and part.stat().st_size > 200_000):
        assert run.is_alive()
        assert time.monotonic() < end
        time.sleep(0.01)
    run.kill()
    run.join()
    fetch(tmp_path / "out", url)
    assert (tmp_path / "out" / "a").read_bytes() == CONTENT
    assert int(web.ranges("/a")[-1].removeprefix("bytes=").removesuffix("-")) > 200_000


def test_a_connection_that_falls_silent_counts_as_cut(tmp_path: Path, web: Web) -> None:
    url = web.add("/a", CONTENT, faults=[Fault(cut=400_000, stall=True)])
    fetch(tmp_path / "out", url, patience=dataclasses.replace(HASTY, timeout=0.2))
    assert (tmp_path / "out" / "a").read_bytes() == CONTENT
    assert web.ranges("/a")[-1] != ""


def test_a_run_killed_between_the_last_byte_and_the_note_fetches_nothing(tmp_path: Path, web: Web) -> None:
    url = web.add("/a", CONTENT)
    begin_file(tmp_path / "out", web, "/a")
    (kept(tmp_path / "out") / "output" / "a").write_bytes(CONTENT)
    fetch(tmp_path / "out", url)
    assert web.ranges("/a") == []


def test_a_file_that_changed_is_fetched_afresh(tmp_path: Path, web: Web) -> None:
    url = web.add("/a", CONTENT)
    begin_file(tmp_path / "out", web, "/a")
    web.add("/a", CONTENT[::-1], etag='"second"')
    fetch(tmp_path / "out", url)
    assert (tmp_path / "out" / "a").read_bytes() == CONTENT[::-1]
    assert web.ranges("/a")[0] != ""


def test_a_server_that_does_not_look_at_if_range_is_seen_through(tmp_path: Path, web: Web) -> None:
    url = web.add("/a", CONTENT)
    begin_file(tmp_path / "out", web, "/a")
    web.add("/a", CONTENT[::-1], etag='"second"', checks_if_range=False)
    fetch(tmp_path / "out", url)
    assert (tmp_path / "out" / "a").read_bytes() == CONTENT[::-1]
    assert web.ranges("/a")[-1] == ""


def test_a_file_that_became_shorter_is_fetched_afresh(tmp_path: Path, web: Web) -> None:
    url = web.add("/a", CONTENT)
    begin_file(tmp_path / "out", web, "/a")
    web.files["/a"].content = CONTENT[:1000]
    fetch(tmp_path / "out", url)
    assert (tmp_path / "out" / "a").read_bytes() == CONTENT[:1000]


@pytest.mark.parametrize("how", [{"etag": ""}, {"etag": 'W/"weak"'}], ids=["no-tag", "weak-tag"])
def test_where_nothing_tells_versions_apart_it_begins_afresh(tmp_path: Path, web: Web, how: dict[str, Any]) -> None:
    url = web.add("/a", CONTENT, faults=[Fault(cut=300_000)], **how)
    fetch(tmp_path / "out", url)
    assert (tmp_path / "out" / "a").read_bytes() == CONTENT
    assert web.ranges("/a") == ["", ""]


def test_a_server_without_ranges_begins_afresh(tmp_path: Path, web: Web) -> None:
    fetch(tmp_path / "out", web.add("/a", CONTENT, ranges=False, faults=[Fault(cut=300_000)]))
    assert (tmp_path / "out" / "a").read_bytes() == CONTENT


def test_a_server_may_send_less_than_the_rest(tmp_path: Path, web: Web) -> None:
    fetch(tmp_path / "out", web.add("/a", CONTENT, longest=250_000, faults=[Fault(cut=300_000)]))
    assert (tmp_path / "out" / "a").read_bytes() == CONTENT
    assert len(web.ranges("/a")) == 4


def test_a_date_of_change_serves_where_there_is_no_tag(tmp_path: Path, web: Web) -> None:
    date = "Sun, 01 Nov 2026 10:00:00 GMT"
    url = web.add("/a", CONTENT, etag="", modified=date, faults=[Fault(cut=300_000)])
    fetch(tmp_path / "out", url)
    assert web.log[-1][2]["If-Range"] == date
    assert web.ranges("/a")[-1] != ""


def test_a_checksum_serves_where_nothing_tells_versions_apart(tmp_path: Path, web: Web) -> None:
    url = web.add("/a", CONTENT, etag="", faults=[Fault(cut=300_000)])
    listed = write_list(tmp_path, f"{url} sha256:{hashlib.sha256(CONTENT).hexdigest()}")
    fetch(tmp_path / "out", listed=listed)
    assert web.ranges("/a")[-1] != ""


def test_a_server_that_always_cuts_at_the_same_place_is_given_up(tmp_path: Path, web: Web) -> None:
    url = web.add("/a", CONTENT, ranges=False, faults=[Fault(cut=300_000)] * 100)
    with pytest.raises(ConnectionError, match=r"/a, byte \d+:.*times in a row.*it"):
        fetch(tmp_path / "out", url)
    assert len(web.ranges("/a")) < 10


# --- busy servers --------------------------------------------------------------------------------------------------


def test_a_busy_server_is_asked_again(tmp_path: Path, web: Web) -> None:
    faults = [Fault(status=503), Fault(status=429, headers={"Retry-After": "0"}), Fault(status=500)]
    fetch(tmp_path / "out", web.add("/a", CONTENT, faults=faults))
    assert (tmp_path / "out" / "a").read_bytes() == CONTENT


def test_waits_grow_and_the_server_may_ask_for_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(http.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(http.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    waits = []
    for failures, asked in ((1, ""), (2, ""), (3, ""), (20, ""), (1, "90"), (1, "1000000000"), (1, "soon")):
        begin, retries = clock[0], Retries.of(Patience(retries=50, first_wait=1.0))
        for _ in range(failures):
            retries = retries.increment("GET", "/a")
        retries.sleep(HTTPResponse(headers={"Retry-After": asked}))
        waits.append(clock[0] - begin)
    assert waits == pytest.approx([1, 2, 4, 60, 90, 3600, 1])


def test_a_wait_can_be_stopped() -> None:
    def stop(size: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        Retries.of(Patience(first_wait=30.0), stop).increment("GET", "/a").sleep()


def test_retry_after_is_a_number_or_a_date() -> None:
    def asked(value: str) -> float:
        return Retries.of(HASTY).get_retry_after(HTTPResponse(headers={"Retry-After": value}))

    assert asked("120") == 120.0
    assert asked("Sun, 01 Nov 1998 10:00:00 GMT") == 0.0
    assert asked("Fri, 01 Nov 2999 10:00:00 GMT") == 3600.0
    assert asked("") == asked("soon") == 0.0


def test_a_server_that_stays_busy_is_given_up(tmp_path: Path, web: Web) -> None:
    url = web.add("/a", CONTENT, faults=[Fault(status=503)] * 50)
    with pytest.raises(ConnectionError, match=r"server.*503 Service Unavailable, \b4\b"):
        fetch(tmp_path / "out", url)
    assert len(web.ranges("/a")) == 4


def test_a_missing_file_is_not_asked_for_twice(tmp_path: Path, web: Web) -> None:
    with pytest.raises(BadInput, match=r"/none.*404.*URL"):
        fetch(tmp_path / "out", web.url("/none"))
    assert len(web.ranges("/none")) == 1


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with serving() as gone:
        url = gone.url("/a")
    with pytest.raises(ConnectionError, match=r"(?i)connection refused.*4"):
        fetch(tmp_path / "out", url)


# --- wrong content -------------------------------------------------------------------------------------------------


def test_a_wrong_checksum_gets_one_more_try(tmp_path: Path, web: Web) -> None:
    url = web.add("/a", CONTENT, faults=[Fault(spoil=True)])
    listed = write_list(tmp_path, f"{url} sha1:{hashlib.sha1(CONTENT).hexdigest()}")
    fetch(tmp_path / "out", listed=listed)
    assert (tmp_path / "out" / "a").read_bytes() == CONTENT


def test_a_checksum_that_stays_wrong_is_named_beside_the_right_one(tmp_path: Path, web: Web) -> None:
    expected = hashlib.sha1(b"something else").hexdigest()
    listed = write_list(tmp_path, f"{web.add('/a', CONTENT)} sha1:{expected}")
    with pytest.raises(BadInput) as caught:
        fetch(tmp_path / "out", listed=listed)
    assert f"its sha1 is {hashlib.sha1(CONTENT).hexdigest()} where {expected} is expected" in str(caught.value)
    assert len(web.ranges("/a")) == 2
    assert not list(kept(tmp_path / "out").rglob("*.part*"))
    assert not (tmp_path / "out").exists()


def test_a_wrong_size_is_seen_before_the_file_has_come(tmp_path: Path, web: Web) -> None:
    listed = write_list(tmp_path, f"{web.add('/a', CONTENT)} 77")
    with pytest.raises(BadInput, match="the server has 1000000 bytes where 77 are expected"):
        fetch(tmp_path / "out", listed=listed)


def test_a_wrong_size_is_seen_where_the_server_does_not_tell(tmp_path: Path, web: Web) -> None:
    listed = write_list(tmp_path, f"{web.add('/a', CONTENT, length=False)} 77")
    with pytest.raises(BadInput, match="1000000 bytes came where 77 are expected"):
        fetch(tmp_path / "out", listed=listed)


def test_bad_files_are_left_out_and_listed(tmp_path: Path, web: Web) -> None:
    good = web.add("/good", CONTENT)
    listed = write_list(tmp_path, good, web.url("/none"), f"{web.add('/wrong', CONTENT)} md5:{'0' * 32}")
    manifest = fetch(tmp_path / "out", listed=listed, skip_bad=True, workers=2)
    assert manifest.counts == {"files": 1, "bytes": len(CONTENT), "checked": 0}
    assert manifest.left_out == 2
    lines = [json.loads(line) for line in (tmp_path / "out" / "left-out.jsonl").read_text().splitlines()]
    assert [line["file"] for line in lines] == ["none", "wrong"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["good", "left-out.jsonl", "step.json"]


def test_a_full_disk_is_no_fault_of_the_server(tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(partial: Partial, blocks: object) -> Iterator[int]:
        raise OSError(errno.ENOSPC, "No space left on device", str(partial.path))
        yield 0

    url = web.add("/a", CONTENT)
    monkeypatch.setattr(Partial, "append", fail)
    with pytest.raises(OSError, match="No space left on device"):
        fetch(tmp_path / "out", url, skip_bad=True)
    monkeypatch.undo()
    assert fetch(tmp_path / "out", url, skip_bad=True).files == {"a": len(CONTENT)}


def test_an_outage_is_no_bad_input(tmp_path: Path, web: Web) -> None:
    """Else a network that is down for a while would leave out all that was not there yet, and end well."""
    url = web.add("/a", CONTENT, faults=[Fault(cut=400_000), *[Fault(status=503)] * 4])
    with pytest.raises(ConnectionError, match=r"in a row\. Check the network"):
        fetch(tmp_path / "out", url, web.url("/none"), skip_bad=True)
    assert not (tmp_path / "out").exists()
    web.log.clear()
    manifest = fetch(tmp_path / "out", url, web.url("/none"), skip_bad=True)
    assert (manifest.counts["files"], manifest.left_out) == (1, 1)
    assert int(web.ranges("/a")[0].removeprefix("bytes=").removesuffix("-")) > 300_000


def test_one_failure_stops_the_others_soon(tmp_path: Path, web: Web) -> None:
    slow = web.add("/slow", CONTENT, faults=[Fault(status=503, headers={"Retry-After": "300"})])
    with pytest.raises(BadInput, match="404"):
        fetch(tmp_path / "out", slow, web.url("/none"), workers=2)


def test_a_server_that_is_gone_keeps_nothing_from_being_fetched(tmp_path: Path, web: Web) -> None:
    gone, there = "http://127.0.0.1:1/gone.txt", web.add("/there", CONTENT)
    with pytest.raises(ConnectionError, match=r"gone.txt"):
        fetch(tmp_path / "out", gone, there)
    assert (kept(tmp_path / "out") / "output" / "there").read_bytes() == CONTENT
