"""The mixtures of known corpora: where their files lie, and what each weighs.

Names and folders are those of the publishers, or those that CoreNet's recipe renames them to. Each
folder can be given by a flag of its own, --data.sources.NUMBER.root DIR.
"""

from __future__ import annotations

from openelm_jax.config import SourceConfig

# Source, folder, files, field of the text, billions of tokens.
_TABLE_2 = (
    ("refinedweb", "refinedweb", "refinedweb-*-of-05534.parquet", "content", 665),
    ("redpajama-arxiv", "redpajama", "arxiv/arxiv-*-00099.jsonl", "text", 28),
    ("redpajama-book", "redpajama", "book/book-*-00001.jsonl", "text", 26),
    ("redpajama-c4", "redpajama", "c4/c4-*-01024.jsonl", "text", 175),
    ("redpajama-github", "redpajama", "github/github-*-00098.jsonl", "text", 59),
    (
        "redpajama-stackexchange",
        "redpajama",
        "stackexchange/stackexchange-*-00001.jsonl",
        "text",
        20,
    ),
    ("redpajama-wikipedia", "redpajama", "wikipedia/wiki-*-00001.jsonl", "text", 24),
    ("pile", "pile", "pile-*-of-01650.parquet", "text", 207),
    ("dolma-books", "dolma-v1_6", "books/books-*.json.gz", "text", 6),
    ("dolma-pes2o", "dolma-v1_6", "pes2o/pes2o_v2-*.json.gz", "text", 70),
    (
        "dolma-reddit",
        "dolma-v1_6",
        "reddit/reddit-v5-dedupe-pii-nsfw-toxic-*.json.gz",
        "text",
        89,
    ),
    ("dolma-stack", "dolma-v1_6", "stack/stack-v4-train-*.json.gz", "text", 411),
    ("dolma-wiki", "dolma-v1_6", "wiki/en_simple_wiki_v0-*.json.gz", "text", 4.3),
)


def openelm() -> tuple[SourceConfig, ...]:
    """Return OpenELM's mixture: RefinedWeb, RedPajama, deduplicated Pile and Dolma v1.6.

    Below data.root are the folders refinedweb, redpajama, pile and dolma-v1_6, with files named as
    in CoreNet's `projects/openelm/README-pretraining.md`; a weight is billions of tokens (paper,
    Table 2).
    """
    return tuple(
        SourceConfig(name=name, root=root, files=(files,), text_key=text_key, weight=billions)
        for name, root, files, text_key, billions in _TABLE_2
    )


def fineweb_edu() -> tuple[SourceConfig, ...]:
    """Return FineWeb-Edu in the layout of the dataset `HuggingFaceFW/fineweb-edu`.

    data.root is its folder, in which data/ holds a folder of Parquet files for each crawl.
    """
    return (SourceConfig(name="fineweb-edu", files=("data/*/*.parquet",)),)


def dclm() -> tuple[SourceConfig, ...]:
    """Return DCLM-Baseline in the layout of the dataset `mlfoundations/dclm-baseline-1.0`.

    data.root is its folder, with global-shard_01_of_10 and the others.
    """
    return (
        SourceConfig(name="dclm", files=("global-shard_*_of_10/local-shard_*_of_10/*.jsonl.zst",)),
    )
