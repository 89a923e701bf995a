"""The frame of every step: units of work, who does them, and a folder that appears when they are done."""

from tools.corpus.work.bad import BadInput, LeftOut
from tools.corpus.work.files import draft, fingerprint_file
from tools.corpus.work.manifest import Manifest, read_manifest
from tools.corpus.work.options import Options
from tools.corpus.work.step import Step
from tools.corpus.work.team import LocalTeam, Team, local_team
from tools.corpus.work.units import Context, Unit

__all__ = [
    "BadInput",
    "Context",
    "LeftOut",
    "LocalTeam",
    "Manifest",
    "Options",
    "Step",
    "Team",
    "Unit",
    "draft",
    "fingerprint_file",
    "local_team",
    "read_manifest",
]
