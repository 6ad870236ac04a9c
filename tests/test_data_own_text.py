"""The README's command for one's own text works for a folder of any of its formats."""

import re
import shlex
from pathlib import Path

import pytest
from corpora import documents, tokenizer, write

from openelm_jax import train
from openelm_jax.command_line import parse
from openelm_jax.data.pipeline import open_data, training_texts

README = Path(__file__).parent.parent / "README.md"


def experiment_of_the_readme():
    own_text = README.read_text(encoding="utf-8").partition("\n## Your own text\n")[2]
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
    experiment = experiment_of_the_readme()
    assert sorted(training_texts(experiment.data)) == sorted(texts)
    data = open_data(experiment.data, tokenizer(), row_length=129, global_batch_size=8)
    _, position = next(data)
    assert data.counters(position).keys() == {"mine"}
