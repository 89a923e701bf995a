"""A Slurm of its own for tests: one controller and several nodes, all of them on this machine, in one temporary folder.

    with slurm(nodes=2, cpus=4) as cluster:
        job = cluster.submit("--nodes=2", "job.sh")
        assert cluster.wait(job, seconds=60) == "COMPLETED"

The real daemons and commands run, as Debian's packages slurm-wlm and munge have them, and nothing of the machine's own
configuration is read or written. Each node is one slurmd with a port of its own. What the nodes do not have of a real
cluster: addresses, files and names of their own. Their processes meet over the loopback interface.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_ports
from tests.programs import ran

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL"}
_SETTINGS = """
ClusterName=tests
# Ports are made from the number: clusters side by side must not share them.
FirstJobId={first}
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A job that is requeued waits as long as its old credential lives: two minutes, if nothing were said.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
# The nodes may have more cores than the machine that they share.
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=30
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why no Slurm can be started here, for pytest.skip; None where it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"needs Slurm: {', '.join(missing)} not found (Debian: apt-get install slurm-wlm munge)"
    return None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A running Slurm."""

    folder: Path
    """All that is its own."""
    nodes: tuple[str, ...]
    environment: dict[str, str]
    """With which its commands find it."""

    def run(
        self, command: Sequence[str | Path], *, cwd: Path | None = None, timeout: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Runs one of its commands, whatever its exit status."""
        return ran(command, cwd=cwd, env=self.environment, timeout=timeout)

    def submit(self, *arguments: str | Path, cwd: Path | None = None) -> str:
        """The number of a job that `sbatch ARGUMENTS` has accepted. Raises AssertionError where it has not."""
        done = self.run(["sbatch", "--parsable", *arguments], cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def field(self, job: str, name: str) -> str:
        """One field of what Slurm knows of a job, such as JobState or ExitCode."""
        done = self.run(["scontrol", "--oneliner", "show", "job", job])
        fields = dict(word.partition("=")[::2] for word in done.stdout.split())
        assert name in fields, f"job {job}: no {name} in {done.stdout or done.stderr}"
        return fields[name]

    def state(self, job: str) -> str:
        return self.field(job, "JobState")

    def wait(self, job: str, *, seconds: float) -> str:
        """Its state when it has ended for good. Raises AssertionError if that takes longer."""
        until(
            lambda: self.field(job, "JobState") in ENDED, seconds, lambda: f"job {job}: {self.field(job, 'JobState')}"
        )
        return self.field(job, "JobState")

    def processes(self) -> dict[int, str]:
        """What runs in jobs, or for them: process numbers with commands. The daemons are none of them."""
        daemons = ("munged", "slurmctld", "slurmscriptd", "slurmd")
        return {
            pid: words for pid, words in _all_processes(self.folder).items() if not _name(words).startswith(daemons)
        }


def until(condition: Callable[[], object], seconds: float, said: Callable[[], str]) -> None:
    """Waits. Raises AssertionError with `said` if it takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s; {said()}"
        time.sleep(0.1)


@contextmanager
def slurm(*, nodes: int = 2, cpus: int = 4) -> Iterator[Cluster]:
    """Starts a Slurm, and removes it with all that still runs in it, whatever has happened.

    Args:
        nodes: how many, called node0 and so on.
        cpus: cores that each says it has.

    Raises:
        AssertionError: it did not come up; with the end of the daemons' logs.
    """
    # Not below pytest's folders: the path of a socket has at most 107 characters, and munge wants to be let in by all.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        names = tuple(f"node{number}" for number in range(nodes))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        environment["SLURM_CONF"] = str(folder / "slurm.conf")
        cluster = Cluster(folder=folder, nodes=names, environment=environment)
        _configure(folder, names, cpus)
        stack.callback(_end, folder)
        for name, command in _daemons(folder, names).items():
            with open(folder / f"{name}.log", "wb") as log:
                daemon = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            stack.callback(_leave, daemon)
            if name == "munged":
                until((folder / "munge.socket").exists, 10, lambda: _logs(folder))
        idle = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
        until(lambda: cluster.run(idle).stdout.strip() == str(nodes), 30, lambda: _logs(folder))
        try:
            yield cluster
        finally:
            cluster.run(["scancel", "--user", getpass.getuser()])
            cluster.run(["scancel", "--signal=KILL", "--full", "--user", getpass.getuser()])


def _configure(folder: Path, names: Sequence[str], cpus: int) -> None:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    (folder / "state").mkdir()
    (folder / "plugstack.conf").touch()
    port, *ports = free_ports(1 + len(names))
    lines = [_SETTINGS.format(folder=folder, port=port, user=getpass.getuser(), first=os.getpid() % 3000 + 1)]
    for name, own in zip(names, ports, strict=True):
        (folder / name).mkdir()
        lines.append(f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={own} CPUs={cpus}\n")
    (folder / "slurm.conf").write_text("".join(lines))


def _daemons(folder: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The command of each, all in the foreground, in the order in which they start."""
    munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={folder}/munge.{ending}" for option, ending in munge.items()]
    return {
        "munged": ["munged", "--foreground", "--force", *options],
        "slurmctld": ["slurmctld", "-D", "-i"],
        **{name: ["slurmd", "-D", "-N", name] for name in names},
    }


def _leave(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _end(folder: Path) -> None:
    """Kills what still runs of a cluster whose daemons have left."""
    deadline = time.monotonic() + 10
    while (left := _all_processes(folder)) and time.monotonic() < deadline:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def _all_processes(folder: Path) -> dict[int, str]:
    """All living processes that were started with the cluster's configuration, except this one."""
    setting, found = f"SLURM_CONF={folder}/slurm.conf".encode(), {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if setting in (path / "environ").read_bytes().split(b"\0") and int(path.name) != os.getpid():
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def _name(words: str) -> str:
    return Path(words.removeprefix(": ").split(" ")[0]).name


def _logs(folder: Path) -> str:
    return "\n".join(
        f"{path.name}: {path.read_text(errors='replace')[-1000:]}" for path in sorted(folder.glob("*.log"))
    )
