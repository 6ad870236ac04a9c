"""Records to texts to tokens, and what is left out on the way.

A record that holds no text is bad: it is counted, and too many stop the run. A text shorter than
`min_chars` is dropped before it is tokenised, one shorter than `min_tokens` (<s> and </s>
counted) after (paper section 3.2). With packing=corenet each piece of a document goes this way by
itself.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson

from openelm_jax.config import DataConfig
from openelm_jax.data.manifest import Shard, Source
from openelm_jax.data.normalization import has_normalised_chars, import_ftfy, repair
from openelm_jax.data.readers import WHOLE, Block, Part, Record, locate, read_blocks
from openelm_jax.errors import UserError
from openelm_jax.tokenizer import Tokenizer

Flaw = Literal["bad_json", "bad_utf8", "bad_key", "repaired"]
# Below so many records a share of bad ones says little.
RECORDS_BEFORE_VERDICT = 1000
PROBE_BYTES = 1 << 20
PIECE_WORDS = 2048
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_PIECE = re.compile(rf"(?:[^ ]*+ ){{{PIECE_WORDS - 1}}}+[^ ]*+")


@dataclass(frozen=True, kw_only=True)
class TextRules:
    """What becomes of a text: the fields of DataConfig that decide it, none of them open."""

    packing: Literal["concat", "corenet"]
    char_filter: Literal["raw", "corenet"]
    normalize: Literal["none", "nfc", "ftfy"]
    min_chars: int
    min_tokens: int
    row_length: int
    max_document_chars: int = 50_000_000
    """Longer documents are cut, which is counted."""

    @classmethod
    def of(cls, config: DataConfig, row_length: int) -> TextRules:
        """Return the rules of `config`, in which what is None follows packing.

        Raises UserError when the rules need ftfy and it is not installed.
        """
        as_corenet = config.packing == "corenet"
        normalize = config.normalize or ("ftfy" if as_corenet else "none")
        if normalize == "ftfy":
            import_ftfy()
        return cls(
            packing=config.packing,
            char_filter=config.char_filter or ("corenet" if as_corenet else "raw"),
            normalize=normalize,
            min_chars=config.min_chars,
            min_tokens=config.min_tokens,
            row_length=row_length,
        )


def parse_record(record: Record, shard: Shard, text_key: str) -> tuple[str | None, Flaw | None]:
    """Return the text of a record, or None, and what is wrong with it.

    Half a surrogate pair, which JSON can escape but UTF-8 cannot hold, becomes U+FFFD: repaired.
    """
    if record is None:
        return None, "bad_key"
    if not _holds_json(shard):
        try:
            return record.decode(), None
        except UnicodeDecodeError:
            return None, "bad_utf8"
    fields, flaw = _parse_json(record)
    if flaw == "bad_json" or flaw == "bad_utf8":
        return None, flaw
    text = fields.get(text_key) if isinstance(fields, dict) else None
    if not isinstance(text, str):
        return None, "bad_key"
    if flaw is None:
        return text, None
    repaired = _LONE_SURROGATE.sub("\ufffd", text)
    return repaired, None if repaired == text else "repaired"


def _holds_json(shard: Shard) -> bool:
    return shard.format.startswith("jsonl") or shard.format == "array_record"


def _parse_json(record: bytes) -> tuple[Any, Flaw | None]:
    """Return what a line holds, "repaired" where it may hold half surrogate pairs."""
    try:
        return orjson.loads(record), None
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(record.decode()), "repaired"
    except UnicodeDecodeError:
        return None, "bad_utf8"
    except (ValueError, RecursionError):
        return None, "bad_json"


def cut_long(text: str, rules: TextRules) -> str:
    """Return at most the first `max_document_chars` characters of a document."""
    return text[: rules.max_document_chars]


def pieces_of(text: str, rules: TextRules) -> Iterator[str]:
    """Yield what is filtered, framed and counted by itself: the document, or CoreNet's pieces.

    Those have 2,048 words each but for the last, words being what stands between single spaces
    (`general_lm.py` of CoreNet).
    """
    position = 0
    if rules.packing == "corenet" and text.count(" ") >= PIECE_WORDS:
        while found := _PIECE.match(text, position):
            yield found[0]
            position = found.end() + 1
    if position <= len(text):
        yield text[position:]


def passes_char_filter(piece: str, rules: TextRules) -> bool:
    """Whether the piece, or CoreNet's normalised copy of it, has at least `min_chars`
    characters."""
    if rules.char_filter == "corenet":
        return has_normalised_chars(piece, rules.min_chars)
    return len(piece) >= rules.min_chars


def normalise(piece: str, rules: TextRules) -> str:
    """Return what of a piece is tokenised: itself, its NFC, or what ftfy makes of it."""
    if rules.normalize == "none":
        return piece
    return unicodedata.normalize("NFC", piece) if rules.normalize == "nfc" else repair(piece)


def encode_piece(piece: str, tokenizer: Tokenizer, rules: TextRules) -> Iterator[np.ndarray]:
    """Return <s>, the tokens of the normalised piece and </s> in parts, made when asked: int32."""
    return tokenizer.encode_in_parts(normalise(piece, rules), framed=True)


def encode_document(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Return <s>, the tokens of the text as it is, </s>: int32 [tokens + 2]."""
    return np.concatenate(list(tokenizer.encode_in_parts(text, framed=True)))


