"""What a shell could read as something else arrives byte for byte through every launcher, and nothing is run by it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ran

LAUNCH = Path(__file__).parents[2] / "launch"
REAL_MPIRUN = Path(sys.executable).with_name("mpirun")
WORDS = [
    *(
        "$(touch canary)",
        "`touch canary`",
        "'$(touch canary)'",
        '"`touch canary`"',
        "\\$(touch canary)",
        "$HOME",
        "${x}",
    ),
    *("; touch canary", "& touch canary", "| touch canary", "> canary", "<(touch canary)", "\ntouch canary\n", "a\nb"),
    *(
        "",
        " ",
        "a  b",
        "\t",
        "'",
        '"',
        "\\",
        "*",
        "?",
        "[a-z]*",
        "{a,b}",
        "~",
        "!!",
        "#",
        "%s%n",
        "a=b",
        "\x7f",
        "\x1b[2J",
    ),
    *("-x", "--", "--cube", "-", "Zürich 東京", "\u202e"),
]
# Notes how it was called; what the launchers ask of an interpreter they get from a real one.
PYTHON = """#!/bin/sh
case $1 in -c | launch/net_interface.py | launch/ssh.py) exec "$REAL" "$@" ;; esac
printf '%s\\0' "$@" >>"$CALLS"
printf 'end of the call\\0' >>"$CALLS"
"""
SRUN = '#!/bin/sh\nwhile [ "$1" != bash ]; do shift; done\nSLURM_NODEID=0 exec "$@"\n'
SCONTROL = "#!/bin/sh\necho a1\n"
MPIRUN = "#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path.resolve() / "a $(touch canary) 'checkout'"
    shutil.copytree(LAUNCH, root / "launch")
    (tmp_path / "elsewhere" / "launch").mkdir(parents=True)
    (root / "bin").mkdir()
    (root / ".venv" / "bin").mkdir(parents=True)
    for path, text in (
        (root / ".venv" / "bin" / "python", PYTHON),
        (root / "bin" / "srun", SRUN),
        (root / "bin" / "scontrol", SCONTROL),
        (root / "bin" / "mpirun", MPIRUN),
    ):
        path.write_text(text)
        path.chmod(0o755)
    return root


def started(checkout: Path, *command: str) -> str:
    """What it prints."""
    variables = {
        "PATH": f"{checkout}/bin:/usr/bin:/bin",
        "CALLS": str(checkout.parent / "calls"),
        "REAL": sys.executable,
        "CDPATH": str(checkout.parent / "elsewhere"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "a1",
        "SLURM_CPUS_ON_NODE": "8",
    }
    done = ran(command, cwd=checkout, env=variables)
    assert not list(checkout.parent.rglob("canary")), "something was run"
    assert done.returncode == 0, done.stderr
    return done.stdout


def trainings(checkout: Path) -> list[list[str]]:
    """The words of the calls that train, from the recipe on."""
    calls = (checkout.parent / "calls").read_bytes().decode().split("end of the call\0")
    words = [call.split("\0")[:-1] for call in calls]
    return [of_training(each) for each in words if "tools.pretrain" in each]


def of_training(words: list[str]) -> list[str]:
    return [word for word in words[words.index("tools.pretrain") + 1 :] if word != "--prepare-only"]


def typed(checkout: Path, told: str) -> list[list[str]]:
    """The same of the lines of a dry run, when they are typed."""
    found = []
    for line in told.splitlines():
        if "tools.pretrain" in line:
            script = 'eval "set -- $1"; printf "%s\\0" "$@"'
            done = subprocess.run(["bash", "-c", script, "-", line], cwd=checkout, capture_output=True, check=True)
            found.append(of_training(done.stdout.decode().split("\0")[:-1]))
    assert not list(checkout.parent.rglob("canary")), "something was run"
    return found


TORCHRUN = ["--nodes", "1", "--node-rank", "0", "--master", "127.0.0.1"]
LAUNCHERS: dict[str, list[str]] = {
    "local.sh": ["launch/local.sh"],
    "local.sh, a cube": ["launch/local.sh", "--cube", "2x1x1"],
    "torchrun.sh": ["launch/torchrun.sh", *TORCHRUN],
    "slurm.sbatch": ["bash", "launch/slurm.sbatch"],
}


@pytest.mark.parametrize("recipe", ["$(touch canary)", "a\nb ' \" \\ `touch canary` 東京 *.toml"])
@pytest.mark.parametrize("name", [*LAUNCHERS, "mpirun.sh"])
def test_words_reach_training(checkout: Path, name: str, recipe: str) -> None:
    (checkout / recipe).touch()
    command = LAUNCHERS.get(name, ["launch/mpirun.sh"])
    told = started(checkout, *command, "--dry-run", recipe, "--", *WORDS)
    shown = typed(checkout, told)
    assert shown
    for words in shown:
        assert (words[0], words[-len(WORDS) :]) == (recipe, WORDS)
    if name in LAUNCHERS:
        started(checkout, *command, recipe, "--", *WORDS)
        assert trainings(checkout)
        for words in trainings(checkout):
            assert (words[0], words[-len(WORDS) :]) == (recipe, WORDS)


@pytest.mark.skipif(not REAL_MPIRUN.exists(), reason="PyPI's mpich is not installed: make .venv")
@pytest.mark.parametrize("starter", ["", "-prepend-rank"])
def test_words_pass_through_a_real_mpirun(checkout: Path, starter: str) -> None:
    """By the simple starter, and, with options of mpirun's own, by mpirun itself."""
    recipe = "$(touch canary) 東京 'a b'"
    (checkout / recipe).touch()
    call = ["launch/mpirun.sh", "--no-doctor", "--mpirun", f"{REAL_MPIRUN} {starter}".strip(), recipe, "--", *WORDS]
    started(checkout, *call)
    calls = trainings(checkout)
    assert len(calls) == 2  # the preparation, and the rank
    for found in calls:
        assert (found[0], found[-len(WORDS) :]) == (recipe, WORDS)


