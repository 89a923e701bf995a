"""Rows of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.corpus.extract.read_context import Document, ReadContext, row_document

_ROWS = 64
_BUFFER = 1 << 20
_REMEDY = "Fetch or make the file again"


def cut_row_groups(path: Path, unit_bytes: int) -> list[tuple[int, int, int]]:
    """Runs of row groups of about `unit_bytes` each: the first, the one after the last, bytes of the file.

    A file that cannot be opened is one empty run, so that whoever reads it finds out.

    Raises:
        ValueError: pyarrow is not installed.
    """
    size = path.stat().st_size
    try:
        metadata = _open(path).metadata
    except _errors():
        return [(0, 0, size)]
    if metadata.num_row_groups and metadata.num_columns and metadata.row_group(0).column(0).file_path:
        return [(0, 0, size)]  # "_metadata" beside a table's files: it lists their rows and has none
    runs: list[tuple[int, int, int]] = []
    begin = taken = 0
    for group in range(metadata.num_row_groups):
        held = metadata.row_group(group)
        # What the pages take unpacked is what a worker has to go through.
        cost = held.total_byte_size
        if group > begin and taken + cost > unit_bytes:
            runs.append((begin, group, taken))
            begin, taken = group, 0
        taken += cost
    return [*runs, (begin, metadata.num_row_groups, taken)]


def read_parquet(reading: ReadContext) -> Iterator[Document]:
    """A row a document, with the names of the columns as --text-field, --title-field and --id-field say."""
    try:
        file = _open(reading.piece.path)
    except _errors() as error:
        reading.report("at its end", f"the Parquet file is damaged or cut off: {_first_line(error)}", _REMEDY)
        return
    with file:
        names, fields = file.schema_arrow.names, reading.fields
        paths = [file.schema.column(number).path for number in range(file.metadata.num_columns)]
        if not any(f"{path}.".startswith(f"{fields.text}.") for path in paths):
            reason = f"there is no {fields.text!r} in {', '.join(paths)}"
            reading.report("its columns", reason, "Name one by --text-field")
            return
        wanted = dict.fromkeys((fields.text, fields.title, fields.id))
        columns = [name for name in wanted if name in names or name.partition(".")[0] in names]
        for group in range(reading.piece.begin, reading.piece.end):
            yield from _row_group(file, group, columns, reading)


def _row_group(file: Any, group: int, columns: list[str], reading: ReadContext) -> Iterator[Document]:
    row = sum(file.metadata.row_group(before).num_rows for before in range(group))
    try:
        for batch in file.iter_batches(_ROWS, row_groups=[group], columns=columns, use_threads=False):
            for values in _rows(batch, row, reading):
                document = row_document(values, f"row {row}", reading) if values is not None else None
                row += 1
                if document is not None:
                    yield document
    except _errors() as error:
        reading.report(f"row {row}", f"the rows of its group from here on are damaged: {_first_line(error)}", _REMEDY)


def _rows(batch: Any, first: int, reading: ReadContext) -> Iterator[dict[str, Any] | None]:
    """The rows of a batch; None for one that is not UTF-8, which is reported."""
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    for number in range(batch.num_rows):
        try:
            yield batch.slice(number, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            reading.report(f"row {first + number}", f"this is not UTF-8 ({error})", "Convert it to UTF-8 first")
            yield None


def _open(path: Path) -> Any:
    # Without these two the whole column of a row group is read at once, and that may be the whole file.
    return _pyarrow().ParquetFile(path, page_checksum_verification=True, pre_buffer=False, buffer_size=_BUFFER)


def _pyarrow() -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"Parquet files need pyarrow ({error}): pip install 'tensor3d[corpus]'") from error
    return parquet


def _errors() -> tuple[type[Exception], ...]:
    """What pyarrow raises on damage."""
    try:
        from pyarrow import ArrowException
    except ImportError:
        return ()
    return (ArrowException, OSError)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
