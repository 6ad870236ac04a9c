"""The mixtures are Table 2 and the published folders, down to the names of the files."""

from pathlib import Path

import pytest

from openelm_jax.command_line import parse
from openelm_jax.config import DataConfig
from openelm_jax.data.manifest import list_manifest
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import load_experiment
from openelm_jax.mixtures import dclm, fineweb_edu, openelm

# The paper's Table 2, in billions of tokens.
TABLE_2 = {
    "refinedweb": 665,
    "redpajama-github": 59,
    "redpajama-book": 26,
    "redpajama-arxiv": 28,
    "redpajama-wikipedia": 24,
    "redpajama-stackexchange": 20,
    "redpajama-c4": 175,
    "pile": 207,
    "dolma-stack": 411,
    "dolma-reddit": 89,
    "dolma-pes2o": 70,
    "dolma-books": 6,
    "dolma-wiki": 4.3,
}

# CoreNet's recipe: file name with its number, how many there are, field of the text.
CORENET = {
    "refinedweb": ("refinedweb/refinedweb-{:05d}-of-05534.parquet", 5535, "content"),
    "redpajama-arxiv": ("redpajama/arxiv/arxiv-{:05d}-00099.jsonl", 100, "text"),
    "redpajama-book": ("redpajama/book/book-{:05d}-00001.jsonl", 1, "text"),
    "redpajama-github": ("redpajama/github/github-{:05d}-00098.jsonl", 98, "text"),
    "redpajama-stackexchange": (
        "redpajama/stackexchange/stackexchange-{:05d}-00001.jsonl",
        1,
        "text",
    ),
    "redpajama-wikipedia": ("redpajama/wikipedia/wiki-{:05d}-00001.jsonl", 1, "text"),
    "redpajama-c4": ("redpajama/c4/c4-{:05d}-01024.jsonl", 1024, "text"),
    "pile": ("pile/pile-{:05d}-of-01650.parquet", 1650, "text"),
    "dolma-books": ("dolma-v1_6/books/books-{:04d}.json.gz", 3, "text"),
    "dolma-pes2o": ("dolma-v1_6/pes2o/pes2o_v2-{:04d}.json.gz", 26, "text"),
    "dolma-reddit": (
        "dolma-v1_6/reddit/reddit-v5-dedupe-pii-nsfw-toxic-{:04d}.json.gz",
        78,
        "text",
    ),
    "dolma-stack": ("dolma-v1_6/stack/stack-v4-train-{:04d}.json.gz", 149, "text"),
    "dolma-wiki": ("dolma-v1_6/wiki/en_simple_wiki_v0-{:04d}.json.gz", 2, "text"),
}


def put(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"{}\n")


def files_of(config):
    return {
        source.name: [shard.path for shard in source.shards]
        for source in list_manifest(config).sources
    }


def data_of(arguments):
    _, experiment = parse("train", "purpose", "example", lambda parser: None, arguments)
    return experiment.data


def test_the_weights_are_the_billions_of_tokens_of_table_2():
    assert {source.name: source.weight for source in openelm()} == TABLE_2
    assert sum(source.weight for source in openelm()) == pytest.approx(1784.3)


def test_the_files_are_all_those_of_corenets_recipe_and_no_other(tmp_path):
    expected = {}
    for name, (pattern, count, _) in CORENET.items():
        numbers = range(count) if count < 5 else (0, 1, count - 1)
        expected[name] = [str(tmp_path / pattern.format(number)) for number in numbers]
        put(tmp_path, *expected[name])
    put(tmp_path, "pile/00.jsonl.zst", "redpajama/common_crawl/2023-06/en_0.jsonl.zst")
    put(tmp_path, "redpajama/arxiv/README.md", "dolma-v1_6/c4/c4-0000.json.gz")
    assert files_of(DataConfig(root=str(tmp_path), sources=openelm())) == expected
    assert {source.name: source.text_key for source in openelm()} == {
        name: text_key for name, (_, _, text_key) in CORENET.items()
    }


def test_every_source_finds_its_files_in_folders_of_their_layout():
    formats = Path(__file__).parent / "data" / "formats"
    assert files_of(DataConfig(root=str(formats), sources=openelm())) == {
        name: [str(formats / pattern.format(n)) for n in range(2 if name == "refinedweb" else 1)]
        for name, (pattern, _, _) in CORENET.items()
    }


@pytest.mark.parametrize("size", ["270m", "450m", "1_1b", "3b"])
def test_the_papers_experiments_train_on_the_papers_mixture(size):
    assert load_experiment(size).data == DataConfig(sources=openelm(), lanes=256)


def test_a_folder_of_the_mixture_can_be_anywhere(tmp_path):
    for name, (pattern, _, _) in CORENET.items():
        put(tmp_path / ("elsewhere" if name == "pile" else "data"), pattern.format(0))
    number = [source.name for source in openelm()].index("pile")
    arguments = ["--exp", "270m", "--data.root", str(tmp_path / "data")]
    with pytest.raises(UserError, match=rf"as --data\.sources\.{number}\.root DIR"):
        files_of(data_of(arguments))
    flag = f"--data.sources.{number}.root"
    arguments += [flag, str(tmp_path / "elsewhere" / "pile")]
    files = files_of(data_of(arguments))
    assert files["pile"] == [str(tmp_path / "elsewhere" / "pile" / "pile-00000-of-01650.parquet")]
    assert len(files) == 13


FINEWEB_EDU = (
    "data/CC-MAIN-2013-20/train-00000-of-00014.parquet",
    "data/CC-MAIN-2024-10/000_00000.parquet",
)
DCLM = (
    "global-shard_01_of_10/local-shard_0_of_10/shard_00000000_processed.jsonl.zst",
    "global-shard_10_of_10/local-shard_9_of_10/shard_00000278_processed.jsonl.zst",
)


@pytest.mark.parametrize(
    ("name", "mixture", "files", "others"),
    [
        ("fineweb_edu", fineweb_edu, FINEWEB_EDU, ("sample/10BT/000_00000.parquet", "README.md")),
        ("dclm", dclm, DCLM, ("README.md", ".gitattributes")),
    ],
)
def test_todays_corpora_are_read_as_they_are_published(tmp_path, name, mixture, files, others):
    put(tmp_path, *files, *others)
    (source,) = mixture()
    assert source.text_key == "text"
    config = DataConfig(root=str(tmp_path), sources=(source,))
    assert files_of(config) == {source.name: [str(tmp_path / file) for file in files]}
    experiment = load_experiment(name)
    assert experiment.data == DataConfig(sources=(source,), lanes=256)
    paper = load_experiment("270m")
    assert (experiment.name, experiment.model) == (name, paper.model)
    assert experiment.training == paper.training


def test_the_page_on_data_lists_the_mixture():
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
    rows = [
        f"| {i} | `{s.name}` | `{s.root}` | `{s.files[0]}` | `{s.text_key}` | {s.weight:g} |"
        for i, s in enumerate(openelm())
    ]
    assert "\n".join(rows) in page
