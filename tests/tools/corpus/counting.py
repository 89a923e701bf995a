"""A step for the tests of the engine: upper-cases words, a unit each. Also run by itself, and under mpirun."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.corpus.pipeline import BadInput, Context, Manifest, Options, Stage, Team, Unit, draft

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]


@dataclass(frozen=True, kw_only=True)
class Word(Unit):
    text: str


@dataclass(frozen=True, kw_only=True)
class Shout(Options):
    words: tuple[str, ...] = tuple(WORDS)
    kill_at: str | None = None
    """The process that comes to this word is killed there, after it has written the word's file."""


def units(words: tuple[str, ...]) -> list[Word]:
    return [Word(name=f"{number:05d}", size=len(word), text=word) for number, word in enumerate(words)]


@dataclass(frozen=True)
class Shouting:
    """The work on a word; "bad" is bad input, "broken" our own mistake."""

    kill_at: str | None

    def __call__(self, unit: Word, context: Context) -> dict[str, int]:
        if unit.text == "broken":
            raise ZeroDivisionError("a mistake of ours")
        if unit.text == "bad":
            context.bad(BadInput("/somewhere/words.txt", f"word {unit.name}", "the word is bad", "Take another"))
            return {"letters": 0}
        with draft(context.scratch / f"{unit.name}.txt") as file:
            file.write(unit.text.upper().encode())
        if unit.text == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        context.progress(1)
        return {"letters": len(unit.text)}


def join(unit: Unit, context: Context) -> dict[str, int]:
    parts = sorted(context.scratch.glob("*.txt"))
    with draft(context.folder / "shouted.txt") as file:
        file.write(b" ".join(part.read_bytes() for part in parts))
    return {"words": len(parts)}


def shout(options: Shout, team: Team) -> Manifest:
    with Stage.open(options, "shout", {"words": options.words}, team) as step:
        if step.done:
            return step.manifest
        letters = sum(
            result["letters"] for result in step.run("words", units(options.words), Shouting(options.kill_at))
        )
        (joined,) = step.run("join", [Unit(name="all", size=letters)], join)
        return step.finish({"letters": letters, **joined})


def main(output: str, words: str, *options: str) -> int:
    chosen = Shout(output=Path(output), words=tuple(words.split()), skip_bad="skip" in options)
    team = chosen.team()
    try:
        manifest = shout(chosen, team)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"rank {team.rank} of {team.workers}: {error}", flush=True)
        return 2
    print(f"rank {team.rank} of {team.workers}: {manifest.counts}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
