"""The thread that tells the other ranks how far this one has come, and finds out who of them is still alive.

key of the store   written by             holds
beat/<rank>        the rank               `RankStatus`
verdict            the first to judge     who is to blame for a hang, in a sentence that all ranks adopt
failure            the first to find it   who is to blame for a failed collective
lookers            whoever wants to look  how many do; of many ranks only some read all the others' heartbeats
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal
from weakref import finalize, ref

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


class FailureDetector:
    """One rank's heartbeat, and what it finds out of the others. Its thread alone talks to the store, whose host may be
    stopped and hold whoever asks it.

    Args:
        store: the ranks' own part of the job's store, over a connection that nobody else uses.
        names: of all ranks.
        rank: this one.
        grace: seconds of silence after which a rank counts as dead; more where so many ranks beat more slowly.
        clock: gives the seconds of `answered` and of all that is waited for.
        note: gives the heartbeat of now, but for its number and how the rank left.
        woken: called when there is something new to see in `verdict`, `broken` or `lost`.
    """

    listens = False
    """Whether it hears of what others have found while nothing is looked for, and judges as soon as everyone has
    answered. Only a heartbeat is an answer then: a process that is being killed still runs."""
    gone = "the job's store is gone, for its host has ended ({})"
    """The sentence of `lost`, with the store's error."""

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
        self._reason, self._late = "", False
        self._beats: list[RankStatus] = []
        self._looking, self._judging, self._closing = False, False, False
        self._cut_off_at = 0.0
        self._ticket = 0
        self._peers: dict[int, _Peer] = {}
        self._silent: dict[int, str] = {}
        self._asked, self._explained = threading.Event(), threading.Event()
        # The thread ends with this object, where nobody closes it: it holds it for the time of a heartbeat alone.
        self._thread = threading.Thread(
            target=_while_alive, args=(ref(self), self._asked), name="heartbeat", daemon=True
        )
        finalize(self, self._asked.set).atexit = False

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

    def explain(self, reason: str, *, late: bool = False) -> str:
        """Tells the others that a collective of this rank has failed, and returns who is to blame, in a sentence that
        is the same on all that ask; nothing where the store does not answer.

        Args:
            late: nothing broke, and time ran out.
        """
        self._reason, self._late, self._cut_off_at = reason, late, self._clock()
        self._left = "cut off"  # last: what the thread finds with it is whole
        self._asked.set()
        self._explained.wait(self.grace + 3 * self.interval)
        return self.broken

    def close(self, error: str = "") -> None:
        """Tells the others that this rank leaves, and with what error, and ends the thread."""
        if not self._left:
            self._reason = error
            self._left = "failed" if error else "closed"
        self._closing = True
        self._asked.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    # --- the thread -----------------------------------------------------------------------------------------------

    def _turn(self) -> float | None:
        """One heartbeat. Returns the seconds until the next; None: it was the last one."""
        pause = None
        try:
            # Both as this heartbeat tells them: who looks must find itself as the others do.
            closing, left = self._closing, self._left
            self._beat(left)
            if closing:
                if self.listens and left == "failed":
                    self._look()  # nobody else does
                return None
            if self._looking or left:
                self._look() if self._may_look() else self._hear()
            elif self.listens:
                self._hear()
            else:
                self._peers.clear()
                self.broken = ""
            pause = self._pause()
        except RuntimeError as error:
            self.lost = self.gone.format(str(error).splitlines()[0])
        finally:
            if pause is None:
                self._explained.set()
                self._woken()
        return pause

    def _pause(self) -> float:
        # A look at few ranks costs little, and sees the death of one on this machine that much sooner.
        few = (self._looking or self._left) and len(self._names) <= _FEW
        return min(self.interval, 0.1) if few else self.interval

    def _beat(self, left: Literal["", "closed", "failed", "cut off"] = "") -> None:
        self._number += 1
        beat = replace(
            self._note(),
            number=self._number,
            process=self._process,
            left=left,
            reason=self._reason,
            late=self._late,
        )
        self._store.set(self._keys[self._rank], beat.encode())
        if not self.verdict and self._store.check([_VERDICT]):
            self._adopt(self._store.get(_VERDICT).decode(errors="replace"))
        self.answered = self._clock()

    def _may_look(self) -> bool:
        if len(self._names) <= _LARGE:
            return True
        self._ticket = self._ticket or self._store.add(_LOOKERS, 1)
        return self._ticket <= LOOKERS

    def _hear(self) -> None:
        """Adopts what those have found who look."""
        if not self.broken and self._store.check([_FAILURE]):
            self.broken = self._store.get(_FAILURE).decode(errors="replace")
            if not self.broken:
                return  # a stranger's
            self._explained.set()
            self._woken()

    def _look(self) -> None:
        beats = self._read()
        settled = self._listen(beats)
        if not self._silent and not any(beat.left in ("failed", "cut off") for beat in beats):
            self.broken = ""
        elif not self.broken and (self._left != "cut off" or self._can_explain(beats, settled)):
            # The first sentence is everyone's: soon those that leave for this reason are silent as well.
            self.broken = self._first(_FAILURE, self._blame(beats))
        if self._left and self.broken:
            self._explained.set()
        if self._judging and settled and not self.verdict:
            self._adopt(self._first(_VERDICT, self._blame(beats)))
        if self.broken:
            self._woken()
        self.answered = self._clock()

    def _blame(self, beats: Sequence[RankStatus]) -> str:
        return blame(self._names, beats, self._silent)

    def _adopt(self, verdict: str) -> None:
        self.verdict = verdict
        self._woken()

    def _first(self, key: str, sentence: str) -> str:
        """What a rank was the first to write."""
        return self._store.compare_set(key, "", sentence).decode(errors="replace")

    def _can_explain(self, beats: Sequence[RankStatus], settled: bool) -> bool:
        """Whether someone at fault is found, or nobody will be: a process that is being killed ends its connections
        a little before itself."""
        at_fault = any(beats[rank].left == "" for rank in self._silent) or any(beat.left == "failed" for beat in beats)
        return at_fault or (settled and (self.listens or self._clock() - self._cut_off_at > self.grace))

    def _read(self) -> list[RankStatus]:
        """The last heartbeat of every rank, one of number 0 where none has come yet. What is none, or older than what
        was read before, is a stranger's: the last one still holds."""
        there = sorted(set(range(len(self._keys))) - set(absent(self._store, self._keys)))
        beats = list(self._beats) or [RankStatus()] * len(self._keys)
        for rank, text in zip(there, self._store.multi_get([self._keys[rank] for rank in there]), strict=True):
            beat = RankStatus.decode(text)
            if beat is not None and not _is_replayed(beat, beats[rank]):
                beats[rank] = beat
        self._beats = beats
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
            if state == "alive" and not self.listens:
                peer.known = True
            elif state == "gone":
                silent[rank] = "its process is gone"
            elif (state != "alive" or not peer.known) and now - peer.since > self.grace:
                # A moment of it is no death: whoever continues a stopped job does it one process after another.
                stopped = state == "stopped"
                silent[rank] = "its process is stopped" if stopped else f"no heartbeat for {now - peer.since:.1f} s"
        self._silent = silent
        return all(peer.known or rank in silent for rank, peer in self._peers.items())


