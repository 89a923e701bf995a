"""Files that were fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools.corpus.inspection.report import Report
from tools.corpus.work import read_manifest
from tools.corpus.work.manifest import LEFT_OUT

if TYPE_CHECKING:
    from tools.corpus.inspection.command import InspectOptions


def examine(options: InspectOptions) -> Report:
    """Names and sizes."""
    manifest = read_manifest(options.folder, "download")
    report = Report(folder=options.folder, kind="files as they were fetched", noted=manifest.counts)
    for name, size in manifest.files.items():
        if name != LEFT_OUT:
            report.add(name, size, "bytes")
    report.add("left out as bad", manifest.left_out)
    return report
