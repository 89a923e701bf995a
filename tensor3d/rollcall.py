"""Who is still there: members note in the job's store how far they have come, and answer when one of them asks.

The error of a collective names no rank, and one death breaks the transfers of many. So failing is no fault: whoever
fails raises an alarm, every living member answers it, from a thread that needs nothing of the others, and those who
stay silent are named. The first verdict is written down, and all members adopt it.

    key of the store   written by             holds
    seen/<member>      the member             `Sighting`
    alarm              the first to fail      `Alarm`
    verdict            the first to judge     the sentence that all of them raise
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

GRACE = 2.0
"""Seconds within which a living member answers an alarm."""
POLL = 0.25
"""Seconds between two looks for an alarm."""
_ALARM, _VERDICT = "alarm", "verdict"
_HOST = "rank 0 hosts it, unless torchrun does"
_NAMES_AT_MOST = 8


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What a member has last noted of itself."""

    round: int = 0
    """The last round that it entered; 0 before the first."""
    inside: bool = False
    """Whether that round had not ended."""
    left: Literal["", "gave up", "closed"] = ""
    """How it left, if it did: with a message to the others, or in good order."""
    message: str = ""
    """Why it gave up."""
    answered: bool = False
    """Whether it has answered the alarm, or left."""

    @property
    def where(self) -> str:
        if self.round == 0:
            return "before round 1"
        return f"{'in' if self.inside else 'after'} round {self.round}"


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """What the first member to fail knows of it."""

    by: int
    """Its position."""
    round: int
    """The last round that it entered."""
    reason: str
    late: bool = False
    """Whether nothing broke and time ran out."""


def judge(names: Sequence[str], seen: Sequence[Sighting], alarm: Alarm) -> str:
    """Names the members at fault: the silent; else who gave up; who closed early; who stayed away. `names` and `seen`
    are those of all members, by position."""

    def listed(members: list[int], what: str) -> str:
        shown = [f"{names[i]} {what} {seen[i].where}" for i in members[:_NAMES_AT_MOST]]
        more = len(members) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")

    members = range(len(names))
    witness = f"{names[alarm.by]} in round {alarm.round}: {alarm.reason}"
    given_up = "; ".join(
        f"{names[i]} gave up {seen[i].where}: {seen[i].message}" for i in members if seen[i].left == "gave up"
    )
    if silent := [i for i in members if not seen[i].answered]:
        return f"{listed(silent, 'does not answer (dead or stopped), last seen')}; {given_up or witness}"
    if given_up:
        return given_up
    behind = [i for i in members if seen[i].round < alarm.round]
    if closed := [i for i in behind if seen[i].left == "closed"]:
        return f"{listed(closed, 'ended or closed its peers')}; {witness}"
    if behind and alarm.late:
        return f"{listed(behind, f'is alive but did not come to round {alarm.round}, last seen')}; {witness}"
    return f"{witness}; no peer is missing. Look for errors of the network, or raise the timeout"