def _while_alive(detector: ref[FailureDetector], asked: threading.Event) -> None:
    while (own := detector()) is not None:
        pause = own._turn()
        del own
        if pause is None:
            return
        asked.wait(pause)
        asked.clear()


def _is_replayed(beat: RankStatus, last: RankStatus) -> bool:
    known = beat.process.machine != ""  # else another process cannot be told from it
    return known and beat.process == last.process and beat.number < last.number


# --- Peers that meet in rounds ----------------------------------------------------------------------------------------

GRACE = 2.0
"""Seconds within which a living peer is heard of."""
_HOST = "rank 0 hosts it, unless torchrun does"
_NAMES_AT_MOST = 8


class PeerMonitor(FailureDetector):
    """The detector of a few ranks that meet in rounds, whose number is their step. `broken` says who is to blame.

    The error of a transfer names no rank, and one death breaks the transfers of many. So failing is no fault: whoever
    fails looks who is still heard of, and what it finds all others adopt.
    """

    listens = True
    gone = f"the job's store is gone ({_HOST}; {{}})"

    def __init__(self, store: dist.Store, names: Sequence[str], index: int) -> None:
        self._round, self._inside = 0, False
        super().__init__(store, names, index, grace=GRACE, note=self._status, woken=lambda: None)
        self.interval = max(POLL, len(names) / BEATS_A_SECOND)

    def muster(self, timeout: timedelta) -> str:
        """Waits until all peers are there, then starts the thread. Otherwise returns who is missing."""
        self._beat()
        if missing := wait_for(self._store, self._keys, timeout.total_seconds()):
            names = ", ".join(self._names[peer] for peer in missing[:_NAMES_AT_MOST])
            return f"{names} did not come within {timeout.total_seconds():g} s"
        self.start()
        return ""

    def note(self, number: int, *, inside: bool) -> None:
        """Notes that a round was entered or has ended. It is written in the background, the latest note only."""
        self._round, self._inside = number, inside
        self._asked.set()

    def fail(self, reason: str, *, late: bool = False) -> str:
        """Says that a transfer has failed, and returns who is to blame, after `GRACE` where a peer is silent."""
        if found := self.explain(reason, late=late):
            return found
        store = self.lost or f"the job's store does not answer, its host is stopped or out of reach ({_HOST})"
        return f"{store}, so nobody can say who failed; {self._names[self._rank]}: {reason}"

    def give_up(self, message: str) -> None:
        """Tells the others that this peer leaves, and why. Returns when they can hear it, or never can."""
        if not self._left:
            self._reason = message
            self._left = "failed"
        self._asked.set()
        if self._explained.wait(self.grace + 3 * self.interval) and len(self._names) > 1:
            # This process may end and take the store along: each peer looks there once in an interval.
            time.sleep(min(GRACE, 2 * self.interval))

    def close(self, error: str = "") -> None:
        """In the middle of a round it counts as giving up: the others cannot end that round."""
        super().close(error or ("ended or closed its peers in the middle of a round" if self._inside else ""))

    def _status(self) -> RankStatus:
        return RankStatus(step=self._round, doing="in" if self._inside else "after")

    def _blame(self, beats: Sequence[RankStatus]) -> str:
        return blame_peer(self._names, beats, self._silent)

    def _look(self) -> None:
        try:
            super()._look()
        except RuntimeError:
            # The store's host has had its verdict and is gone, a little earlier than this peer.
            if any(beat.left == "failed" for beat in self._beats):
                self.broken = self._blame(self._beats)
            raise


