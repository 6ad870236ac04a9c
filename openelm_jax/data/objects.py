"""The objects of .jsonl (plain, .gz, .zst), .json and .parquet, each with its place for messages.

Records of fine-tuning are few and are held in memory; corpora are read by `readers`.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson
import zstandard

from openelm_jax.data import storage
from openelm_jax.errors import UserError

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".parquet")


class Object(NamedTuple):
    """The fields of a record, and where it stands: `FILE:LINE`, or `FILE, record N`."""

    fields: dict[str, Any]
    where: str


def read_objects(path: str) -> Iterator[Object]:
    """Yield the objects of a file, local or by URL; .json is one list of them.

    Raises UserError for a file that is no such thing, with the line that is none.
    """
    if not path.endswith(ENDINGS):
        raise UserError(f"{path}: records are read from {', '.join(ENDINGS)}; convert it to one.")
    if path.endswith(".parquet"):
        yield from _rows(path)
        return
    text = _text(path)
    if path.removesuffix(".gz").endswith(".json"):
        records = _parsed(text, path)
        if not isinstance(records, list):
            raise UserError(f"{path} is no list of records; write one, or .jsonl.")
        for number, record in enumerate(records, start=1):
            yield _object(record, f"{path}, record {number}")
        return
    for number, line in enumerate(text.split(b"\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield _object(_parsed(line, where), where)


def _text(path: str) -> bytes:
    data = storage.read(path, 0, storage.size_of(path))
    try:
        if path.endswith(".gz"):
            data = gzip.decompress(data)
        elif path.endswith(".zst"):
            data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as fault:
        raise UserError(f"{path} cannot be decompressed ({fault}); fetch it again.") from None
    return data.removeprefix(b"\xef\xbb\xbf")


def _parsed(text: bytes, where: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as fault:
        raise UserError(f"{where} is not JSON ({fault}); mend or remove it.") from None


def _object(record: Any, where: str) -> Object:
    if not isinstance(record, dict):
        raise UserError(f"{where} is {str(record)[:40]!r}: it must be an object.")
    return Object(record, where)


def _rows(path: str) -> Iterator[Object]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(storage.local_copy(path))
    except (pyarrow.ArrowException, OSError) as fault:
        reason = str(fault).splitlines()[0]
        raise UserError(f"{path} cannot be read as Parquet ({reason}); fetch it again.") from None
    number = 0
    for batch in table.to_batches():
        for fields in batch.to_pylist():
            number += 1
            yield _object(fields, f"{path}, record {number}")
