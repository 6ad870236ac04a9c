"""An audit as tables of at most 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from openelm_jax.data.audit import (
    EXAMPLE_CHARS,
    TABLE_2,
    Audit,
    Counters,
    Example,
    SourceAudit,
    bad_records,
    documents_or_pieces,
    epochs_in_words,
    filtered_documents,
    padded_share,
    share,
    tokens_seen,
    total,
)
from openelm_jax.data.text import printable

Cells = Callable[[Counters], list[str]]
NOTHING = "-"


def print_audit(audit: Audit, console: Console) -> None:
    """Print the tables, what they count, a few records, and what a run would refuse."""
    for part in _parts(audit):
        console.print(part)


def _parts(audit: Audit) -> Iterator[RenderableType]:
    yield _documents(audit)
    yield _text(audit)
    yield _rows(audit) if audit.step is not None else _whole_sources(audit)
    yield _faults(audit)
    yield Text(_legend(audit), style="dim")
    for source in audit.sources:
        if source.sample is not None:
            yield Text(f"\n{source.name}", style="bold")
            yield Group(*(_example(example) for example in source.sample.examples))
    if audit.notes:
        yield Text("\nTraining would stop or refuse:", style="bold")
        yield from (Text(f"- {note}") for note in audit.notes)


def _documents(audit: Audit) -> Table:
    what = documents_or_pieces(audit)
    headings = ["records\nread", "bad", "too few\ncharacters", "too few\ntokens", f"{what}\nkept"]

    def cells(counters: Counters) -> list[str]:
        whole = filtered_documents(counters, audit.settings)
        return [
            _number(counters["records"]),
            _with_share(bad_records(counters), counters["records"]),
            _with_share(counters["char_filter_documents"], whole),
            _with_share(counters["token_filter_documents"], whole),
            _with_share(counters["kept_documents"], whole),
        ]

    return _table("Documents", headings, audit, cells)


def _text(audit: Audit) -> Table:
    headings = [
        "UTF-8\nbytes",
        "characters",
        "tokens\nseen",
        "tokens\nkept",
        "tokens\ntruncated",
        "padding\nof the rows",
    ]

    def cells(counters: Counters) -> list[str]:
        return [
            _number(counters["bytes"]),
            _number(counters["chars"]),
            _number(tokens_seen(counters)),
            _number(counters["kept_tokens"]),
            _with_share(counters["truncated_tokens"], counters["kept_tokens"]),
            _with_share(counters["padded_tokens"], None, padded_share(counters, audit)),
        ]

    return _table("Text and tokens", headings, audit, cells)


def _rows(audit: Audit) -> Table:
    headings = ["weight", "rows", "share\nof rows", "whole\nepochs", "shards\nread", "tokens\nkept"]
    rows = total(audit)["rows"]

    def cells(counters: Counters) -> list[str]:
        return [
            _number(counters["rows"]),
            _percent(share(counters["rows"], rows)),
            epochs_in_words(counters),
            _number(counters["shards"]),
            _number(counters["kept_tokens"]),
        ]

    return _mixture_table("Mixture", headings, audit, lambda source: cells(source.counters))


def _whole_sources(audit: Audit) -> Table:
    headings = [
        "weight",
        "files",
        "read\nwhole",
        "bytes",
        "tokens\nkept",
        "epochs\nof the run",
    ]

    def cells(source: SourceAudit) -> list[str]:
        sample = source.sample
        assert sample is not None
        return [
            _number(sample.num_shards),
            _number(source.counters["shards"]),
            _number(sample.num_bytes),
            _estimate(source),
            _epochs(sample.epochs),
        ]

    return _mixture_table("Whole sources, estimated", headings, audit, cells)


def _mixture_table(
    title: str, headings: list[str], audit: Audit, cells: Callable[[SourceAudit], list[str]]
) -> Table:
    of_paper = any(source.paper_billions is not None for source in audit.sources)
    table = _empty(title, headings + ["paper's\ntokens", "paper's\nshare"] * of_paper)
    whole = sum(TABLE_2.values())
    for source in audit.sources:
        billions = source.paper_billions
        known = ["", ""] if billions is None else [f"{billions:g} B", _percent(billions / whole)]
        table.add_row(source.name, _percent(source.weight), *cells(source), *known * of_paper)
    return table


def _faults(audit: Audit) -> RenderableType:
    names = ("bad_json", "bad_utf8", "bad_key", "repaired", "cut_chars", "damaged_shards")
    headings = [
        "not\nJSON",
        "not\nUTF-8",
        "no text",
        "texts\nrepaired",
        "characters\ncut",
        "damaged\nshards",
    ]
    if not any(source.counters[name] for source in audit.sources for name in names):
        return Text("Nothing bad, repaired, cut or damaged.\n")
    return _table(
        "Faults", headings, audit, lambda counters: [_number(counters[name]) for name in names]
    )


def _table(title: str, headings: list[str], audit: Audit, cells: Cells) -> Table:
    """Return a table with a row for each source, and one for all."""
    table = _empty(title, headings)
    for source in audit.sources:
        table.add_row(source.name, *cells(source.counters))
    if len(audit.sources) > 1:
        table.add_section()
        table.add_row("all", *cells(total(audit)))
    return table


def _empty(title: str, headings: list[str]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("source", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _legend(audit: Audit) -> str:
    settings = audit.settings
    lines = [
        f"Too few characters: fewer than data.min_chars {settings['data.min_chars']}; too few "
        f"tokens: fewer than data.min_tokens {settings['data.min_tokens']} with <s> and </s>.",
        "Tokens seen: of what has enough characters; the rest is never tokenised.",
    ]
    if settings["data.packing"] == "corenet":
        lines.append("data.packing is corenet: pieces of 2,048 words are filtered and kept.")
    if audit.step is not None:
        lines.append(
            "Counted up to the document in which each lane's next row begins; epochs are those of "
            "the lane with the fewest to the lane with the most."
        )
    else:
        samples = [source.sample for source in audit.sources if source.sample is not None]
        lines.append("Whole sources: as if all of it were like what was read.")
        if any(sample.kept_tokens is None for sample in samples):
            lines.append("Unknown: which share of a compressed file its first records are.")
    return "\n".join(lines)


def _example(example: Example) -> RenderableType:
    fate = "kept" if example.kind == "kept" else "bad" if "bad" in example.kind else "dropped"
    heading = Text(f"{fate}, {example.reason}: ", style="cyan")
    text = printable(" ".join(example.text.split())) or "(empty)"
    more = "..." if len(example.text) == EXAMPLE_CHARS else ""
    lines = Group(heading.append(example.place, style="dim"), Text(text + more, overflow="fold"))
    return Padding(lines, (0, 0, 0, 2))


def _number(count: int) -> str:
    """Return a count in full below a million, then with three digits."""
    if count == 0:
        return NOTHING
    if count < 1_000_000:
        return f"{count:,}"
    for unit in ("M", "B", "T"):
        count_of_unit = count / 10 ** {"M": 6, "B": 9, "T": 12}[unit]
        if count_of_unit < 999.5 or unit == "T":
            return f"{count_of_unit:.3g} {unit}"
    raise AssertionError


def _estimate(source: SourceAudit) -> str:
    """Return the kept tokens of a whole source, with no more digits than an estimate deserves."""
    assert source.sample is not None
    tokens = source.sample.kept_tokens
    if tokens is None:
        return "unknown"
    if source.counters["shards"] == source.sample.num_shards:
        return _number(tokens)
    return _number(_rounded(tokens))


def _epochs(epochs: float | None) -> str:
    if epochs is None:
        return "unknown"
    return (
        "<0.01" if epochs < 0.01 else f"{epochs:.2g}" if epochs < 10 else _number(_rounded(epochs))
    )


def _rounded(estimate: float) -> int:
    return int(float(f"{estimate:.2g}"))


def _percent(part: float) -> str:
    return f"{part:.1%}"


def _with_share(count: int, whole: int | None, part: float | None = None) -> str:
    if count == 0:
        return NOTHING
    if part is None:
        assert whole is not None
        part = share(count, whole)
    return f"{_number(count)} {_percent(part):>6}"
