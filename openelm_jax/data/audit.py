"""What a mixture holds, by source: read, dropped by each filter, kept; beside the paper's Table 2.

Of a run the figures are the counters of its checkpoint, so they are exact whatever hosts, workers
and restarts there were. They stand before the document in which each lane's next row begins. Of
what nobody has trained on yet, `sample.py` makes the same counters.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from openelm_jax.data.columns import BAD
from openelm_jax.data.position import Position, count
from openelm_jax.mixtures import openelm

SETTINGS = (
    "data.packing",
    "data.char_filter",
    "data.min_chars",
    "data.normalize",
    "data.min_tokens",
    "model.context_length",
)
"""Names of a fingerprint that decide what is dropped and kept."""

TABLE_2 = {source.name: source.weight for source in openelm()}
"""Billions of tokens of each source in the paper's Table 2."""

EXAMPLE_CHARS = 200
KINDS = ("kept", "char_filter", "token_filter", "bad_json", "bad_utf8", "bad_key")
"""What becomes of a record."""

Counters = dict[str, int]
"""As `position.count` gives them."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A record, and what became of it."""

    kind: str
    """One of KINDS."""
    reason: str
    place: str
    """FILE:LINE, FILE, row N or FILE."""
    text: str
    """Its first EXAMPLE_CHARS characters."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What is known of a source besides the counters when some of its records were read."""

    num_shards: int
    num_bytes: int
    """Bytes of its files."""
    kept_tokens: int | None
    """Estimate for the whole source; None where the format gives none."""
    epochs: float | None
    """Passes over the source that the run would make."""
    examples: tuple[Example, ...]


@dataclass(frozen=True, kw_only=True)
class SourceAudit:
    """The figures of one source."""

    name: str
    weight: float
    """Share of the rows that the mixture asks for."""
    counters: Counters
    sample: Sample | None = None

    @property
    def paper_billions(self) -> float | None:
        """Billions of tokens in the paper's Table 2, where it has the source."""
        return TABLE_2.get(self.name)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The figures of a mixture."""

    settings: dict[str, Any]
    """Values by the names in SETTINGS."""
    sources: tuple[SourceAudit, ...]
    step: int | None = None
    """Of the run that read it; None for a sample."""
    notes: tuple[str, ...] = field(default=())
    """Sentences about what training would refuse."""

    @property
    def row_length(self) -> int:
        """Tokens of a row."""
        return self.settings["model.context_length"] + 1


def audit_position(position: Position) -> Audit:
    """Return what a run had read at a whole position."""
    fingerprint = position.fingerprint
    names = fingerprint["data.sources"]
    weights = [fingerprint[f"data.sources.{name}.weight"] for name in names]
    return Audit(
        settings={name: fingerprint[name] for name in SETTINGS},
        sources=tuple(
            SourceAudit(name=name, weight=weight / sum(weights), counters=count(position, number))
            for number, (name, weight) in enumerate(zip(names, weights, strict=True))
        ),
        step=position.step,
    )


def bad_records(counters: Counters) -> int:
    """Return the records without a text, of every kind."""
    return sum(counters[column.name.lower()] for column in BAD)


def filtered_documents(counters: Counters, settings: dict[str, Any]) -> int:
    """Return what the shares of dropped and kept are of: records, or with packing=corenet the
    pieces of 2,048 words."""
    if settings["data.packing"] == "corenet":
        names = ("char_filter_documents", "token_filter_documents", "kept_documents")
        return sum(counters[name] for name in names)
    return counters["records"]


def tokens_seen(counters: Counters) -> int:
    """Return the tokens that were made: what `min_chars` drops is never tokenised."""
    return counters["token_filter_tokens"] + counters["kept_tokens"]


def share(part: float, whole: float) -> float:
    """Return a share between 0 and 1; that of nothing is 0."""
    return part / whole if whole else 0.0


def total(audit: Audit) -> Counters:
    """Return the counters of all sources together; of epochs the least and the most."""
    each = [source.counters for source in audit.sources]
    extremes = {"least_epochs": min, "most_epochs": max}
    return {name: extremes.get(name, sum)(c[name] for c in each) for name in each[0]}


def summary_lines(audit: Audit) -> list[str]:
    """Return a line for each source: what of it was kept, and how often it was read."""
    return [
        f"{source.name}: {c['kept_documents']:,} of "
        f"{filtered_documents(c, audit.settings):,} {documents_or_pieces(audit)} read through "
        f"kept, {c['kept_tokens']:,} tokens, {epochs_in_words(c)} whole "
        f"{'epoch' if c['most_epochs'] == 1 else 'epochs'}"
        for source in audit.sources
        for c in [source.counters]
    ]


def documents_or_pieces(audit: Audit) -> str:
    """Return what is filtered and kept as a whole."""
    return "pieces" if audit.settings["data.packing"] == "corenet" else "documents"


def epochs_in_words(counters: Counters) -> str:
    """Return the whole passes of the lane that made fewest, and of that which made most."""
    least, most = counters["least_epochs"], counters["most_epochs"]
    return f"{least}" if least == most else f"{least} to {most}"


def to_json(audit: Audit) -> dict[str, Any]:
    """Return plain values for JSON: the counters and what follows from them, by source."""
    rows = total(audit).get("rows", 0)
    return {
        "step": audit.step,
        "settings": audit.settings,
        "sources": {source.name: _source_to_json(source, audit, rows) for source in audit.sources},
        "notes": list(audit.notes),
    }


def _source_to_json(source: SourceAudit, audit: Audit, rows: int) -> dict[str, Any]:
    counters = source.counters
    whole = filtered_documents(counters, audit.settings)
    billions = source.paper_billions
    shares = {
        "char_filter": share(counters["char_filter_documents"], whole),
        "token_filter": share(counters["token_filter_documents"], whole),
        "kept": share(counters["kept_documents"], whole),
        "bad": share(bad_records(counters), counters["records"]),
        "truncated": share(counters["truncated_tokens"], counters["kept_tokens"]),
        "padded": padded_share(counters, audit),
    }
    if "rows" in counters:
        shares["rows"] = share(counters["rows"], rows)
    plain: dict[str, Any] = {
        "weight": source.weight,
        "counters": counters,
        "tokens_seen": tokens_seen(counters),
        "shares": shares,
        "table_2": None
        if billions is None
        else {"billion_tokens": billions, "share": billions / sum(TABLE_2.values())},
    }
    if source.sample is not None:
        plain["sample"] = asdict(source.sample)
    return plain


def padded_share(counters: Counters, audit: Audit) -> float:
    """Return which share of the rows of the kept pieces is filled up."""
    return share(counters["padded_tokens"], counters["kept_documents"] * audit.row_length)
