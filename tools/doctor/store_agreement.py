"""Rounds over a store: every member posts what it knows, member 0 judges, and all of them learn what was found.

Nothing here needs a process group: these are the checks of what a process group needs.

    key                      written by   holds
    ROUND/<member>           the member   what it knows
    ROUND/verdict            member 0     `RoundResult`
    told                     whoever      the first who wants to tell that member 0 is silent, and does
    left/<member>            the member   that it has read the last verdict
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from tensor3d.distributed.failure_detector import wait_for
from tools.common.files import parsed_json
from tools.doctor.rules import Finding, MemberNames, NotReadyError

MARGIN = 10.0
"""Seconds that member 0 has to judge, beyond those in which the others may come."""
_ASKED_A_SECOND = 2400
"""Questions that the store of a large job gets from all members together."""
_FAREWELL = 5.0
_ANSWER = 2.0
MEETING = "meeting"


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """What member 0 makes of a round."""

    findings: Sequence[Finding] = ()
    data: Any = None
    """JSON-able; for all members."""

    @classmethod
    def of(cls, content: Any) -> RoundResult:
        """What `dataclasses.asdict` and JSON, which knows lists alone, have made of one."""
        findings = [Finding(**{**each, "about": tuple(each["about"])}) for each in content["findings"]]
        return cls(findings=findings, data=content["data"])


# --- What is read of a store, which takes what anybody sets: a value that has been looked at may be another one by then


def _foreign(key: str) -> ValueError:
    return ValueError(
        f"the store of the job holds under {key} what no process of the job has set there. Look for a stranger in its "
        "network, and give the job a secret of its own: --secret-file."
    )


def _parsed(key: str, content: bytes) -> Any:
    """The value of a key. Raises ValueError for what is no JSON."""
    try:
        return parsed_json(content)
    except ValueError:
        raise _foreign(key) from None


def _printable(hosts: Any) -> tuple[str, ...]:
    """Names of hosts as others tell them; none where it is no list."""
    told = hosts if isinstance(hosts, list) else []
    return tuple(host if isinstance(host, str) and host.isprintable() else ascii(host) for host in told)


class StoreRounds:
    """One member's part.

    Args:
        store: the members' part of a store; None for a member on its own.
        names: of the members; their hosts may be unknown yet.
        member: this one's number.
        members: how many there are.
        wait: seconds in which a member must come to a round.
        say: gets what this member is to tell. On member 0 before any other member can learn of it, and leave.
        hears: which findings of member 0 another member tells as well.
        alone: whether this member tells what none can agree with others to tell, because the store does not answer.
    """

    def __init__(
        self,
        store: dist.Store | None,
        *,
        names: MemberNames,
        member: int,
        members: int,
        wait: float,
        say: Callable[[Sequence[Finding]], None],
        hears: Callable[[Finding], bool] = lambda _: False,
        alone: bool = True,
    ) -> None:
        self.member, self.members = member, members
        self.names, self.store = names, store
        self.round = ""
        """The round that this member is in, or was in last."""
        self._wait, self._say, self._hears, self._alone = wait, say, hears, alone
        self._came: Sequence[int] = range(members)
        self._pause = max(0.25, members / _ASKED_A_SECOND)

    def meet(self, host: str, judge: Callable[[], Sequence[Finding]] = tuple) -> None:
        """The first round, in which the members learn each other's hosts.

        Args:
            host: name of this one's.
            judge: called on member 0; what it has found itself.

        Raises:
            NotReadyError: as `decide`.
        """
        hosts = self.decide(MEETING, host, lambda hosts: RoundResult(findings=judge(), data=hosts))
        self.names = dataclasses.replace(self.names, hosts=_printable(hosts))

    def decide(self, round: str, own: Any, judge: Callable[[list[Any]], RoundResult]) -> Any:
        """The data of the verdict, on every member.

        Args:
            round: its name, which tells a reader what was under way.
            own: what this member knows, JSON-able.
            judge: called on member 0 with what all members know.

        Raises:
            NotReadyError: something was found that keeps training from starting, on every member.
        """
        self.round = round
        if self.store is None:
            verdict = judge([own])
        else:
            try:
                self.store.set(f"{round}/{self.member}", json.dumps(own))
                verdict = self._judged(round, judge) if self.member == 0 else self._read_verdict(round)
            except RuntimeError as error:
                raise self._gone(error) from error
            except ValueError as error:  # of another member than 0, which takes it for a finding
                finding = Finding(text=str(error), about=(self.member,))
                self._say([finding])
                raise NotReadyError([finding]) from error
        told = [finding for finding in verdict.findings if self.store is None or self._hears(finding)]
        if told and (self.store is None or self.member != 0):
            self._say(told)
        prevents = [finding for finding in verdict.findings if not finding.warning]
        if prevents:
            raise NotReadyError(prevents)
        return verdict.data

    def leave(self, *, host: bool) -> None:
        """To be called last, however it went. Who hosts the store stays a moment for those who have still to read."""
        if self.store is None:
            return
        try:
            self.store.set(f"left/{self.member}", "yes")
            if host:
                wait_for(self.store, [f"left/{member}" for member in self._came], _FAREWELL, pause=0.02)
        except RuntimeError:
            pass  # the host of the store has left

    def tell_once(self, finding: Finding) -> None:
        """Tells what every member finds for itself, by the first of those that do."""
        first = [self._alone]

        def ask(store: dist.Store) -> None:
            with suppress(RuntimeError):
                own = str(self.member)
                first[0] = store.compare_set("told", "", own).decode() == own

        if self.store is not None:
            # A thread: a store whose host is stopped holds whoever asks it.
            thread = threading.Thread(target=ask, args=(self.store,), name="tell-once", daemon=True)
            thread.start()
            thread.join(_ANSWER)
        if first[0]:
            self._say([finding])

    # --- member 0 -------------------------------------------------------------------------------------------------

    def _judged(self, round: str, judge: Callable[[list[Any]], RoundResult]) -> RoundResult:
        assert self.store is not None
        keys = [f"{round}/{member}" for member in range(self.members)]
        missing = wait_for(self.store, keys, self._wait, pause=self._pause)
        self._came = sorted(set(range(self.members)) - set(missing))
        try:
            verdict = (
                RoundResult(findings=[self._absent(round, missing)])
                if missing
                else judge([_parsed(key, text) for key, text in zip(keys, self.store.multi_get(keys), strict=True)])
            )
        except (ValueError, OSError) as error:
            verdict = RoundResult(findings=[Finding(text=str(error), about=(0,))])
        except (TypeError, LookupError, AttributeError) as error:  # of another shape than any member's
            text = f"{_foreign(f'{round}/')} ({type(error).__name__}: {error})"
            verdict = RoundResult(findings=[Finding(text=text, about=(0,))])
        if verdict.findings:
            self._say(verdict.findings)
        self.store.set(f"{round}/verdict", json.dumps(dataclasses.asdict(verdict)))
        return verdict

    def _absent(self, round: str, missing: list[int]) -> Finding:
        assert self.store is not None
        came, names = [member for member in range(self.members) if member not in set(missing)], self.names
        if round == MEETING and not any(names.hosts):
            keys = [f"{round}/{member}" for member in came]
            told = (_parsed(key, text) for key, text in zip(keys, self.store.multi_get(keys), strict=True))
            known = dict(zip(came, told, strict=True))
            hosts = _printable([known.get(member, "") for member in range(self.members)])
            names = dataclasses.replace(names, hosts=hosts)
        single = len(missing) == 1
        what = "come" if round == MEETING else f"come to the check of {round}"
        started, log = ("it was", "its log") if single else ("they were", "their logs")
        return Finding(
            text=f"{names.many(missing)} did not {what} within {self._wait:g} s; {names.many(came)} did. Look whether "
            f"{started} started, and for an error in {log}.",
            about=tuple(missing),
            for_all=True,
        )

    # --- the others -----------------------------------------------------------------------------------------------

    def _read_verdict(self, round: str) -> RoundResult:
        assert self.store is not None
        patience = self._wait + MARGIN
        begun = not wait_for(self.store, [f"{round}/0"], patience, pause=self._pause)
        # It now waits for others, as long as this one has.
        if begun and not wait_for(self.store, [f"{round}/verdict"], patience, pause=self._pause):
            key = f"{round}/verdict"
            try:
                return RoundResult.of(_parsed(key, self.store.get(key)))
            except (TypeError, KeyError, AttributeError):
                raise _foreign(key) from None
        where = f"stopped in the check of {round}" if begun else f"did not come to the check of {round}"
        finding = Finding(
            text=f"{self.names.one(0)} {where} for {patience:g} s. Look for an error in its log.", about=(0,)
        )
        self.tell_once(finding)
        raise NotReadyError([finding])

    def _gone(self, error: RuntimeError) -> NotReadyError:
        finding = Finding(
            text=f"the store of the job is gone in the check of {self.round}: its host ({self.names.one(0)}, or its "
            f"launcher) has ended. Look for an error in its log. ({str(error).splitlines()[0]})",
            about=(0,),
        )
        if self._alone:
            self._say([finding])
        return NotReadyError([finding])
