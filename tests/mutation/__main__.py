"""`python -m tests.mutation`: runs the audit."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from tests.mutation import child
from tests.mutation.mutation import Mutation
from tests.mutation.runner import GOOD, Result, audit
from tests.mutation.table import MUTATIONS


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 if every chosen mutation is caught, 1 if not, 2 for a wrong command line."""
    options = _parser().parse_args(arguments)
    chosen = _chosen(options.names, quick=options.quick)
    if not chosen:
        print(f"no mutation is named {' or '.join(options.names)}; --list shows all", file=sys.stderr)
        return 2
    if options.list:
        for mutation in chosen:
            print(f"{mutation.name:<44}  {mutation.file}{'  (quick)' if mutation.quick else ''}")
        return 0
    if options.controls:
        chosen += _controls()
    start = time.monotonic()
    child.preload()
    results, baseline = audit(chosen, jobs=options.jobs, limit=options.limit, tell=_tell)
    print(_totals(results, baseline, time.monotonic() - start))
    return 0 if all(result.verdict in GOOD for result in results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description="Puts small breaks into a copy of the code and runs the tests that must see them.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="mutations to run, or patterns like 'mfu*'; default all"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="mutations at a time (default 2)")
    parser.add_argument("--limit", type=float, default=180.0, metavar="S", help="seconds for a mutation (default 180)")
    parser.add_argument(
        "--controls", action="store_true", help="also one that no test can see, and one that cannot be imported"
    )
    parser.add_argument("--quick", action="store_true", help="only those that CI runs")
    parser.add_argument("--list", action="store_true", help="print the mutations and run none")
    return parser


def _chosen(names: Sequence[str], *, quick: bool) -> list[Mutation]:
    return [
        mutation
        for mutation in MUTATIONS
        if (not names or any(fnmatchcase(mutation.name, name) for name in names)) and (mutation.quick or not quick)
    ]


def _controls() -> list[Mutation]:
    """Verdicts can differ: a break that changes nothing survives, and one that no import survives is told."""
    (sound,) = (each for each in MUTATIONS if each.name == "shape-ranks-without-data")
    first = "from __future__ import annotations\n"
    return [
        dataclasses.replace(sound, name="harmless", new="return self.data * self.x * self.y * self.z"),
        dataclasses.replace(sound, name="fatal", old=first, new=f"{first}raise RuntimeError\n"),
    ]


def _tell(result: Result) -> None:
    verdict = "caught by hang" if result.verdict == "hang" else result.verdict
    print(f"{verdict:<14}  {result.seconds:6.1f} s  {result.mutation.name}", flush=True)
    if result.verdict not in GOOD and result.detail:
        print("".join(f"    {line}\n" for line in result.detail.splitlines()), end="", flush=True)


def _totals(results: Sequence[Result], baseline: float, seconds: float) -> str:
    counts = Counter(result.verdict for result in results)
    caught = sum(counts[verdict] for verdict in GOOD)
    others = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if verdict not in GOOD)
    hangs = f" ({counts['hang']} by hang)" if counts["hang"] else ""
    return (
        f"{caught} of {len(results)} caught{hangs}{', ' + others if others else ''}; {seconds:.0f} s, of which "
        f"{baseline:.0f} s were the same tests without a mutation"
    )


if __name__ == "__main__":
    sys.exit(main())
