"""A mixture before anyone trains on it: some records of each source, judged as a run would.

The records come from many places of a source at once, one from each in turn: the shards in the
order that a run's seed gives them, and of few large shards ranges of each. Whoever asks for more
records than there are gets each exactly once.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from openelm_jax.config import DataConfig
from openelm_jax.data import order
from openelm_jax.data.audit import (
    EXAMPLE_CHARS,
    KINDS,
    SETTINGS,
    Audit,
    Example,
    Sample,
    SourceAudit,
    bad_records,
)
from openelm_jax.data.columns import BAD, COUNTERS, Column
from openelm_jax.data.filters import accept, read_text
from openelm_jax.data.manifest import Shard, Source, list_manifest
from openelm_jax.data.pipeline import make_plan
from openelm_jax.data.readers import (
    Part,
    Record,
    count_records,
    locate,
    open_reader,
    splits_by_position,
)
from openelm_jax.data.text import FLAWS, TextRules
from openelm_jax.errors import UserError
from openelm_jax.tokenizer import Tokenizer

# Places of a source that are read in turn.
MOST_PLACES = 64
LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES = 1 << 18, 4 << 20
TYPICAL_DOCUMENT_BYTES = 4096
# Of each kind, in each source.
MOST_EXAMPLES = 2


def sample_mixture(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    row_length: int,
    global_batch_size: int,
    steps: int,
    num_records: int,
    starting: Callable[[str], None] = lambda name: None,
) -> Audit:
    """Return the figures of at most `num_records` of each source, and what a run would refuse.

    `starting` is told each source that is read next. Raises UserError for data that is missing.
    """
    manifest = list_manifest(config)
    rules = TextRules.of(config, row_length)
    audits: list[SourceAudit] = []
    notes: list[str] = []
    for number, source in enumerate(manifest.sources):
        starting(source.name)
        reading = _Reading(source, config.seed, number, num_records)
        counters, examples = _judge(reading, tokenizer, rules)
        weight = source.weight / sum(other.weight for other in manifest.sources)
        audit = SourceAudit(
            name=source.name,
            weight=weight,
            counters=counters,
            sample=_describe(
                reading, counters, rules, weight * steps * global_batch_size, examples
            ),
        )
        audits.append(audit)
        notes += _what_would_stop(audit, reading, config)
    try:
        make_plan(config, tokenizer, row_length=row_length, global_batch_size=global_batch_size)
    except UserError as refusal:
        notes.append(str(refusal))
    return Audit(
        settings=_settings(rules), sources=tuple(audits), notes=tuple(dict.fromkeys(notes))
    )


class _Reading:
    """Records of a source, from many places in turn; and what was read of which file."""

    def __init__(self, source: Source, seed: int, number: int, num_records: int) -> None:
        self.source = source
        self.damage: dict[str, str] = {}
        self.finished: set[Shard] = set()
        self.records: Counter[Shard] = Counter()
        self.bytes: Counter[Shard] = Counter()
        self._seed = seed
        self._number = number
        self._most = num_records
        self._parts: Counter[Shard] = Counter()
        self._places_at_once = min(MOST_PLACES, num_records)
        bytes_of_place = num_records // self._places_at_once * TYPICAL_DOCUMENT_BYTES
        self._block_bytes = min(MOST_BLOCK_BYTES, max(LEAST_BLOCK_BYTES, bytes_of_place))

    def __iter__(self) -> Iterator[tuple[Shard, Part, int, Record]]:
        places = self._places()
        opened = deque(self._read(*place) for place in islice(places, self._places_at_once))
        count = 0
        while opened and count < self._most:
            stream = opened.popleft()
            found = next(stream, None)
            if found is None:
                opened.extend(self._read(*place) for place in islice(places, 1))
                continue
            shard, _, _, record = found
            count += 1
            self.records[shard] += 1
            self.bytes[shard] += len(record or b"") + (shard.format == "jsonl")
            yield found
            opened.append(stream)
        for stream in opened:  # which of them are at their end
            next(stream, None)

    def _places(self) -> Iterator[tuple[Shard, Part]]:
        """Yield parts that together are the source: one of each shard, then the next of each."""
        shards = self.source.shards
        wanted = -(-MOST_PLACES // len(shards))
        parted: list[tuple[Shard, list[int]]] = []
        for index in order.permutation((self._seed, order.SHARDS, self._number), len(shards)):
            shard, of = shards[int(index)], wanted
            while of > 1 and not splits_by_position(shard, of):
                of //= 2
            self._parts[shard] = of
            key = (self._seed, order.EPOCH, self._number, int(index))
            parted.append((shard, order.permutation(key, of).tolist()))
        for turn in range(wanted):
            for shard, parts in parted:
                if turn < len(parts):
                    yield shard, Part(parts[turn], len(parts))

    def _read(self, shard: Shard, part: Part) -> Iterator[tuple[Shard, Part, int, Record]]:
        reader = open_reader(shard, self.source.text_key, self._block_bytes, part)
        position: int | None = 0
        number = 0
        while position is not None:
            block = reader.read_block(position, number)
            if block.damage is not None:
                self.damage[shard.path] = block.damage
            for place, record in zip(block.numbers, block.records, strict=True):
                yield shard, part, place, record
            position, number = block.next_position, block.next_number
        self._parts[shard] -= 1
        if self._parts[shard] == 0:
            self.finished.add(shard)


def _judge(
    reading: _Reading, tokenizer: Tokenizer, rules: TextRules
) -> tuple[dict[str, int], tuple[Example, ...]]:
    """Return the counters of what is read, and a few records of each fate."""
    source = reading.source
    counts_C = np.zeros(len(Column), dtype=np.int64)
    examples: list[Example] = []
    for shard, part, number, record in reading:
        before_C = counts_C.copy()
        text, _ = read_text(record, shard, source.text_key, rules, counts_C)
        if text is not None:
            deque(accept(text, tokenizer, rules, counts_C), maxlen=0)
        kind, reason = _fate(counts_C - before_C, rules)
        if sum(example.kind == kind for example in examples) < MOST_EXAMPLES:
            shown = text if text is not None else (record or b"").decode(errors="replace")
            place = locate(shard, number, part)
            examples.append(
                Example(kind=kind, reason=reason, place=place, text=shown[:EXAMPLE_CHARS])
            )
    counts_C[Column.SHARDS] = len(reading.finished)
    counts_C[Column.DAMAGED_SHARDS] = len(reading.damage)
    counters = {
        column.name.lower(): int(counts_C[column]) for column in COUNTERS if column != Column.ROWS
    }
    return counters, tuple(sorted(examples, key=lambda example: KINDS.index(example.kind)))


def _fate(raised_C: np.ndarray, rules: TextRules) -> tuple[str, str]:
    """Return what became of a record, and why, from what it added to the counters."""
    for column in BAD:
        if raised_C[column]:
            return column.name.lower(), FLAWS[column.name.lower()]
    kept, few_tokens, few_chars = (
        int(raised_C[column])
        for column in (
            Column.KEPT_DOCUMENTS,
            Column.TOKEN_FILTER_DOCUMENTS,
            Column.CHAR_FILTER_DOCUMENTS,
        )
    )
    pieces = kept + few_tokens + few_chars
    of_pieces = f" in {kept} of {pieces} pieces" if pieces > 1 else ""
    if kept:
        return "kept", f"{raised_C[Column.KEPT_TOKENS]:,} tokens{of_pieces}"
    if few_tokens:
        tokens = raised_C[Column.TOKEN_FILTER_TOKENS]
        if pieces > 1:
            return "token_filter", f"{pieces} pieces, none of {rules.min_tokens} tokens"
        return "token_filter", f"{tokens:,} tokens, data.min_tokens is {rules.min_tokens}"
    counted = " as CoreNet counts them" if rules.char_filter == "corenet" else ""
    chars = raised_C[Column.CHAR_FILTER_CHARS]
    if counted:
        return (
            "char_filter",
            f"{chars:,} characters, fewer than data.min_chars {rules.min_chars}{counted}",
        )
    return "char_filter", f"{chars:,} characters, data.min_chars is {rules.min_chars}"


def _describe(
    reading: _Reading,
    counters: dict[str, int],
    rules: TextRules,
    num_rows: float,
    examples: tuple[Example, ...],
) -> Sample:
    """Return what the records say of the whole source; `num_rows` are those of the run."""
    source = reading.source
    num_bytes = sum(shard.size for shard in source.shards)
    read_bytes = _read_bytes(reading)
    kept_tokens, epochs = None, None
    if read_bytes:
        scale = num_bytes / read_bytes
        kept_tokens = round(counters["kept_tokens"] * scale)
        if rules.packing == "corenet":
            whole = counters["kept_documents"] * scale
        else:
            whole = kept_tokens / (rules.row_length - 1)
        epochs = num_rows / whole if whole else None
    return Sample(
        num_shards=len(source.shards),
        num_bytes=num_bytes,
        kept_tokens=kept_tokens,
        epochs=epochs,
        examples=examples,
    )


def _read_bytes(reading: _Reading) -> float | None:
    """Return how many bytes of its files the records are, None where a format does not tell.

    How far into a compressed file a record is cannot be said, unless all of it was read.
    """
    read = 0.0
    for shard, records in reading.records.items():
        if shard in reading.finished:
            read += shard.size
        elif shard.format in ("jsonl", "txt", "demo"):
            read += reading.bytes[shard]
        elif shard.format in ("parquet", "array_record"):
            whole = count_records(shard, reading.source.text_key, sys.maxsize, skip_damage=True)
            read += shard.size * records / max(whole, records)
        else:
            return None
    return read


def _what_would_stop(audit: SourceAudit, reading: _Reading, config: DataConfig) -> Iterator[str]:
    counters, where = audit.counters, f"data.sources {audit.name}"
    if config.on_damaged_shard == "raise":
        yield from reading.damage.values()
    bad = bad_records(counters)
    if bad > config.max_bad_fraction * counters["records"]:
        yield (
            f"{where}: {bad:,} of {counters['records']:,} records are bad, and a run stops above "
            f"data.max_bad_fraction {config.max_bad_fraction}; mend the data, or raise it."
        )
    if counters["kept_documents"] == 0:
        yield (
            f"{where}: nothing is kept of the {counters['records']:,} records that were read; "
            "lower data.min_chars and data.min_tokens, or give other files."
        )


def _settings(rules: TextRules) -> dict[str, Any]:
    """Return the settings by their names, as the fingerprint of a run has them."""
    values = (
        rules.packing,
        rules.char_filter,
        rules.min_chars,
        rules.normalize,
        rules.min_tokens,
        rules.row_length - 1,
    )
    return dict(zip(SETTINGS, values, strict=True))
