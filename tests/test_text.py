"""From a record's text to what is tokenised: rules, pieces, filters, repair."""

import string
import sys
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from corpora import config, source, tokenizer, write
from hypothesis import given, settings
from hypothesis import strategies as st

from openelm_jax.config import DataConfig
from openelm_jax.data import line_files, normalization
from openelm_jax.data.manifest import list_manifest
from openelm_jax.data.normalization import has_normalised_chars, repair
from openelm_jax.data.readers import Part
from openelm_jax.data.text import (
    BadRecordLimit,
    TextRules,
    check_source,
    corenet_row,
    cut_long,
    encode_document,
    encode_piece,
    normalise,
    parse_record,
    passes_char_filter,
    pieces_of,
)
from openelm_jax.errors import UserError

RULES = TextRules.of(DataConfig(min_chars=3, min_tokens=0), row_length=9)
CORENET = replace(RULES, packing="corenet", char_filter="corenet", normalize="ftfy")
quick = settings(max_examples=300, deadline=None, derandomize=True)


@pytest.mark.parametrize(
    ("config", "filter_and_normalize"),
    [
        (DataConfig(), ("raw", "none")),
        (DataConfig(normalize="nfc"), ("raw", "nfc")),
        (DataConfig(char_filter="corenet"), ("corenet", "none")),
        (DataConfig(packing="corenet"), ("corenet", "ftfy")),
        (DataConfig(packing="corenet", char_filter="raw", normalize="none"), ("raw", "none")),
    ],
    ids=["concat", "concat-nfc", "concat-corenet", "corenet", "corenet-raw-none"],
)
def test_corenets_packing_brings_its_filter_and_repair_unless_they_are_named(
    config, filter_and_normalize
):
    if config.packing == "corenet":
        pytest.importorskip("ftfy")
    rules = TextRules.of(config, row_length=2049)
    assert (rules.char_filter, rules.normalize) == filter_and_normalize
    assert (rules.packing, rules.row_length) == (config.packing, 2049)
    assert (rules.min_chars, rules.min_tokens) == (200, 256)


def test_without_ftfy_its_rules_are_refused_with_the_extra_to_install(monkeypatch):
    normalization.import_ftfy.cache_clear()
    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(UserError, match=r"needs the package ftfy; run pip .* '\.\[corenet\]'"):
        TextRules.of(DataConfig(packing="corenet"), row_length=9)
    assert TextRules.of(DataConfig(packing="corenet", normalize="nfc"), 9).normalize == "nfc"


def test_a_document_is_one_piece_and_cut_at_the_most_characters():
    assert list(pieces_of(" a  b " * 3000, RULES)) == [" a  b " * 3000]
    assert cut_long("漢" * 7, replace(RULES, max_document_chars=7)) == "漢" * 7
    assert cut_long("漢" * 7, replace(RULES, max_document_chars=6)) == "漢" * 6
    assert RULES.max_document_chars == 50_000_000


@pytest.mark.parametrize("words", [0, 1, 2047, 2048, 2049, 4095, 4096, 4097, 9000])
@pytest.mark.parametrize("word", ["a", "", "b\n\tc", "\u00a0"])
def test_corenets_pieces_are_2048_of_what_single_spaces_divide(word, words):
    text = " ".join([word] * words) + " end"
    divided = text.split(" ")
    expected = [" ".join(divided[at : at + 2048]) for at in range(0, len(divided), 2048)]
    assert list(pieces_of(text, CORENET)) == expected


@pytest.mark.parametrize("text", ["", " ", " " * 2047, " " * 2048, "a" + " " * 4095, " " * 4096])
def test_empty_words_are_words_at_the_ends_as_well(text):
    divided = text.split(" ")
    expected = [" ".join(divided[at : at + 2048]) for at in range(0, len(divided), 2048)]
    assert list(pieces_of(text, CORENET)) == expected