def corenet_row(tokens: np.ndarray, row_length: int, pad_id: int) -> tuple[np.ndarray, int, int]:
    """Return CoreNet's row of a piece, int32 [L], and the tokens cut off and the ids filled in."""
    row = np.full(row_length, pad_id, dtype=np.int32)
    used = min(len(tokens), row_length)
    row[:used] = tokens[:used]
    return row, len(tokens) - used, row_length - used


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
        self._last: tuple[Shard, int, Record, Flaw, Part] | None = None

    def count(
        self,
        shard: Shard,
        number: int,
        record: Record,
        flaw: Flaw | None,
        part: Part = WHOLE,
    ) -> None:
        """Count record `number` of a part of `shard`; raises UserError at the limit."""
        self.records += 1
        if flaw is not None and flaw != "repaired":
            self.bad += 1
            self._last = (shard, number, record, flaw, part)
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
            shard, number, record, flaw, part = self._last
            where = locate(shard, number, part)
            last = f"the last at {where} ({FLAWS[flaw]}: {_excerpt(record)})"
        raise UserError(
            f"data.sources {self._source}: {self.bad} of {self.records} records are bad, {last}; "
            f"mend the data, or raise data.max_bad_fraction ({self._max_bad_fraction})."
        )


FLAWS = {
    "bad_json": "not JSON",
    "bad_utf8": "not UTF-8",
    "bad_key": "no text under the text_key",
}


def read_texts(
    source: Source,
    shards: tuple[Shard, ...],
    limit: BadRecordLimit,
    *,
    skip_damage: bool = False,
) -> Iterator[str]:
    """Yield the texts of some shards of a source once, in their order; `limit` counts records.

    Raises UserError at a damaged shard, unless what comes before the damage is enough.
    """
    for shard in shards:
        for block in read_blocks(shard, source.text_key, PROBE_BYTES, skip_damage=skip_damage):
            for number, record in zip(block.numbers, block.records, strict=True):
                text, flaw = parse_record(record, shard, source.text_key)
                limit.count(shard, number, record, flaw)
                if text is not None:
                    yield text
    limit.end_first_pass()


def check_source(source: Source, shards: tuple[Shard, ...], *, skip_damage: bool = False) -> None:
    """Look at the first block that holds records, so that a wrong text_key is found at once.

    Raises UserError when no shard holds a record, or when no record of that block has a text.
    """
    for shard in shards:
        for block in read_blocks(shard, source.text_key, PROBE_BYTES, skip_damage=skip_damage):
            if block.records:
                _check_block(source, shard, block)
                return
    raise UserError(
        f"data.sources {source.name}: there is no record in any of its {len(shards)} files (the "
        f"first is {shards[0].path}); point the source's files at the data."
    )


def _check_block(source: Source, shard: Shard, block: Block) -> None:
    flaws: list[Flaw | None] = []
    for record in block.records:
        text, flaw = parse_record(record, shard, source.text_key)
        if text is not None:
            return
        flaws.append(flaw)
    where = f"data.sources {source.name}: {locate(shard, block.numbers[0])}"
    keyless = [
        record
        for record, flaw in zip(block.records, flaws, strict=True)
        if flaw == "bad_key" and record is not None
    ]
    if keyless:
        fields, _ = _parse_json(keyless[0])
        if not isinstance(fields, dict):
            raise UserError(
                f"{where} and all records after it are no JSON objects ({_excerpt(keyless[0])}); "
                'write each document as {"text": "..."}.'
            )
        if source.text_key in fields:
            raise UserError(
                f"{where} and all records after it hold no text in {source.text_key!r} "
                f"({_excerpt(keyless[0])}); set the source's text_key to the field with the text."
            )
        raise UserError(
            f"{where} and all records after it have no field {source.text_key!r} but "
            f"{', '.join(map(repr, fields)) or 'none'}; set the source's text_key (data.sources) "
            "to the field with the text."
        )
    assert flaws[0] is not None
    cure = "set the source's text_key, or " if "bad_key" in flaws else ""
    raise UserError(
        f"{where} and all records after it are bad ({FLAWS[flaws[0]]}: "
        f"{_excerpt(block.records[0])}); {cure}point the source's files at the data."
    )


def printable(text: str) -> str:
    """Return a text with escapes in place of what a terminal may obey."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _excerpt(record: Record) -> str:
    return "null" if record is None else printable(record[:320].decode(errors="replace")[:80])