class RollCall:
    """One member's part in the roll call: a daemon thread that writes its notes and looks for an alarm.

    The thread alone talks to the store, since a store whose host is stopped holds whoever asks it, for ever.

    Args:
        store: the members' part of the job's store, over a connection that nobody else uses.
        names: of all members, by position.
        index: this one's position.
    """

    def __init__(self, store: dist.Store, names: Sequence[str], index: int) -> None:
        self._store = store
        self._names = tuple(names)
        self._keys = [f"seen/{member}" for member in range(len(names))]
        self._index = index
        self._lock = threading.Lock()
        self._state = Sighting()
        self._alarm: Alarm | None = None
        self._closing = False
        self._lost = ""
        self._wake, self._raised, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="roll-call", daemon=True)
        self.verdict = ""
        """Who is at fault, in a sentence that is the same on all members; empty as long as nobody is."""

    def muster(self, timeout: timedelta) -> str:
        """Waits until all members are there, then starts the thread. Otherwise returns who is missing."""
        self._write(self._state)
        deadline, pause = time.monotonic() + timeout.total_seconds(), 0.001
        while not self._store.check(self._keys):
            if time.monotonic() > deadline:
                missing = [
                    name for name, key in zip(self._names, self._keys, strict=True) if not self._store.check([key])
                ]
                return f"{', '.join(missing[:_NAMES_AT_MOST])} did not come within {timeout.total_seconds():g} s"
            time.sleep(pause)
            pause = min(2 * pause, POLL)
        self._thread.start()
        return ""

    def note(self, number: int, *, inside: bool) -> None:
        """Notes that a round was entered or has ended. It is written in the background, the latest note only."""
        with self._lock:
            self._state = replace(self._state, round=number, inside=inside)
        self._wake.set()

    def fail(self, reason: str, *, late: bool = False) -> str:
        """Raises the alarm, if nobody has, and returns the verdict, after `GRACE` where a member is silent."""
        self._raise(reason, late)
        self.wait_verdict()
        if self.verdict:
            return self.verdict
        store = self._lost or f"the job's store does not answer, its host is stopped or out of reach ({_HOST})"
        return f"{store}, so nobody can say who failed; {self._names[self._index]}: {reason}"

    def give_up(self, message: str) -> None:
        """Tells the others that this member leaves, and why. Returns when it is written down, or cannot be."""
        with self._lock:
            if self._state.left:
                return
            self._state = replace(self._state, left="gave up", message=message, answered=True)
        self._raise(message, late=False)
        self._raised.wait(GRACE)

    def wait_verdict(self) -> None:
        """Waits until every member has answered the alarm, or has had the time for it."""
        self._ended.wait(GRACE + 4 * POLL)

    def close(self) -> None:
        """Notes that this member leaves, and ends the thread; a second call does nothing.

        In the middle of a round it counts as giving up: the others cannot end that round.
        """
        if self._state.inside:
            self.give_up("ended or closed its peers in the middle of a round")
        with self._lock:
            if self._alarm is None:
                self._state = replace(self._state, left="closed", answered=True)
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(2 * POLL)

    def _raise(self, reason: str, late: bool) -> None:
        with self._lock:
            if self._alarm is None:
                self._alarm = Alarm(by=self._index, round=self._state.round, reason=reason, late=late)
        self._wake.set()

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except RuntimeError as error:
            self._lost = f"the job's store is gone ({_HOST}; {str(error).splitlines()[0]})"
        finally:
            self._raised.set()
            self._ended.set()

    def _watch(self) -> None:
        written = self._state
        while not self.verdict:
            self._wake.wait(POLL)
            self._wake.clear()
            with self._lock:
                closing, alarm, state = self._closing, self._alarm, self._state
            if state != written:
                self._write(state)
                written = state
            if closing:
                return
            if alarm:
                self._store.compare_set(_ALARM, "", json.dumps(asdict(alarm)))
                self._raised.set()
            if alarm or self._store.check([_ALARM]):
                self.verdict = self._reach_verdict()

    def _reach_verdict(self) -> str:
        """Answers the alarm, waits for the others and judges, or adopts what another has judged."""
        alarm = Alarm(**json.loads(self._store.get(_ALARM)))
        self._write(replace(self._state, answered=True))
        start = time.monotonic()
        pause = max(POLL / 5, len(self._names) / 1000)  # everyone reads what everyone has noted
        seen: list[Sighting] = []
        try:
            while True:
                seen = [Sighting(**json.loads(note)) for note in self._store.multi_get(self._keys)]
                if self._store.check([_VERDICT]):
                    return self._store.get(_VERDICT).decode()
                if all(sighting.answered for sighting in seen) or time.monotonic() - start > GRACE:
                    return self._store.compare_set(_VERDICT, "", judge(self._names, seen, alarm)).decode()
                time.sleep(pause)
        except RuntimeError:
            # The store's host has had its verdict and is gone, a little earlier than this member.
            if time.monotonic() - start < GRACE / 2:
                if not any(sighting.left == "gave up" for sighting in seen):
                    raise
                seen = [replace(sighting, answered=True) for sighting in seen]
            return judge(self._names, seen, alarm)

    def _write(self, state: Sighting) -> None:
        self._store.set(self._keys[self._index], json.dumps(asdict(state)))