def test_the_character_filter_counts_the_text_or_its_normalised_copy():
    assert passes_char_filter("...", RULES)
    assert not passes_char_filter("ab", RULES)
    assert not passes_char_filter("..a! \t\n ?B..", replace(CORENET, min_chars=4))
    assert passes_char_filter("..a! \t\n ?B..", replace(CORENET, min_chars=3))
    assert passes_char_filter("\u0130\u0130", replace(CORENET, min_chars=4))  # lower case is longer
    assert not passes_char_filter("\u3002" * 3, replace(CORENET, min_chars=4))
    assert passes_char_filter("\u3002" * 4, replace(CORENET, min_chars=4))  # no ASCII punctuation


@quick
@given(
    st.text(st.sampled_from("aB \t\n.!-\u00a0\u2028\x1c\u0130\u03a3漢\u3002"), max_size=60),
    st.integers(0, 40),
)
def test_a_long_beginning_decides_the_filter_as_the_whole_does(text, least):
    plain = "".join(c for c in text.lower() if c not in string.punctuation).split()
    length = sum(map(len, plain)) + max(0, len(plain) - 1)
    assert has_normalised_chars(text, least) == (length >= least)


# What ftfy repairs, and what decides whether it does.
BROKEN = (
    *("a", "line", " ", "\n", "\n\n", "\r\n", "\r", "\t", "\x0c", "\x00", "\x1b[31m", "\x7f"),
    *("<", "<p>", ">", "&", "&amp;", "&amp;amp;", "&lt;", "&eacute;", "&#39;", "& "),
    *("\u2019", "\u201cquoted\u201d", "\ufb01", "\uff21", "e\u0301", "\u00e9", "\u2028", "\x85"),
    *("\u00e2\u20ac\u2122", "\u00c3\u00a9", "\u00c3 la", "\u00e2\u0153\u201d", "\ufeff", "漢"),
    *("\x97", "\u00a0", "\U0001f600", "%&'", "~", "'", "$"),
)
broken_texts = st.lists(st.sampled_from(BROKEN) | st.text(max_size=4), max_size=40).map("".join)


@quick
@given(broken_texts)
def test_repairing_lines_by_themselves_is_ftfys_repair(text):
    ftfy = pytest.importorskip("ftfy")
    assert repair(text) == ftfy.fix_text(text, normalization="NFC")


@quick
@given(broken_texts, st.integers(1, 9))
def test_repair_cuts_long_lines_where_ftfy_does(text, most):
    ftfy = pytest.importorskip("ftfy")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(normalization, "SEGMENT_CHARS", most)
        repaired = repair(text)
    assert repaired == ftfy.fix_text(text, normalization="NFC", max_decode_length=most)


def test_ftfys_own_segments_have_the_length_that_repair_takes_them_to_have():
    ftfy = pytest.importorskip("ftfy")
    assert ftfy.TextFixerConfig().max_decode_length == normalization.SEGMENT_CHARS


def test_ftfy_is_asked_about_no_plain_line(monkeypatch):
    ftfy = pytest.importorskip("ftfy")
    asked, fix_text = [], ftfy.fix_text
    monkeypatch.setattr(ftfy, "fix_text", lambda t, **kw: (asked.append(t), fix_text(t, **kw))[1])
    assert repair("plain\n\u2018a\u2019 & b\nplain <br>\nc &amp; d\n") == (
        "plain\n'a' & b\nplain <br>\nc &amp; d\n"
    )
    assert asked == ["\u2018a\u2019 & b\n"]


def test_a_text_is_normalised_before_it_is_framed_and_tokenised():
    text = "e\u0301 \ufb01 &amp;"
    changed = {"none": text, "nfc": "\u00e9 \ufb01 &amp;", "ftfy": "\u00e9 fi &"}
    for name, expected in changed.items():
        if name == "ftfy":
            pytest.importorskip("ftfy")
        rules = replace(RULES, normalize=name)
        assert normalise(text, rules) == expected
        framed = [1, *tokenizer().encode(expected).tolist(), 2]
        tokens = np.concatenate(list(encode_piece(text, tokenizer(), rules)))
        assert tokens.dtype == np.int32
        assert tokens.tolist() == framed
        assert encode_document(expected, tokenizer()).tolist() == framed