@pytest.mark.parametrize("word", [":", ":x"])
def test_a_word_that_mpirun_reads_as_the_next_command_is_refused(checkout: Path, word: str) -> None:
    (checkout / "small.toml").touch()
    call = ["launch/mpirun.sh", "--dry-run", "small.toml", "--data.separator", word]
    done = subprocess.run(call, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"mpirun would begin another command at the word '{word}'. Write --NAME=VALUE" in done.stderr


def test_words_cross_ssh(checkout: Path) -> None:
    """A shell at the far end splits them once more."""
    (checkout / "launch" / "torchrun.sh").write_text('#!/bin/sh\nprintf "%s\\0" "$@" >"$CALLS"\n')
    shell = "sh -c 'shift; exec sh -c \"$*\"' ssh"
    command = [sys.executable, "launch/ssh.py", "--hosts", "$(touch${IFS}canary);`touch`", "--ssh", shell]
    started(checkout, *command, "--repository", str(checkout), "--", *WORDS)
    words = (checkout.parent / "calls").read_bytes().decode().split("\0")[:-1]
    assert words[-len(WORDS) :] == WORDS
    assert words[words.index("--master") + 1] == "$(touch${IFS}canary);`touch`"


def test_words_reach_the_steps_of_a_corpus(checkout: Path) -> None:
    files = [word for word in WORDS if "/" not in word and word not in ("", "-", "--", "-x", "--cube")]
    for name in files:
        (checkout / name).touch()
    started(checkout, "launch/corpus.sh", "--output", "$(touch canary) out", "--vocab-size", "99", *files)
    first = (checkout.parent / "calls").read_bytes().decode().split("end of the call\0")[0].split("\0")
    assert [os.path.basename(word) for word in first if os.path.dirname(word) == str(checkout)][: len(files)] == files
