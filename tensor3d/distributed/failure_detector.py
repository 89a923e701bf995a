"""The thread that tells the other ranks how far this one has come, and finds out who of them is still alive.

key of the store   written by             holds
beat/<rank>        the rank               `RankStatus`
verdict            the first to judge     who is to blame for a hang, in a sentence that all ranks adopt
failure            the first to find it   who is to blame for a failed collective
lookers            whoever wants to look  how many do; of many ranks only some read all the others' heartbeats
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from tensor3d.distributed.rank_status import ProcessId, RankStatus, blame

# --- Who has come -----------------------------------------------------------------------------------------------------

POLL = 0.25
"""Seconds between two looks for an alarm, and the longest between two at who has come."""


def wait_for(store: dist.Store, keys: Sequence[str], seconds: float, *, pause: float = POLL) -> list[int]:
    """Waits until all keys are there, and returns the places of those that have not come in time.

    By `check` alone, because a wait that ends in vain makes the store's client write warnings.

    Args:
        pause: the longest between two looks; the first ones follow one another faster.
    """
    deadline, wait = time.monotonic() + seconds, 0.001
    while not store.check(list(keys)):  # one question, however many have not come
        if time.monotonic() > deadline:
            return absent(store, keys)
        time.sleep(wait)
        wait = min(2 * wait, pause)
    return []


def absent(store: dist.Store, keys: Sequence[str]) -> list[int]:
    """Places of the keys that are not there; one question where all are."""
    return [] if store.check(list(keys)) else [place for place, key in enumerate(keys) if not store.check([key])]


# ----------------------------------------------------------------------------------------------------------------------
# Who is still there: members note in the job's store how far they have come, and answer when one of them asks.
#
# The error of a collective names no rank, and one death breaks the transfers of many. So failing is no fault: whoever
# fails raises an alarm, every living member answers it, from a thread that needs nothing of the others, and those who
# stay silent are named. The first verdict is written down, and all members adopt it.
#
#     key of the store   written by             holds
#     seen/<member>      the member             `MemberStatus`
#     alarm              the first to fail      `FailureReport`
#     verdict            the first to judge     the sentence that all of them raise

GRACE = 2.0
"""Seconds within which a living member answers an alarm."""
_ALARM, _JUDGEMENT = "alarm", "verdict"
_HOST = "rank 0 hosts it, unless torchrun does"
_NAMES_AT_MOST = 8


@dataclass(frozen=True, kw_only=True)
class MemberStatus:
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
class FailureReport:
    """What the first member to fail knows of it."""

    by: int
    """Its position."""
    round: int
    """The last round that it entered."""
    reason: str
    late: bool = False
    """Whether nothing broke and time ran out."""


def judge(names: Sequence[str], seen: Sequence[MemberStatus], alarm: FailureReport) -> str:
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


class MembershipMonitor:
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
        self._state = MemberStatus()
        self._alarm: FailureReport | None = None
        self._closing = False
        self._lost = ""
        self._wake, self._raised, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="roll-call", daemon=True)
        self.verdict = ""
        """Who is at fault, in a sentence that is the same on all members; empty as long as nobody is."""

    def muster(self, timeout: timedelta) -> str:
        """Waits until all members are there, then starts the thread. Otherwise returns who is missing."""
        self._write(self._state)
        if missing := wait_for(self._store, self._keys, timeout.total_seconds()):
            names = ", ".join(self._names[member] for member in missing[:_NAMES_AT_MOST])
            return f"{names} did not come within {timeout.total_seconds():g} s"
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
                self._alarm = FailureReport(by=self._index, round=self._state.round, reason=reason, late=late)
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
        alarm = FailureReport(**json.loads(self._store.get(_ALARM)))
        self._write(replace(self._state, answered=True))
        start = time.monotonic()
        pause = max(POLL / 5, len(self._names) / 1000)  # everyone reads what everyone has noted
        seen: list[MemberStatus] = []
        try:
            while True:
                seen = [MemberStatus(**json.loads(note)) for note in self._store.multi_get(self._keys)]
                if self._store.check([_JUDGEMENT]):
                    return self._store.get(_JUDGEMENT).decode()
                if all(sighting.answered for sighting in seen) or time.monotonic() - start > GRACE:
                    return self._store.compare_set(_JUDGEMENT, "", judge(self._names, seen, alarm)).decode()
                time.sleep(pause)
        except RuntimeError:
            # The store's host has had its verdict and is gone, a little earlier than this member.
            if time.monotonic() - start < GRACE / 2:
                if not any(sighting.left == "gave up" for sighting in seen):
                    raise
                seen = [replace(sighting, answered=True) for sighting in seen]
            return judge(self._names, seen, alarm)

    def _write(self, state: MemberStatus) -> None:
        self._store.set(self._keys[self._index], json.dumps(asdict(state)))


# --- The thread that tells the other ranks how far this one has come --------------------------------------------------

_VERDICT, _FAILURE, _LOOKERS = "verdict", "failure", "lookers"
BEATS_A_SECOND = 2400
"""Heartbeats that the store of a large job gets: a tenth of what one core of its host can take."""
LOOKERS = 16
"""Ranks of a large job that read the heartbeats of all, 0.1 s of the store's host for 12,000; the others adopt what
these have found."""
_LARGE = 200
"""Ranks above which a job is large."""
_FEW = 20
"""Ranks up to which a look costs so little that one may look every 0.1 s."""
_DEAF = 60.0


@dataclass(kw_only=True)
class _Peer:
    """What this rank has heard of another one since it looks."""

    number: int
    """Of the last heartbeat."""
    since: float
    """When that came, or the look began."""
    known: bool = False
    """Whether it is known to live, or not to."""


class Heartbeat:
    """One rank's heartbeat. Its thread alone talks to the store, whose host may be stopped and hold whoever asks it.

    Args:
        store: the ranks' own part of the job's store, over a connection that nobody else uses.
        names: of all ranks.
        rank: this one.
        grace: seconds of silence after which a rank counts as dead; more where so many ranks beat more slowly.
        clock: gives the seconds of `answered` and of all that is waited for.
        note: gives the heartbeat of now, but for its number and how the rank left.
        woken: called when there is something new to see in `verdict`, `broken` or `lost`.
    """

    def __init__(
        self,
        store: dist.Store,
        names: Sequence[str],
        rank: int,
        *,
        grace: float,
        clock: Callable[[], float] = time.monotonic,
        note: Callable[[], RankStatus],
        woken: Callable[[], None],
    ) -> None:
        self.interval = max(min(1.0, grace / 3), len(names) / BEATS_A_SECOND)
        """Seconds between two heartbeats."""
        self.grace = max(grace, 3 * self.interval)
        self.deaf = max(_DEAF, 3 * self.interval)
        """Seconds after which a store that does not answer counts as gone."""
        self.verdict = ""
        """Who is to blame for a hang; empty as long as nobody has judged."""
        self.broken = ""
        """Who has died or failed, while this rank looks; empty as long as nobody has."""
        self.lost = ""
        """Why the store cannot be asked any more; empty as long as it can."""
        self.answered = clock()
        """When the store has last answered."""
        self._store, self._names, self._rank = store, tuple(names), rank
        self._keys = [f"beat/{other}" for other in range(len(names))]
        self._clock, self._note, self._woken = clock, note, woken
        self._number, self._process = 0, ProcessId.own()
        self._left: Literal["", "closed", "failed", "cut off"] = ""
        self._reason = ""
        self._looking, self._judging, self._closing = False, False, False
        self._cut_off_at = 0.0
        self._ticket = 0
        self._peers: dict[int, _Peer] = {}
        self._silent: dict[int, str] = {}
        self._asked, self._explained = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether its thread still runs."""
        return self._thread.is_alive()

    def look(self, *, judge: bool, anyway: bool = False) -> None:
        """Sets whether the others are looked at, again and again: at once on this machine, within `grace` elsewhere.

        Args:
            judge: because this rank hangs, and wants a `verdict`.
            anyway: for `broken` alone.
        """
        asked = (judge or anyway) and not self._looking
        self._judging, self._looking = judge, judge or anyway
        if asked:
            self._asked.set()

    def explain(self, reason: str) -> str:
        """Tells the others that a collective of this rank has failed, and returns who is to blame, in a sentence that
        is the same on all that ask; nothing where the store does not answer."""
        self._left, self._reason, self._cut_off_at = "cut off", reason, self._clock()
        self._asked.set()
        self._explained.wait(self.grace + 3 * self.interval)
        return self.broken

    def close(self, error: str = "") -> None:
        """Tells the others that this rank leaves, and with what error, and ends the thread."""
        if not self._left:
            self._left, self._reason = ("failed", error) if error else ("closed", "")
        self._closing = True
        self._asked.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                closing = self._closing
                self._beat()
                if closing:
                    return
                if self._looking or self._left:
                    self._look() if self._may_look() else self._hear()
                else:
                    self._peers.clear()
                    self.broken = ""
                self._asked.wait(self._pause())
                self._asked.clear()
        except RuntimeError as error:
            self.lost = f"the job's store is gone, for its host has ended ({str(error).splitlines()[0]})"
        finally:
            self._explained.set()
            self._woken()

    def _pause(self) -> float:
        # A look at few ranks costs little, and sees the death of one on this machine that much sooner.
        few = (self._looking or self._left) and len(self._names) <= _FEW
        return min(self.interval, 0.1) if few else self.interval

    def _beat(self) -> None:
        self._number += 1
        beat = replace(self._note(), number=self._number, process=self._process, left=self._left, reason=self._reason)
        self._store.set(self._keys[self._rank], beat.encode())
        if not self.verdict and self._store.check([_VERDICT]):
            self._adopt(self._store.get(_VERDICT).decode())
        self.answered = self._clock()

    def _may_look(self) -> bool:
        if len(self._names) <= _LARGE:
            return True
        self._ticket = self._ticket or self._store.add(_LOOKERS, 1)
        return self._ticket <= LOOKERS

    def _hear(self) -> None:
        """Adopts what those have found who look."""
        if not self.broken and self._store.check([_FAILURE]):
            self.broken = self._store.get(_FAILURE).decode()
            self._explained.set()
            self._woken()

    def _look(self) -> None:
        beats = self._read()
        settled = self._listen(beats)
        if not self._silent and not any(beat.left in ("failed", "cut off") for beat in beats):
            self.broken = ""
        elif not self.broken and (self._left != "cut off" or self._can_explain(beats, settled)):
            # The first sentence is everyone's: soon those that leave for this reason are silent as well.
            self.broken = self._first(_FAILURE, blame(self._names, beats, self._silent))
        if self._left == "cut off" and self.broken:
            self._explained.set()
        if self._judging and settled and not self.verdict:
            self._adopt(self._first(_VERDICT, blame(self._names, beats, self._silent)))
        if self.broken:
            self._woken()
        self.answered = self._clock()

    def _adopt(self, verdict: str) -> None:
        self.verdict = verdict
        self._woken()

    def _first(self, key: str, sentence: str) -> str:
        """What a rank was the first to write."""
        return self._store.compare_set(key, "", sentence).decode()

    def _can_explain(self, beats: Sequence[RankStatus], settled: bool) -> bool:
        """Whether someone at fault is found, or nobody will be: a process that is being killed ends its connections
        a little before itself."""
        at_fault = any(beats[rank].left == "" for rank in self._silent) or any(beat.left == "failed" for beat in beats)
        return at_fault or (settled and self._clock() - self._cut_off_at > self.grace)

    def _read(self) -> list[RankStatus]:
        """The last heartbeat of every rank, one of number 0 where none has come yet."""
        there = sorted(set(range(len(self._keys))) - set(absent(self._store, self._keys)))
        beats = [RankStatus()] * len(self._keys)
        for rank, text in zip(there, self._store.multi_get([self._keys[rank] for rank in there]), strict=True):
            beats[rank] = RankStatus.decode(text)
        return beats

    def _listen(self, beats: Sequence[RankStatus]) -> bool:
        """Finds out who is silent. Returns whether that is known of every rank."""
        now = self._clock()
        silent: dict[int, str] = {}
        for rank, beat in enumerate(beats):
            peer = self._peers.setdefault(rank, _Peer(number=beat.number, since=now))
            if beat.number != peer.number:
                peer.number, peer.since, peer.known = beat.number, now, True
            if rank == self._rank or beat.left == "closed":
                peer.known = True
                continue
            state = beat.process.look(self._process.machine)
            if state == "alive":
                peer.known = True
            elif state == "gone":
                silent[rank] = "its process is gone"
            elif now - peer.since > self.grace:
                # A moment of it is no death: whoever continues a stopped job does it one process after another.
                stopped = state == "stopped"
                silent[rank] = "its process is stopped" if stopped else f"no heartbeat for {now - peer.since:.1f} s"
        self._silent = silent
        return all(peer.known or rank in silent for rank, peer in self._peers.items())