def test_a_piece_is_tokenised_only_as_far_as_it_is_taken():
    text = "The state of the union. " * 4000
    parts = encode_piece(text, tokenizer(), RULES)
    first = next(parts)
    whole = encode_document(text, tokenizer())
    assert first[0] == whole[0] == 1
    assert len(first) < len(whole) / 4
    assert np.array_equal(first, whole[: len(first)])


def listed(tmp_path):
    """Return the one source below a folder, and its shards."""
    found = list_manifest(config(tmp_path, source("web", files=("*",)))).sources[0]
    return found, found.shards


def test_a_wrong_text_key_is_named_though_a_record_holds_half_a_surrogate_pair(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "\\ud800", "id": 1}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:1 .* no field 'text' but 'content', 'id'; set"):
        check_source(*listed(tmp_path))


def test_records_that_are_all_missing_are_refused_with_the_key_to_set(tmp_path):
    nulls = pyarrow.table({"text": pyarrow.array([None, None], pyarrow.string())})
    pyarrow.parquet.write_table(nulls, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"row 0 .* under the text_key: null\); set .*text_key, or"):
        check_source(*listed(tmp_path))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (rb'{"text": "a\ud83d\ude00"}', ("a\U0001f600", None)),
        (rb'{"text": "a\ud83d"}', ("a\ufffd", "repaired")),
        (rb'{"text": "a", "title": "\ud83d"}', ("a", None)),
        (rb'{"text": "a", "score": NaN}', ("a", None)),
        (rb'{"title": "\ud83d"}', (None, "bad_key")),
        (b'{"text": "a\xff"}', (None, "bad_utf8")),
        (b'{"text": "a"', (None, "bad_json")),
    ],
    ids=str,
)
def test_only_half_a_surrogate_pair_in_the_text_is_a_repair(tmp_path, line, expected):
    write(tmp_path / "a.jsonl", ["x"])
    assert parse_record(line, listed(tmp_path)[1][0], "text") == expected


def test_records_of_array_record_files_are_json(tmp_path):
    write(tmp_path / "a.jsonl", ["x"])
    shard = replace(listed(tmp_path)[1][0], format="array_record")
    assert parse_record(b'{"text": "a\\n"}', shard, "text") == ("a\n", None)
    assert parse_record(b'{"content": "a"}', shard, "text") == (None, "bad_key")
    assert parse_record(None, shard, "text") == (None, "bad_key")


def test_a_bad_record_of_a_part_is_named_by_its_line_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(line_files, "RANGE_BYTES", 1)  # the second part begins with the third line
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 3 + "{}\n")
    shard = listed(tmp_path)[1][0]
    limit = BadRecordLimit("web", 0.4)
    limit.count(shard, 0, b'{"text": "a"}', None, Part(1, 2))
    limit.count(shard, 1, b"{}", "bad_key", Part(1, 2))
    with pytest.raises(
        UserError, match=r"web: 1 of 2 records are bad, the last at .*a\.jsonl:4 \("
    ):
        limit.end_first_pass()


def test_an_excerpt_of_a_bad_record_gives_a_terminal_nothing_to_obey(tmp_path):
    record = b"\x1b[2J\x00\x07\r\xff\xc2\x9b\xe2\x80\xa8 na\xc3\xafve"
    (tmp_path / "a.jsonl").write_bytes(record + b"\n")
    with pytest.raises(UserError) as refusal:
        check_source(*listed(tmp_path))
    said = str(refusal.value)
    assert said.isprintable()
    assert "(not UTF-8: \\x1b[2J\\x00\\x07\\r\ufffd\\x9b\\u2028 naïve)" in said


def test_corenets_row_is_cut_or_filled_and_says_by_how_much():
    tokens = np.array([1, 7, 8, 2], dtype=np.int32)
    for length, row, truncated, padded in (
        (3, [1, 7, 8], 1, 0),
        (4, [1, 7, 8, 2], 0, 0),
        (6, [1, 7, 8, 2, 99, 99], 0, 2),
    ):
        made = corenet_row(tokens, length, pad_id=99)
        assert (made[0].tolist(), made[1], made[2]) == (row, truncated, padded)
        assert made[0].dtype == np.int32
