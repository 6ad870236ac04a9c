"""Small corpora for the data tests: seeded random words, written in every format."""

from __future__ import annotations

import functools
import gzip
import json
import random
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import zstandard

from openelm_jax.config import DataConfig, SourceConfig
from openelm_jax.tokenizer import Tokenizer, train_tokenizer

WORDS = (
    *("state", "union", "peace", "of", "the", "and", "a", "year", "congress", "people", "nation"),
    *("law", "treaty", "revenue", "army", "navy", "public", "debt", "commerce", "river", "bank"),
    *("war", "labour", "1790", "schools", "\u2014", "\u201cliberty\u201d", "na\u00efve"),
)

FRAGMENTS = (
    *WORDS,
    *(" ", "  ", "   ", " " * 17, "\t", "\n", "\n\n", "\r\n", "\x00", "\x1f", "\x7f"),
    *("\u2581", "\u2581\u2581", " \u2581", "\u2581 ", "\u00a0", "\u3000", "\u200b", "\u2028"),
    *("\U0001f600", "\U0001f468\u200d\U0001f469", "漢字", "かな", "العربية", "e\u0301", "\u00ad"),
    *("<s>", "</s>", "<unk>", "<0x0A>", "1790", ".", ",", "a", "I", "def f(x):", "http://a.b/c"),
)
"""What tokenizers stumble over."""


def documents(count: int, seed: int = 0, words: tuple[int, int] = (5, 120)) -> list[str]:
    """Return `count` texts, all different, of `words` words each."""
    rng = random.Random(seed)
    return [
        f"{seed}/{index} " + " ".join(rng.choices(WORDS, k=rng.randint(*words)))
        for index in range(count)
    ]


@functools.cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return train_tokenizer(documents(200), 380, Path(folder) / "tokenizer.model")


def write(path: Path, texts: list[str], key: str = "text") -> None:
    """Write one shard in the format of its name; Parquet in row groups of five, one .txt."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        table = pyarrow.table({"id": list(range(len(texts))), key: texts})
        pyarrow.parquet.write_table(table, path, row_group_size=5)
        return
    if path.suffix == ".array_record":
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(path), "group_size:1")
        for number, text in enumerate(texts):
            writer.write(json.dumps({"id": number, key: text}).encode())
        writer.close()
        return
    if path.suffix == ".txt":
        path.write_text("\n".join(texts))
        return
    lines = "".join(json.dumps({"id": n, key: text}) + "\n" for n, text in enumerate(texts))
    data = lines.encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    elif path.suffix == ".zst":
        data = zstandard.compress(data)
    path.write_bytes(data)


def write_shards(folder: Path, texts: list[str], ending: str, shards: int) -> None:
    for shard in range(shards):
        write(folder / f"{shard:02}.{ending}", texts[shard::shards])


def source(name: str, **changes) -> SourceConfig:
    return SourceConfig(name=name, **{"files": (f"{name}/*",), **changes})


def config(root: Path, *sources: SourceConfig, **changes) -> DataConfig:
    """Return a configuration without filters."""
    defaults = {"min_chars": 0, "min_tokens": 0, "lanes": 1}
    return DataConfig(root=str(root), sources=sources, **{**defaults, **changes})
