"""What .parquet and .array_record hold besides plain texts."""

from __future__ import annotations

import json
import struct
import sys

import pyarrow
import pyarrow.parquet
import pytest
from corpora import documents
from shard_files import make_shard, shard_of, texts_of, write_array_record

from openelm_jax.data.readers import Part, read_blocks
from openelm_jax.data.text import parse_record
from openelm_jax.errors import UserError


def test_parquet_strings_may_be_dictionary_encoded_or_missing(tmp_path):
    path = tmp_path / "a.parquet"
    column = pyarrow.array(["x", None, "y", "x"]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    shard = shard_of(path)
    assert [r for b in read_blocks(shard, "text", 1) for r in b.records] == [b"x", None, b"y", b"x"]


def test_a_parquet_may_hold_empty_row_groups_or_none(tmp_path):
    path = tmp_path / "a.parquet"
    schema = pyarrow.schema({"text": pyarrow.string()})
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for texts in ([], ["a", "b"], [], [], ["c"], []):
            writer.write_table(pyarrow.table({"text": texts}, schema=schema))
    assert pyarrow.parquet.ParquetFile(path).num_row_groups == 6
    assert texts_of(shard_of(path), 1000) == ["a", "b", "c"]
    assert [texts_of(shard_of(path), 9, Part(n, 3)) for n in range(3)] == [["a", "b"], [], ["c"]]
    pyarrow.parquet.write_table(pyarrow.table({"text": []}, schema=schema), path)
    assert texts_of(shard_of(path), 1000) == []


def test_a_parquet_without_a_text_column_names_the_columns(tmp_path):
    shard = make_shard(tmp_path, "parquet", documents(2))
    with pytest.raises(UserError, match="no column 'content' but id, text; set the source's"):
        list(read_blocks(shard, "content", 100))
    with pytest.raises(UserError, match="column 'id' holds int64, not text"):
        list(read_blocks(shard, "id", 100))


def example(features):
    """Return a tf.train.Example: field numbers as in tensorflow/core/example/*.proto.

    A value is text (bytes_list), whole numbers (int64_list) or others (float_list).
    """

    def field(number, payload):
        size, varint = len(payload), b""
        while size > 127:
            varint += bytes([size & 127 | 128])
            size >>= 7
        return bytes([number << 3 | 2]) + varint + bytes([size]) + payload

    entries = b""
    for key, values in features.items():
        if isinstance(values[0], bytes):
            feature = field(1, b"".join(field(1, value) for value in values))
        elif isinstance(values[0], float):
            feature = field(2, field(1, struct.pack(f"<{len(values)}f", *values)))
        else:
            feature = field(3, field(1, bytes(values)))
        entries += field(1, field(1, key.encode()) + field(2, feature))
    return field(1, entries)


def test_the_examples_of_the_tests_are_what_protocol_buffers_write():
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    # The messages of tensorflow/core/example, declared here.
    repeated, optional = 3, 1
    int64, string, group, data, float32 = 3, 9, 11, 12, 2
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")

    def declare(name, *fields):
        message = file.message_type.add(name=name)
        for number, (field, label, kind, type_name) in enumerate(fields, start=1):
            message.field.add(
                name=field, number=number, label=label, type=kind, type_name=type_name
            )
        return message

    declare("Bytes", ("value", repeated, data, None))
    declare("Floats", ("value", repeated, float32, None))
    declare("Ints", ("value", repeated, int64, None))
    declare(
        "Feature",
        ("bytes_list", optional, group, ".t.Bytes"),
        ("float_list", optional, group, ".t.Floats"),
        ("int64_list", optional, group, ".t.Ints"),
    )
    features = declare("Features", ("feature", repeated, group, ".t.Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=optional, type=string)
    entry.field.add(name="value", number=2, label=optional, type=group, type_name=".t.Feature")
    declare("Example", ("features", optional, group, ".t.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))()
    feature = message.features.feature
    feature["text"].bytes_list.value.append(b"peace " * 50)
    feature["score"].float_list.value.extend([1.5, 2.0])
    feature["ids"].int64_list.value.extend([3, 4])
    written = example({"text": [b"peace " * 50], "score": [1.5, 2.0], "ids": [3, 4]})
    parsed = type(message)()
    parsed.ParseFromString(written)
    assert parsed == message


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (b'{"text": "a"}', ("a", None)),
        (example({"id": [7], "text": [b"one\ntwo"], "score": [0.5]}), ("one\ntwo", None)),
        (
            example({"text": ["na\u00efve \u2014 ".encode() * 300]}),
            ("na\u00efve \u2014 " * 300, None),
        ),
        (example({"text": [b""]}), ("", None)),
        (example({"body": [b"a"]}), (None, "bad_key")),
        (example({"text": [b"a", b"b"]}), (None, "bad_key")),
        (example({"text": [3]}), (None, "bad_key")),
        (example({"text": [b"\xff"]}), (None, "bad_utf8")),
        (example({"text": [b"abc"]})[:-1], (None, "bad_json")),
        (b"", (None, "bad_key")),
        (b"plain text", (None, "bad_json")),
    ],
)
def test_an_array_record_holds_json_or_examples(tmp_path, record, expected):
    path = tmp_path / "a.array_record"
    write_array_record(path, [record, b'{"text": "next"}'])
    shard = shard_of(path)
    read = [r for b in read_blocks(shard, "text", 1 << 20) for r in b.records]
    assert [parse_record(r, shard, "text") for r in read] == [expected, ("next", None)]


def test_an_array_record_may_be_written_in_groups_or_be_empty(tmp_path):
    path = tmp_path / "a.array_record"
    texts = documents(50)
    write_array_record(
        path, [json.dumps({"text": text}).encode() for text in texts], "group_size:7"
    )
    assert texts_of(shard_of(path), 700) == texts
    write_array_record(path, [])
    assert texts_of(shard_of(path), 700) == []


def test_an_array_record_without_its_package_says_what_to_do(tmp_path, monkeypatch):
    shard = make_shard(tmp_path, "array_record", documents(2))
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    with pytest.raises(UserError, match=r"a\.array_record: .* need the package array_record"):
        list(read_blocks(shard, "text", 100))
