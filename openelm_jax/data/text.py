"""Records to texts to tokens, and what is left out on the way.

A record that holds no text is bad: it is counted, and too many stop the run. A text shorter than
`min_chars` is dropped before it is tokenised, one shorter than `min_tokens` (<s> and </s>
counted) after (paper section 3.2).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Literal

import numpy as np
import orjson

from openelm_jax.data.manifest import Shard, Source
from openelm_jax.data.readers import Record, locate, read_blocks
from openelm_jax.errors import UserError
from openelm_jax.tokenizer import Tokenizer

Flaw = Literal["bad_json", "bad_utf8", "bad_key", "repaired"]
# Below so many records a share of bad ones says little.
RECORDS_BEFORE_VERDICT = 1000
PROBE_BYTES = 1 << 20
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_record(record: Record, shard: Shard, text_key: str) -> tuple[str | None, Flaw | None]:
    """Return the text of a record, or None, and what is wrong with it.

    Half a surrogate pair, which JSON can escape but UTF-8 cannot hold, becomes U+FFFD: repaired.
    """
    if record is None:
        return None, "bad_key"
    if not shard.format.startswith("jsonl"):
        try:
            return record.decode(), None
        except UnicodeDecodeError:
            return None, "bad_utf8"
    try:
        fields = orjson.loads(record)
    except orjson.JSONDecodeError:
        try:
            fields = json.loads(record.decode())
        except UnicodeDecodeError:
            return None, "bad_utf8"
        except (ValueError, RecursionError):
            return None, "bad_json"
    text = fields.get(text_key) if isinstance(fields, dict) else None
    if not isinstance(text, str):
        return None, "bad_key"
    repaired = _LONE_SURROGATE.sub("\ufffd", text)
    return repaired, None if repaired == text else "repaired"


def passes_char_filter(text: str, min_chars: int) -> bool:
    """Whether the raw text has at least `min_chars` characters."""
    return len(text) >= min_chars


def encode_document(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Return <s>, the tokens of the text, </s>: int32 [tokens + 2]."""
    tokens = tokenizer.encode(text)
    framed = np.empty(len(tokens) + 2, dtype=np.int32)
    framed[0], framed[1:-1], framed[-1] = tokenizer.bos_id, tokens, tokenizer.eos_id
    return framed


class BadRecordLimit:
    """Counts the records of a source and stops the run when too many are bad.

    `passes_left` is how many readers share the source and have not been through their part.
    """

    def __init__(
        self,
        source: str,
        max_bad_fraction: float,
        *,
        records: int = 0,
        bad: int = 0,
        passes_left: int = 1,
    ) -> None:
        self.records = records
        self.bad = bad
        self._source = source
        self._max_bad_fraction = max_bad_fraction
        self._passes_left = passes_left
        self._last: tuple[Shard, int, Record, Flaw] | None = None

    def count(self, shard: Shard, number: int, record: Record, flaw: Flaw | None) -> None:
        """Count record `number` of `shard`; raises UserError at the limit."""
        self.records += 1
        if flaw is not None and flaw != "repaired":
            self.bad += 1
            self._last = (shard, number, record, flaw)
        if self.records >= RECORDS_BEFORE_VERDICT:
            self._check()

    def end_first_pass(self) -> None:
        """Note that one reader has been through its part; after the last, raises UserError if the
        share is above the limit, however few the records."""
        self._passes_left -= 1
        if self._passes_left == 0:
            self._check()

    def _check(self) -> None:
        if self.bad <= self._max_bad_fraction * self.records:
            return
        last = "before this run was continued"
        if self._last is not None:
            shard, number, record, flaw = self._last
            last = f"the last at {locate(shard, number)} ({_FLAWS[flaw]}: {_excerpt(record)})"
        raise UserError(
            f"data.sources {self._source}: {self.bad} of {self.records} records are bad, {last}; "
            f"mend the data, or raise data.max_bad_fraction ({self._max_bad_fraction})."
        )


_FLAWS = {
    "bad_json": "not JSON",
    "bad_utf8": "not UTF-8",
    "bad_key": "no text under the text_key",
}


def read_texts(source: Source, shards: tuple[Shard, ...], limit: BadRecordLimit) -> Iterator[str]:
    """Yield the texts of some shards of a source once, in their order; `limit` counts records."""
    for shard in shards:
        number = 0
        for block in read_blocks(shard, source.text_key, PROBE_BYTES):
            for record in block.records:
                text, flaw = parse_record(record, shard, source.text_key)
                limit.count(shard, number, record, flaw)
                number += 1
                if text is not None:
                    yield text
    limit.end_first_pass()


def check_source(source: Source, shards: tuple[Shard, ...]) -> None:
    """Look at the first block that holds records, so that a wrong text_key is found at once.

    Raises UserError when no shard holds a record, or when no record of that block has a text.
    """
    for shard in shards:
        for block in read_blocks(shard, source.text_key, PROBE_BYTES):
            if block.records:
                _check_records(source, shard, block.records)
                return
    raise UserError(
        f"data.sources {source.name}: there is no record in any of its {len(shards)} files (the "
        f"first is {shards[0].path}); point the source's files at the data."
    )


def _check_records(source: Source, shard: Shard, records: list[Record]) -> None:
    flaws: list[Flaw | None] = []
    for record in records:
        text, flaw = parse_record(record, shard, source.text_key)
        if text is not None:
            return
        flaws.append(flaw)
    where = f"data.sources {source.name}: {locate(shard, 0)}"
    if shard.format.startswith("jsonl") and "bad_key" in flaws:
        first = records[flaws.index("bad_key")]
        assert first is not None
        fields = orjson.loads(first)
        if not isinstance(fields, dict):
            raise UserError(
                f"{where} and all records after it are no JSON objects ({_excerpt(first)}); "
                'write each document as {"text": "..."}.'
            )
        if source.text_key in fields:
            raise UserError(
                f"{where} and all records after it hold no text in {source.text_key!r} "
                f"({_excerpt(first)}); set the source's text_key to the field with the text."
            )
        raise UserError(
            f"{where} and all records after it have no field {source.text_key!r} but "
            f"{', '.join(map(repr, fields)) or 'none'}; set the source's text_key (data.sources) "
            "to the field with the text."
        )
    assert flaws[0] is not None
    raise UserError(
        f"{where} and all records after it are bad ({_FLAWS[flaws[0]]}: {_excerpt(records[0])}); "
        "point the source's files at the data."
    )


def _excerpt(record: Record) -> str:
    return "null" if record is None else record[:320].decode(errors="replace")[:80]