def blame_peer(names: Sequence[str], beats: Sequence[RankStatus], silent: Collection[int]) -> str:
    """Names the peers at fault: the silent; else who gave up; who closed early; who stayed away. The
    lowest rank of those that lost a transfer is the witness."""

    def where(peer: int) -> str:
        return f"{beats[peer].doing} round {beats[peer].step}" if beats[peer].step else "before round 1"

    def listed(peers: list[int], what: str) -> str:
        shown = [f"{names[i]} {what} {where(i)}" for i in peers[:_NAMES_AT_MOST]]
        more = len(peers) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")

    everyone = range(len(names))
    cut = [beats[i] for i in everyone if beats[i].left == "cut off"]
    first = beats.index(cut[0]) if cut else 0
    needed = beats[first].step if cut else 0
    witness = f"{names[first]} in round {needed}: {beats[first].reason}"
    given_up = "; ".join(
        f"{names[i]} gave up {where(i)}: {beats[i].reason}" for i in everyone if beats[i].left == "failed"
    )
    if mute := [i for i in everyone if i in silent and not beats[i].left]:
        return f"{listed(mute, 'does not answer (dead or stopped), last seen')}; {given_up or witness}"
    if given_up:
        return given_up
    behind = [i for i in everyone if beats[i].step < needed]
    if closed := [i for i in behind if beats[i].left == "closed"]:
        return f"{listed(closed, 'ended or closed its peers')}; {witness}"
    if behind and beats[first].late:
        return f"{listed(behind, f'is alive but did not come to round {needed}, last seen')}; {witness}"
    return f"{witness}; no peer is missing. Look for errors of the network, or raise the timeout"
