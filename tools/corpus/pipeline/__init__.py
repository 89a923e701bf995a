"""The frame of every step: units of work, who does them, and a folder that appears when they are done."""

from tools.common.files import draft, fingerprint_file
from tools.corpus.pipeline.step import Manifest, Stage, read_manifest
from tools.corpus.pipeline.units import BadInput, Context, LeftOut, Unit
from tools.corpus.pipeline.workers import LocalTeam, Options, Team, local_team

__all__ = [
    "BadInput",
    "Context",
    "LeftOut",
    "LocalTeam",
    "Manifest",
    "Options",
    "Stage",
    "Team",
    "Unit",
    "draft",
    "fingerprint_file",
    "local_team",
    "read_manifest",
]
