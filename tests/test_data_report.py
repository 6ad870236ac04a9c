"""What a mixture holds, counted before a run and after it: tests of audits, tables and command."""

from __future__ import annotations

import gzip
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from corpora import config, documents, source, tokenizer, write, write_shards
from rich.console import Console
from small_runs import read_metrics, write_corpus

from openelm_jax import data_report
from openelm_jax.command_line import run as run_verb
from openelm_jax.data import line_files
from openelm_jax.data.audit import (
    TABLE_2,
    Audit,
    SourceAudit,
    audit_position,
    summary_lines,
    to_json,
    total,
)
from openelm_jax.data.audit_tables import print_audit
from openelm_jax.data.pipeline import Position, open_data
from openelm_jax.data.sample import sample_mixture

EVERYTHING = 10_000


def sample(settings, num_records=EVERYTHING, *, row_length=9, batch=1, steps=10) -> Audit:
    return sample_mixture(
        settings,
        tokenizer(),
        row_length=row_length,
        global_batch_size=batch,
        steps=steps,
        num_records=num_records,
    )


def counters_of(audit: Audit) -> dict[str, int]:
    """Return the counters of the only source that are not nothing."""
    (only,) = audit.sources
    return {name: value for name, value in only.counters.items() if value}


def length(text: str) -> int:
    return len(tokenizer().encode(text)) + 2


def printed(audit: Audit) -> str:
    console = Console(width=100, highlight=False)
    with console.capture() as captured:
        print_audit(audit, console)
    return captured.get()


# --- Samples.


def test_each_record_is_counted_where_it_belongs(tmp_path):
    kept = "the people of the nation and the peace of the union " * 3
    few_tokens, few_chars, half_pair = "x" * 60, "na\u00efve", "y" * 200
    lines = [
        *(json.dumps({"text": text}).encode() for text in (kept, few_tokens, few_chars)),
        b'{"text": "\\ud83d' + half_pair.encode() + b'"}',
        b"{",
        b'{"text": "\xff"}',
        b'{"body": "no text"}',
    ]
    path = tmp_path / "web" / "a.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"\n".join(lines) + b"\n")
    min_tokens = length(few_tokens) + 1
    assert length(kept) < min_tokens <= length("\ufffd" + half_pair)
    kept += kept * (min_tokens // length(kept))
    path.write_bytes(path.read_bytes().replace(lines[0], json.dumps({"text": kept}).encode()))

    audit = sample(config(tmp_path, source("web"), min_chars=50, min_tokens=min_tokens))

    texts = [kept, few_tokens, few_chars, "\ufffd" + half_pair]
    assert counters_of(audit) == {
        "records": 7,
        "bytes": sum(len(text.encode()) for text in texts),
        "chars": sum(map(len, texts)),
        "char_filter_documents": 1,
        "char_filter_chars": 5,
        "token_filter_documents": 1,
        "token_filter_tokens": min_tokens - 1,
        "kept_documents": 2,
        "kept_tokens": length(kept) + length("\ufffd" + half_pair),
        "bad_json": 1,
        "bad_utf8": 1,
        "bad_key": 1,
        "repaired": 1,
        "shards": 1,
    }
    assert [
        (e.kind, e.place.removeprefix(f"{path}:")) for e in audit.sources[0].sample.examples
    ] == [
        ("kept", "1"),
        ("kept", "4"),
        ("char_filter", "3"),
        ("token_filter", "2"),
        ("bad_json", "5"),
        ("bad_utf8", "6"),
        ("bad_key", "7"),
    ]


@pytest.mark.parametrize("packing", ["concat", "corenet"])
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "array_record"])
def test_a_sample_of_everything_is_what_a_run_counts_in_an_epoch(tmp_path, ending, packing):
    write_shards(tmp_path / "web", documents(30, seed=5), ending, 3)
    filters = {"min_chars": 150, "min_tokens": 90, "packing": packing, "normalize": "none"}
    if packing == "corenet":
        filters["row_length"] = 129
    row_length = filters.pop("row_length", 9)

    def after_an_epoch(seed):
        settings = config(tmp_path, source("web"), seed=seed, **filters)
        data = open_data(settings, tokenizer(), row_length=row_length, global_batch_size=1)
        counters = data.counters(data.get_state())["web"]
        while counters["records"] < 30:
            counters = data.counters(next(data)[1])["web"]
        return settings, counters

    # Of a seed that puts a document that is kept first in the second epoch.
    settings, counters = next(
        found for found in map(after_an_epoch, range(20)) if found[1]["records"] == 30
    )
    assert min(counters[f"{name}_documents"] for name in ("kept", "char_filter", "token_filter"))
    audit = sample(settings, row_length=row_length)
    of_runs = ("rows", "shards", "least_epochs", "most_epochs")
    expected = {name: value for name, value in counters.items() if name not in of_runs}
    assert audit.sources[0].counters == expected | {"shards": 3}


