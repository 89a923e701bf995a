"""Where results go: lines of JSON, lines to be read, or an array."""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np

from tools.predict.inputs import InputProblem, Query
from tools.predict.results import Embedded, Result, Tagged
from tools.predict.stored_vectors import pyarrow_parquet

Outcome = tuple[Query | InputProblem, Result | InputProblem]


class ResultWriter(ABC):
    """What a batch's results are written to."""

    @abstractmethod
    def write(self, batch: Sequence[Outcome]) -> None:
        """Writes all of a batch, and does not keep it back. Raises OSError where that cannot be."""

    def close(self) -> None:
        """After the last batch."""
        return


class JsonOutput(ResultWriter):
    """An object a line.

    Args:
        form: what it says of a result.
    """

    def __init__(self, file: BinaryIO, form: Callable[[Any], dict[str, Any]] = lambda result: result.as_json()) -> None:
        self._file, self._form = file, form

    def write(self, batch: Sequence[Outcome]) -> None:
        self._file.write(_encoded("".join(_json_line(query, result, self._form) for query, result in batch)))
        self._file.flush()


def _json_line(
    query: Query | InputProblem, result: Result | InputProblem, form: Callable[[Any], dict[str, Any]]
) -> str:
    named = {} if query.id is None else {"id": query.id}
    if isinstance(result, InputProblem):
        return json.dumps({**named, "line": result.number, "error": result.error}, ensure_ascii=False) + "\n"
    return json.dumps({**named, **form(result)}, ensure_ascii=False) + "\n"


def _encoded(text: str) -> bytes:
    # Half of a surrogate pair, which JSON can spell and UTF-8 cannot, is spelled again.
    return text.encode("utf-8", "backslashreplace")


class ReadableOutput(ResultWriter):
    """Some lines for each text, with the text above them where there are several."""

    def __init__(self, file: BinaryIO, *, with_text: bool) -> None:
        self._file, self._with_text = file, with_text

    def write(self, batch: Sequence[Outcome]) -> None:
        for query, result in batch:
            head = [f"> {query.first}"] if self._with_text and isinstance(query, Query) else []
            lines = [str(result)] if isinstance(result, InputProblem) else result.in_words()
            self._file.write(_encoded("\n".join([*head, *lines]) + "\n"))
        self._file.flush()


class ColumnsOutput(ResultWriter):
    """A line for each word, with its tag behind a tab, and an empty line behind each text."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, batch: Sequence[Outcome]) -> None:
        for _, result in batch:
            assert isinstance(result, Tagged), "of a task that tags words, and problems stop it"
            rows = zip(result.tokens, result.tags, strict=True)
            self._file.write(_encoded("".join(f"{word}\t{tag}\n" for word, tag in rows) + "\n"))
        self._file.flush()


class ArrayOutput(ResultWriter):
    """A .npy file, float32 (texts, H), written row by row; a text with a problem is a row of nan.

    Args:
        file: one that can be sought in: the number of rows is known at the end.
    """

    def __init__(self, file: BinaryIO, columns: int) -> None:
        self._file, self._columns, self._rows = file, columns, 0
        self._write_header()

    def write(self, batch: Sequence[Outcome]) -> None:
        rows = np.full((len(batch), self._columns), np.nan, dtype="<f4")
        for number, (_, result) in enumerate(batch):
            if isinstance(result, Embedded):
                rows[number] = result.vector
        self._file.write(rows.tobytes())
        self._rows += len(rows)

    def close(self) -> None:
        self._file.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        # numpy leaves room for the first axis to grow, so that the header keeps its size.
        shape = (self._rows, self._columns)
        np.lib.format.write_array_header_1_0(self._file, {"descr": "<f4", "fortran_order": False, "shape": shape})


_GROUP = 4096  # rows


class ParquetOutput(ResultWriter):
    """A Parquet file: `id` (text, or JSON of another kind), `vector` (a list of float32), `error` of a text without.

    Raises:
        ValueError: pyarrow is missing.
    """

    def __init__(self, file: BinaryIO) -> None:
        parquet, arrow = pyarrow_parquet(), importlib.import_module("pyarrow")
        kinds = {"id": arrow.string(), "vector": arrow.list_(arrow.float32()), "error": arrow.string()}
        self._schema, self._arrow = arrow.schema(kinds), arrow
        self._writer, self._rows = parquet.ParquetWriter(file, self._schema), list[dict[str, Any]]()

    def write(self, batch: Sequence[Outcome]) -> None:
        for query, result in batch:
            name = query.id if query.id is None or isinstance(query.id, str) else json.dumps(query.id)
            vector, error = (result.vector, None) if isinstance(result, Embedded) else (None, _error_of(result))
            self._rows.append({"id": name, "vector": vector, "error": error})
        if len(self._rows) >= _GROUP:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._arrow.Table.from_pylist(self._rows, schema=self._schema))
            self._rows.clear()


def _error_of(result: Result | InputProblem) -> str:
    assert isinstance(result, InputProblem), "of a task that makes vectors"
    return result.error


class OutputProgress:
    """The output of the first rank; on others, nothing. What goes wrong waits until all ranks can hear of it.

    Args:
        name: what is written, for messages: a system that has no more room does not say of what.
    """

    def __init__(self, output: ResultWriter | None, name: str) -> None:
        self._output, self._name = output, name
        self._problem: OSError | None = None
        self.is_closed = False
        """Whether its reader has gone, as `head` does."""

    def write(self, batch: Sequence[Outcome]) -> None:
        self._try(lambda output: output.write(batch))

    def close(self) -> None:
        self._try(lambda output: output.close())

    def is_over(self) -> bool:
        """Whether nobody reads any more. Raises ValueError where something could not be written."""
        if self._problem is not None:
            reason = self._problem.strerror or self._problem
            raise ValueError(f"{self._name} cannot be written: {reason}. Make room, or write the results elsewhere.")
        return self.is_closed

    def _try(self, action: Callable[[ResultWriter], None]) -> None:
        if self._output is None or self.is_closed or self._problem is not None:
            return
        try:
            action(self._output)
        except BrokenPipeError:
            self.is_closed = True
        except OSError as problem:
            self._problem = problem
