"""What `download` is asked for: URLs, lists, and the files of a Wikipedia dump."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tyro

from tests.tools.corpus.web import Fault, Web, serving, sha1
from tools.corpus.download.files import choose, find_files
from tools.corpus.download.sources import Download, Dump, Patience, read_list
from tools.corpus.download.step import DownloadOptions, ThreadTeam, download
from tools.corpus.pipeline import Manifest

HASTY = Patience(retries=3, first_wait=0.0, timeout=5.0)
SUMS = "sha1sums.txt"


@pytest.fixture
def web() -> Iterator[Web]:
    with serving() as web:
        yield web


def dump_of(language: str = "en", date: str = "20261101", *, parts: bool = False) -> Dump:
    return Dump(language=language, date=date, content="pages-articles-multistream", parts=parts)


def add_dump(web: Web, wiki: str, date: str, *suffixes: str, sums: str = SUMS) -> None:
    """Files whose content is their name."""
    names = [f"{wiki}-{date}-{suffix}" for suffix in suffixes]
    for name in names:
        web.add(f"/{wiki}/{date}/{name}", name.encode())
    text = "".join(f"{sha1(name.encode())}  {name}\n" for name in names)
    web.add(f"/{wiki}/{date}/{wiki}-{date}-{sums}", text.encode())


def fetch_dump(output: Path, web: Web, language: str = "simple", date: str = "latest", parts: bool = False) -> Manifest:
    options = DownloadOptions(
        output=output, language=language, date=date, parts=parts, mirror=web.url(""), patience=HASTY
    )
    return download(options, ThreadTeam(2))


def test_a_list_without_end_is_refused(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.corpus.download.http._LARGEST_TEXT", 1 << 20)
    web.add(f"/enwiki/20261101/enwiki-20261101-{SUMS}", b"0" * (1 << 21))
    with pytest.raises(ValueError, match=r"sums\.txt is no list of files: it has more than 1 MiB\."):
        find_files(dump_of(), web.url(""), HASTY)


# --- URLs and lists ------------------------------------------------------------------------------------------------


def test_a_list_says_what_is_known_of_each_file(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text(
        "# books\n\nhttp://a.org/x%20y.txt\n"
        f"https://b.org/d/z.gz?key=1#part  SHA256:{'AB' * 32} 1234  # checked by hand\n"
        f"https://b.org/d/w.gz 0 md5:{'0' * 32}\n",
        encoding="utf-8-sig",
    )
    sources = read_list(path)
    assert sources == [
        Download(url="http://a.org/x%20y.txt"),
        Download(url="https://b.org/d/z.gz?key=1#part", checksum=f"sha256:{'ab' * 32}", size=1234),
        Download(url="https://b.org/d/w.gz", checksum=f"md5:{'0' * 32}", size=0),
    ]
    assert [source.name for source in sources] == ["x y.txt", "z.gz", "w.gz"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ftp://a.org/x", "only http:// and https://"),
        ("file:///etc/passwd", "only http:// and https://"),
        ("http:///x", "only http:// and https://"),
        ("http://[a/x", "only http:// and https://"),
        ("http://a.org/", "ends in '', which cannot be the name"),
        ("http://a.org/b/..", "cannot be the name"),
        ("http://a.org/b%2F..%2Fc/.d", "cannot be the name"),
        ("http://a.org/step.json", "cannot be the name"),
        ("http://a.org/a%00b", "cannot be the name"),
        (f"http://a.org/{'a' * 300}", "cannot be the name"),
        ("http://a.org/x sha256:12", "a checksum is one of md5, sha1, sha256, sha512"),
        (f"http://a.org/x crc:{'0' * 32}", "a checksum is one of"),
        ("http://a.org/x 12 13", "'13' is not understood"),
        ("http://a.org/x y", "'y' is not understood"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "list.txt"
    path.write_text(f"http://a.org/fine\n{line}\n")
    with pytest.raises(ValueError, match=r"list\.txt, line 2: ") as caught:
        read_list(path)
    assert message in str(caught.value)


def test_an_escaped_slash_leads_nowhere_else() -> None:
    assert Download(url="http://a.org/..%2F..%2Fb").name == "b"


@pytest.mark.parametrize(
    ("content", "message"), [(b"# nothing\n", "lists no URL"), (b"http://a.org/\xff", "is not UTF-8 at byte 13")]
)
def test_a_list_that_cannot_be_used(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "list.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_list(path)
    with pytest.raises(ValueError, match="No such file"):
        read_list(tmp_path / "none.txt")


def test_requests_that_make_no_sense(tmp_path: Path) -> None:
    team = ThreadTeam(1)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="nothing to fetch"):
        download(DownloadOptions(output=out), team)
    with pytest.raises(ValueError, match="one folder for each"):
        download(DownloadOptions(output=out, language="en", urls=("http://a.org/x",)), team)
    with pytest.raises(ValueError, match=r"http://a.org/x and http://b.org/x"):
        download(DownloadOptions(output=out, urls=("http://a.org/x", "http://b.org/x")), team)
    with pytest.raises(ValueError, match="only http:// and https://"):
        download(DownloadOptions(output=out, language="en", mirror="rsync://a.org"), team)
    english = DownloadOptions(output=out, language="en")
    wrongs: list[dict[str, Any]] = [{"language": "../x"}, {"date": "2026-11-01"}, {"content": "*"}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="Got "):
            download(dataclasses.replace(english, **wrong), team)
    assert not list(tmp_path.iterdir())


def test_passwords_are_in_no_record_and_no_message(tmp_path: Path, web: Web) -> None:
    url = web.add("/a", b"abc").replace("http://", "http://me:secret@")
    download(DownloadOptions(output=tmp_path / "out", urls=(url,), patience=HASTY), ThreadTeam(1))
    assert web.log[-1][2]["Authorization"].startswith("Basic ")
    assert "secret" not in (tmp_path / "out" / "step.json").read_text()
    with pytest.raises(ValueError, match="404") as caught:
        download(DownloadOptions(output=tmp_path / "two", urls=(f"{url}b",), patience=HASTY), ThreadTeam(1))
    assert "secret" not in str(caught.value)


def test_the_command_line() -> None:
    arguments = [
        "--output",
        "o",
        "--list",
        "l.txt",
        "--retries",
        "2",
        "--timeout",
        "5",
        "http://a.org/x",
        "http://a.org/y",
    ]
    options = tyro.cli(DownloadOptions, args=arguments)
    assert options.urls == ("http://a.org/x", "http://a.org/y")
    assert options.listed == Path("l.txt")
    assert options.patience == Patience(retries=2, timeout=5.0)
    assert tyro.cli(DownloadOptions, args=["--output", "o", "--language", "en", "--workers", "3"]).team().workers == 3


# --- Wikipedia -----------------------------------------------------------------------------------------------------


def test_a_dump_is_found_by_its_checksums(web: Web) -> None:
    add_dump(
        web, "enwiki", "20261101", "pages-articles-multistream.xml.bz2", "pages-articles-multistream-index.txt.bz2",
        "pages-articles.xml.bz2", "pages-articles-multistream10.xml-p9p12.bz2",
        "pages-articles-multistream2.xml-p5p8.bz2", "pages-articles-multistream1.xml-p3p4.bz2",
        "pages-articles-multistream1.xml-p1p2.bz2",
    )  # fmt: skip
    (whole,) = find_files(dump_of(), web.url("/"), HASTY)
    name = "enwiki-20261101-pages-articles-multistream.xml.bz2"
    assert whole == Download(url=web.url(f"/enwiki/20261101/{name}"), checksum=f"sha1:{sha1(name.encode())}")
    parts = find_files(dump_of(parts=True), web.url(""), HASTY)
    assert [part.name.rpartition("-")[2] for part in parts] == ["p1p2.bz2", "p3p4.bz2", "p5p8.bz2", "p9p12.bz2"]


def test_parts_and_the_whole_stand_in_for_one_another() -> None:
    whole = "enwiki-20261101-pages-articles-multistream.xml.bz2"
    part = "enwiki-20261101-pages-articles-multistream1.xml-p1p2.bz2"
    assert choose(dump_of(), "20261101", {part: ""}) == [part]
    assert choose(dump_of(parts=True), "20261101", {whole: ""}) == [whole]
    assert choose(dump_of(), "20261101", {}) == []


def test_the_latest_dump_is_the_newest_that_is_ready(tmp_path: Path, web: Web) -> None:
    file = "pages-articles-multistream.xml.bz2"
    add_dump(web, "simplewiki", "20261001", file)
    add_dump(web, "simplewiki", "20261020", file)
    add_dump(web, "simplewiki", "20261101", "stub-articles.xml.gz")
    web.add(
        "/simplewiki/", b'<a href="20261001/">x</a> <a href="/simplewiki/20261101/">y</a> <a href="20261020/">z</a>'
    )
    manifest = fetch_dump(tmp_path / "out", web)
    assert manifest.counts["checked"] == 1
    assert list(manifest.files) == [f"simplewiki-20261020-{file}"]
    assert manifest.settings["dump"]["date"] == "latest"


def test_a_killed_run_goes_on_with_the_dump_that_it_began(tmp_path: Path, web: Web) -> None:
    file = "pages-articles-multistream.xml.bz2"
    add_dump(web, "simplewiki", "20261001", file)
    web.add("/simplewiki/", b'<a href="20261001/">')
    web.files[f"/simplewiki/20261001/simplewiki-20261001-{file}"].faults = [Fault(status=404)]
    with pytest.raises(ValueError, match="404"):
        fetch_dump(tmp_path / "out", web)
    add_dump(web, "simplewiki", "20261101", file)
    web.add("/simplewiki/", b'<a href="20261001/"><a href="20261101/">')
    assert list(fetch_dump(tmp_path / "out", web).files) == [f"simplewiki-20261001-{file}"]


def test_a_killed_run_may_go_on_from_another_mirror(tmp_path: Path, web: Web) -> None:
    path = "/enwiki/20261101/enwiki-20261101-pages-articles-multistream.xml.bz2"
    content = b"abc" * 100_000
    web.add(f"/enwiki/20261101/enwiki-20261101-{SUMS}", f"{sha1(content)}  {path.rpartition('/')[2]}\n".encode())
    web.add(path, content, faults=[Fault(cut=200_000), *[Fault(status=503)] * 9])
    with pytest.raises(ConnectionError, match="in a row"):
        fetch_dump(tmp_path / "out", web, "en", "20261101")
    with serving() as other:
        other.add(path, content)
        manifest = fetch_dump(tmp_path / "out", other, "en", "20261101")
        assert manifest.counts == {"files": 1, "bytes": len(content), "checked": 1}
        # Its tags are not those of the first mirror.
        assert other.ranges(path) == [""]


def test_md5_serves_where_there_is_no_sha1(tmp_path: Path, web: Web) -> None:
    name = "zh_min_nanwiki-20261101-pages-articles-multistream.xml.bz2"
    web.add(f"/zh_min_nanwiki/20261101/{name}", b"abc")
    sums = "900150983cd24fb0d6963f7d28e17f72  " + name
    web.add("/zh_min_nanwiki/20261101/zh_min_nanwiki-20261101-md5sums.txt", sums.encode())
    manifest = fetch_dump(tmp_path / "out", web, "zh-min-nan", "20261101")
    assert manifest.counts == {"files": 1, "bytes": 3, "checked": 1}


def test_the_order_of_the_parts_is_that_of_the_pages(tmp_path: Path, web: Web) -> None:
    add_dump(web, "dewiki", "20261101", *(f"pages-articles-multistream{i}.xml-p{i}p{i}.bz2" for i in (10, 9, 2)))
    manifest = fetch_dump(tmp_path / "out", web, "de", "20261101", parts=True)
    assert manifest.counts["files"] == 3
    record = json.loads((tmp_path / "out" / "step.json").read_text())
    assert record["settings"]["dump"]["parts"] is True


def test_a_busy_server_of_dumps_is_asked_again(web: Web) -> None:
    add_dump(web, "enwiki", "20261101", "pages-articles-multistream.xml.bz2")
    web.files[f"/enwiki/20261101/enwiki-20261101-{SUMS}"].faults = [Fault(status=503)] * 2
    assert len(find_files(dump_of(), web.url(""), HASTY)) == 1


def test_a_dump_that_is_not_there(tmp_path: Path, web: Web) -> None:
    with pytest.raises(ValueError, match=r"no pages-articles-multistream.*20261101"):
        find_files(dump_of(), web.url(""), HASTY)
    with pytest.raises(ValueError, match=r"there is no http://.*/xxwiki/\. Check --language"):
        fetch_dump(tmp_path / "out", web, "xx")
    web.add("/enwiki/20261101/enwiki-20261101-sha1sums.txt", b"", faults=[Fault(status=403)])
    with pytest.raises(ValueError, match="the server says 403 Forbidden"):
        find_files(dump_of(), web.url(""), HASTY)
    with serving() as gone:
        mirror = gone.url("")
    with pytest.raises(ValueError, match=r"(?i)cannot be fetched: .*connection refused"):
        find_files(dump_of(), mirror, HASTY)