def test_a_sample_has_at_most_the_documents_asked_for_from_as_many_shards_as_can_be(tmp_path):
    write_shards(tmp_path / "web", documents(80), "jsonl", 8)
    audit = sample(config(tmp_path, source("web")), 8)
    assert audit.sources[0].counters["records"] == 8
    first, second = (example.place for example in audit.sources[0].sample.examples)
    assert first.endswith(".jsonl:1")
    assert second.endswith(".jsonl:1")
    assert first != second
    again = sample(config(tmp_path, source("web")), 8)
    assert again == audit
    other_seed = sample(config(tmp_path, source("web"), seed=1), 8)
    assert other_seed.sources[0].sample.examples != audit.sources[0].sample.examples


def test_more_shards_than_are_read_at_once_are_all_read_when_all_is_asked_for(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("openelm_jax.data.sample.MOST_PLACES", 2)
    texts = documents(20)
    write_shards(tmp_path / "web", texts, "jsonl.gz", 5)
    counters = counters_of(sample(config(tmp_path, source("web"))))
    assert counters["chars"] == sum(map(len, texts))
    assert counters["shards"] == 5


def test_ranges_of_a_large_file_give_each_record_once_and_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(line_files, "RANGE_BYTES", 500)
    texts = documents(90)
    write(tmp_path / "web" / "a.jsonl", texts)
    settings = config(tmp_path, source("web"))
    assert sample(settings).sources[0].counters["chars"] == sum(map(len, texts))
    for example in sample(settings, 40).sources[0].sample.examples:
        line = int(example.place.rpartition(":")[2])
        assert line > 1
        assert example.text == texts[line - 1][:200]


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "array_record", "txt"])
def test_like_documents_make_an_exact_estimate_of_the_whole_source(tmp_path, ending):
    text = "the people of the nation"
    for number in range(25 if ending == "txt" else 5):
        write(tmp_path / "web" / f"{number}.{ending}", [text] * (1 if ending == "txt" else 5))
    settings = config(tmp_path, source("web", weight=1), source("b", files=("web/*",), weight=3))
    audit = sample(settings, 10, row_length=9, batch=16, steps=5)
    web = audit.sources[0].sample
    assert web.kept_tokens == 25 * length(text)
    assert audit.sources[0].weight == 0.25
    assert web.epochs == pytest.approx(5 * 16 * 8 * 0.25 / web.kept_tokens)
    assert (web.num_shards, web.num_bytes) == (
        len(list((tmp_path / "web").iterdir())),
        sum(path.stat().st_size for path in (tmp_path / "web").iterdir()),
    )


def test_of_compressed_files_nothing_is_estimated_until_all_is_read(tmp_path):
    texts = documents(20)
    write_shards(tmp_path / "web", texts, "jsonl.gz", 2)
    settings = config(tmp_path, source("web"))
    assert sample(settings, 19).sources[0].sample.kept_tokens is None
    assert sample(settings, 20).sources[0].sample.kept_tokens == sum(map(length, texts))


