"""launch/Dockerfile, by reading: the rules of hadolint that matter, and that all it copies and names is there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "launch" / "Dockerfile"
INSTALL_OF_APT = re.compile(r"\bapt-get\b[^&|;]*\binstall\b[^&|;]*")


def instructions(text: str) -> list[tuple[str, str]]:
    """Each instruction with its arguments; comments are left out and lines that go on are joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (name.upper(), " ".join(rest.split())) for name, _, rest in (x.partition(" ") for x in joined.splitlines() if x)
    ]


def faults(text: str) -> list[str]:
    """What hadolint would say, by its rule, and which copied files are not in the repository."""
    found, user = [], "root"
    for name, rest in instructions(text):
        if name == "FROM":
            image, _, tag = rest.split()[0].partition(":")
            found += ["DL3006: no tag"] * (not tag) + ["DL3007: latest"] * (tag == "latest")
            found += ["a registry's host"] * ("/" in image)
            found += ["not slim, or no exact version"] * (not re.fullmatch(r"3\.\d+\.\d+-slim-\w+", tag))
        if name == "WORKDIR" and not PurePosixPath(rest).is_absolute():
            found.append(f"DL3000: WORKDIR {rest} is not absolute")
        if name in ("ADD", "MAINTAINER"):
            found.append(f"DL3020, DL4000: {name}")
        if name in ("CMD", "ENTRYPOINT"):
            try:
                assert all(isinstance(word, str) for word in json.loads(rest))
            except (ValueError, AssertionError):
                found.append(f"DL3025: {name} is not in JSON")
        if name == "RUN":
            found += ["DL3003: cd"] * bool(re.search(r"(^|[;&|]\s*)cd\s", rest))
            found += ["DL3004: sudo"] * bool(re.search(r"\bsudo\b", rest))
            found += ["DL3042: pip keeps its cache"] * ("pip install" in rest) * ("--no-cache-dir" not in rest)
            for install in INSTALL_OF_APT.findall(rest):
                found += ["DL3015: recommended packages"] * ("--no-install-recommends" not in install)
                found += ["DL3009: lists are left"] * ("rm -rf /var/lib/apt/lists" not in rest)
        if name == "COPY":
            sources = [word for word in rest.split()[:-1] if not word.startswith("--")]
            found += [f"{source} is not there" for source in sources if not (ROOT / source).exists()]
        if name == "USER":
            user = rest.partition(":")[0]
    return found + ["DL3002: the last user is root"] * (user in ("root", "0"))


def test_nothing_is_wrong() -> None:
    assert faults(FILE.read_text()) == []


@pytest.mark.parametrize(
    ("line", "changed", "fault"),
    [
        ("FROM python:3.12.12-slim-bookworm", "FROM python:latest", "DL3007"),
        ("FROM python:", "FROM ghcr.io/x/python:", "a registry's host"),
        ("WORKDIR /opt", "WORKDIR opt", "DL3000"),
        ("USER trainer", "USER root", "DL3002"),
        ("USER trainer\n", "", "DL3002"),
        ("COPY constraints.txt", "COPY constraint.txt", "constraint.txt is not there"),
        ("COPY tools/", "ADD tools/", "DL3020"),
        ("RUN pip install --no-cache-dir $", "RUN cd / && pip install --no-cache-dir $", "DL3003"),
        ("--no-cache-dir --constraint", "--constraint", "DL3042"),
        ("USER trainer", "RUN apt-get update && apt-get install -y git\nUSER trainer", "DL3015"),
        ("USER trainer", "RUN apt-get install --no-install-recommends -y git\nUSER trainer", "DL3009"),
        ('CMD ["launch/local.sh", ', 'CMD launch/local.sh "', "DL3025"),
    ],
)
def test_each_rule_sees_its_fault(line: str, changed: str, fault: str) -> None:
    text = FILE.read_text()
    assert line in text
    assert any(told.startswith(fault) or fault in told for told in faults(text.replace(line, changed)))


def test_what_it_names_is_there() -> None:
    """The command, the extras, the variables, and what the builder is sent; the document builds this file."""
    read = dict(instructions(FILE.read_text()))
    command = json.loads(read["CMD"])
    assert [(ROOT / word).is_file() for word in command if word.startswith("launch/")] == [True, True]
    (extras,) = re.findall(r"\.\[([\w,]+)\]", read["RUN"])
    setup = (ROOT / "setup.py").read_text()
    assert [extra for extra in extras.split(",") if f'"{extra}": [' not in setup] == []
    assert len(re.findall(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)) == 1
    sent = {line[1:] for line in (FILE.parent / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"}
    copied = [rest.split()[:-1] for name, rest in instructions(FILE.read_text()) if name == "COPY"]
    assert sent == {source.rstrip("/") for sources in copied for source in sources}
    page = (ROOT / "docs" / "launching.md").read_text()
    (build, other) = (shlex.split(line) for line in re.findall(r"^ {4}(docker build .*)$", page, re.MULTILINE))
    assert build[build.index("--file") + 1] == other[other.index("--file") + 1] == "launch/Dockerfile"
    assert build[-1] == other[-1] == "."
    assert other[other.index("--build-arg") + 1].partition("=")[0] == read["ARG"].partition("=")[0]
    folder = read["WORKDIR"]
    mounts = re.findall(r"^ {4}docker run .*--volume \S+?:(\S+)", page, re.MULTILINE)
    assert mounts
    assert all(mount.startswith(f"{folder}/runs") for mount in mounts)
    for line in re.findall(r"^ {4}docker run (.*)$", page, re.MULTILINE):
        assert all((ROOT / word).is_file() for word in line.split() if word.startswith("launch/")), line
