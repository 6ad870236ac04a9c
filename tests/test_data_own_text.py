"""The printed commands for one's own text work for a folder of any of their formats."""

import re
import shlex
from pathlib import Path

import pytest
from corpora import documents, tokenizer, write

from openelm_jax import train
from openelm_jax.command_line import parse
from openelm_jax.data.manifest import ENDINGS, list_manifest
from openelm_jax.data.pipeline import open_data, training_texts

ROOT = Path(__file__).parent.parent


def experiment_of(page, heading):
    """Return what the first command below a heading would train."""
    own_text = (ROOT / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    command = re.search(r"```sh\npython -m openelm_jax\.train (.*?)```", own_text, re.DOTALL)
    arguments = shlex.split(command[1].replace("\\\n", " "))
    return parse("train", train.PURPOSE, train.EXAMPLES, train._add_flags, arguments)[1]


@pytest.mark.parametrize(
    "names",
    [
        ("a.jsonl",),
        ("a.jsonl.gz",),
        ("a.jsonl.zst",),
        ("folder/a.parquet",),
        ("folder/a.txt",),
        ("a.jsonl", "folder/b.jsonl.gz", "folder/deep/c.parquet", "d.txt"),
    ],
)
def test_the_printed_command_reads_a_document_of_each_file(tmp_path, monkeypatch, names):
    monkeypatch.chdir(tmp_path)
    texts = documents(len(names), words=(300, 400))
    for name, text in zip(names, texts, strict=True):
        write(Path("my-texts", name), [text])
    experiment = experiment_of("README.md", "Your own text")
    assert sorted(training_texts(experiment.data)) == sorted(texts)
    data = open_data(experiment.data, tokenizer(), row_length=129, global_batch_size=8)
    _, position = next(data)
    assert data.counters(position).keys() == {"mine"}


def test_the_command_of_the_data_page_reads_every_known_ending(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my-texts", "deep").mkdir(parents=True)
    for ending in ENDINGS:
        Path("my-texts", "deep", f"a{ending}").write_bytes(b"x")
    experiment = experiment_of("docs/data.md", "Training on your own folder")
    (listed,) = list_manifest(experiment.data).sources
    assert {shard.name for shard in listed.shards} == {f"deep/a{ending}" for ending in ENDINGS}