def test_what_would_stop_a_run_is_told_and_stops_no_sample(tmp_path):
    whole = gzip.compress("".join(f'{{"text": "{n} peace"}}\n' for n in range(999)).encode())
    for name, data in {
        "cut/a.jsonl.gz": whole[: len(whole) // 2],
        "bad/a.jsonl": b'{"text": "peace and union"}\n{\n{\n',
        "short/a.jsonl": b'{"text": "a"}\n',
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(data)
    sources = [source("cut"), source("bad"), source("short")]
    audit = sample(config(tmp_path, *sources, min_chars=2))
    cut, bad, short = audit.sources
    assert (cut.counters["damaged_shards"], bad.counters["bad_json"]) == (1, 2)
    assert short.counters["char_filter_documents"] == 1
    notes = "\n".join(audit.notes)
    assert f"{tmp_path}/cut/a.jsonl.gz: the file cannot be read as jsonl.gz" in notes
    assert "data.sources bad: 2 of 3 records are bad" in notes
    assert "data.sources short: nothing is kept" in notes
    assert len(set(audit.notes)) == len(audit.notes)
    for note in audit.notes:
        assert " ".join(note.split()) in " ".join(printed(audit).split())

    write_shards(tmp_path / "web", documents(3), "jsonl", 1)
    crowded = sample(config(tmp_path, source("web"), lanes=4), batch=4)
    assert "4 lanes leave some without a record" in crowded.notes[0]


def test_a_record_of_any_bytes_is_shown_with_nothing_for_the_terminal_to_obey(tmp_path):
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "a.jsonl").write_bytes(b'{"text": "some"}\n\x1b[2J\x00\n')
    shown = printed(sample(config(tmp_path, source("web")), num_records=9))
    assert "\\x1b[2J\\x00" in shown
    assert shown.replace("\n", "").isprintable()


# --- Runs.


def test_a_run_continued_many_times_reports_what_the_uninterrupted_one_does(tmp_path):
    write_shards(tmp_path / "web", documents(24, seed=1), "jsonl", 3)
    write_shards(tmp_path / "pile", documents(9, seed=2), "jsonl.gz", 2)
    settings = config(
        tmp_path,
        source("web", weight=3),
        source("pile"),
        min_chars=60,
        min_tokens=40,
        lanes=2,
    )

    def opened():
        return open_data(settings, tokenizer(), row_length=65, global_batch_size=4)

    data = opened()
    for _ in range(30):
        _, expected = next(data)
    position = opened().get_state()
    for start, stop in pairwise([0, 1, 4, 11, 12, 29, 30]):
        again = opened()
        again.set_state(Position.from_json(json.loads(json.dumps(position.to_json()))))
        for _ in range(start, stop):
            _, position = next(again)
    report = to_json(audit_position(position))
    assert report == to_json(audit_position(expected))

    assert report["step"] == 30
    assert report["settings"]["data.min_tokens"] == 40
    web, pile = (report["sources"][name] for name in ("web", "pile"))
    assert web["weight"] == 0.75
    assert web["shares"]["rows"] == pytest.approx(0.75, abs=1 / 120)
    assert web["counters"]["rows"] + pile["counters"]["rows"] == 120
    assert web["table_2"] is None
    assert pile["table_2"] == {"billion_tokens": 207, "share": pytest.approx(207 / 1784.3)}
    kept, dropped = web["shares"]["kept"], web["shares"]["char_filter"]
    assert kept + dropped + web["shares"]["token_filter"] == pytest.approx(1)


def test_the_shares_of_corenets_rows_are_of_pieces_and_of_the_row(tmp_path):
    words = "peace " * 2047 + "union "
    write(tmp_path / "web" / "a.jsonl", [words * 2 + "a b c"])
    settings = config(tmp_path, source("web"), packing="corenet", normalize="none", min_tokens=100)
    row_length = 4 * length(words) // 3
    audit = sample(settings, row_length=row_length)
    tokens = length("peace " * 2047 + "union")
    shares = to_json(audit)["sources"]["web"]["shares"]
    assert shares["kept"] == pytest.approx(2 / 3)
    assert shares["token_filter"] == pytest.approx(1 / 3)
    assert shares["padded"] == pytest.approx((row_length - tokens) / row_length)
    assert "2 of 3 pieces read through kept" in summary_lines_of(audit)


def summary_lines_of(audit: Audit) -> str:
    """Return the lines as if a run had read what was sampled."""
    sources = (
        SourceAudit(
            name=s.name,
            weight=s.weight,
            counters=s.counters | {"least_epochs": 0, "most_epochs": 1},
        )
        for s in audit.sources
    )
    return "\n".join(summary_lines(Audit(settings=audit.settings, sources=tuple(sources), step=1)))


def test_thirteen_sources_of_the_papers_size_fit_into_100_columns(tmp_path):
    write(tmp_path / "web" / "a.jsonl", documents(2))
    one = sample(config(tmp_path, source("web"))).sources[0]
    large = dict.fromkeys(one.counters, 123_456_789_012) | {"rows": 999_950_000}
    large |= {"least_epochs": 0, "most_epochs": 12}
    sources = tuple(SourceAudit(name=name, weight=1 / 13, counters=large) for name in TABLE_2)
    settings = sample(config(tmp_path, source("web"))).settings
    lines = printed(Audit(settings=settings, sources=sources, step=7)).splitlines()
    assert max(map(len, lines)) <= 100
    assert not any("\u2026" in line for line in lines)  # nothing is cut
    row = next(line for line in lines if "refinedweb" in line and "665 B" in line)
    assert row.split()[-3:] == ["665", "B", "37.3%"]
    assert "1 B" in row  # rows, not "1e+03 M"
    assert next(line for line in lines if line.startswith(" all")).split()[1:3] == ["1.6", "T"]
    assert total(Audit(settings=settings, sources=sources))["most_epochs"] == 12


# --- The command.


@pytest.fixture
def report(capsys):
    """Return report(*arguments, code=0): what the verb prints, on stdout or of its mistakes."""

    def call(*arguments: str | Path, code: int = 0) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run_verb(data_report.main, [str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert end.value.code == code, err
        return err if code else out

    return call


def test_a_run_is_reported_at_any_of_its_steps(tmp_path, train_here, report):
    run = tmp_path / "run"
    said = train_here(write_corpus(tmp_path / "corpus"), run)
    figures = {line["step"]: line for line in read_metrics(run) if "data/text/rows" in line}
    for where, step in ((run, 16), (f"{run}@12", 12)):
        found = json.loads(report("--run", where, "--json"))
        assert (found["of"], found["step"]) == (f"{run} at step {step}", step)
        logged = {
            name.removeprefix("data/text/"): value
            for name, value in figures[step].items()
            if name.startswith("data/text/")
        }
        assert found["sources"]["text"]["counters"] == logged
    kept, tokens = (figures[16][f"data/text/kept_{name}"] for name in ("documents", "tokens"))
    records = figures[16]["data/text/records"]
    assert f"\ntext: {kept} of {records} documents read through kept, {tokens:,} tokens, " in said
    table = report("--run", run)
    assert table.startswith(f"{run} at step 16\n")
    assert re.search(rf"text +{records} +- .*{kept} +\d+\.\d%", table)
    assert re.search(r"text +100\.0% +64 +100\.0%", table)  # weight, rows, share of rows

    assert "holds no step 5; it has 6, 12, 16" in report("--run", f"{run}@5", code=1)
    (run / "checkpoints" / "000016" / "data" / "metadata").write_text("{}")
    assert "000016: data/metadata is damaged" in report("--run", run, code=1)


def test_what_cannot_be_reported_is_one_sentence(tmp_path, report):
    nothing = tmp_path / "nothing"
    assert f"--run {nothing}: it is not there; give" in report("--run", nothing, code=1)
    assert "it holds no run (no experiment.json)" in report("--run", tmp_path, code=1)
    (tmp_path / "experiment.json").write_text("{}")
    assert "holds no finished checkpoint yet" in report("--run", tmp_path, code=1)
    named = ("--exp", "3b", "--tokenizer", tmp_path / "no.model")
    assert "no.model: there is no such file" in report(*named, code=1)
    assert "give a SentencePiece model with --tokenizer FILE" in report("--exp", "3b", code=1)
    (tmp_path / "t.model").write_bytes(tokenizer().model_bytes)
    unplaced = report("--exp", "3b", "--tokenizer", tmp_path / "t.model", code=1)
    assert "data.root is not set" in unplaced
    assert len(unplaced.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "give --run RUN, or --exp NAME"),
        (("--exp", "tiny", "--run", "runs/tiny"), "give --run or --exp, not both"),
        (("--run", "runs/tiny", "--sample", "5"), "go with --exp"),
        (("--exp", "tiny", "--sample", "0"), "0 is not above 0"),
        (("--exp", "tiny", "--data.rot", "x"), "did you mean --data.root"),
    ],
)
def test_flags_that_do_not_fit_are_refused(report, arguments, complaint):
    assert complaint in report(*arguments, code=2)


def test_a_mixture_is_looked_at_with_the_tokenizer_that_a_run_would_train(tmp_path, report, capsys):
    write_corpus(tmp_path)
    small = tmp_path / "small.py"
    trained = ("--tokenizer.path", "None", "--tokenizer.vocab-size", "300")
    texts = documents(10, seed=1, words=(10, 60))
    with pytest.raises(SystemExit):
        run_verb(data_report.main, ["--exp", str(small), *trained, "--json"])
    out, said = capsys.readouterr()
    assert said == (
        "tokenizer: 300 pieces, trained now on the training text as a run would do, and not kept\n"
    )
    found = json.loads(out)
    assert found["sources"]["text"]["counters"]["chars"] == sum(map(len, texts))
    table = report("--exp", small, "--sample", "4")
    assert table.startswith("experiment small: at most 4 documents of each source\n")
    assert table.count("kept, ") == 2
    assert "train/00.jsonl:1" in table
