"""The manifest is what the folders hold, wherever they are, and says what changed by name."""

import json
import os
from pathlib import Path

import fsspec
import pytest

from openelm_jax.config import DataConfig, SourceConfig
from openelm_jax.data import storage
from openelm_jax.data.manifest import (
    ENDINGS,
    Manifest,
    Shard,
    Source,
    describe_changes,
    list_manifest,
)
from openelm_jax.errors import UserError


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    """Return an empty folder, or an empty URL."""
    return str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"


def put(root, *names, data=b"{}\n"):
    for name in names:
        path = storage.join(str(root), name)
        if not storage.is_url(path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        with fsspec.open(path, "wb") as file:
            file.write(data)


def source(name="web", **changes):
    return SourceConfig(name=name, **{"files": (f"{name}/**",), **changes})


def list_sources(root, *sources):
    return list_manifest(DataConfig(root=None if root is None else str(root), sources=sources))


def names(manifest, part="shards"):
    return [[shard.name for shard in getattr(s, part)] for s in manifest.sources]


def test_every_ending_has_its_format(root):
    formats = {
        "a.array_record": "array_record",
        "b.arrayrecord": "array_record",
        "c.json.gz": "jsonl.gz",
        "d.json.zst": "jsonl.zst",
        "e.jsonl": "jsonl",
        "f.jsonl.gz": "jsonl.gz",
        "g.jsonl.zst": "jsonl.zst",
        "h.parquet": "parquet",
        "i.txt": "txt",
        "j.json.gz.dedup.classifier.jsonl.zst": "jsonl.zst",
    }
    put(root, *(f"web/{name}" for name in formats))
    (listed,) = list_sources(root, source()).sources
    assert {s.name.removeprefix("web/"): s.format for s in listed.shards} == formats


def test_without_sources_every_known_ending_is_read(root):
    put(root, *(f"{folder}a{ending}" for ending in ENDINGS for folder in ("", "deep/er/")))
    (listed,) = list_manifest(DataConfig(root=root)).sources
    found = {shard.name: shard.format for shard in listed.shards}
    assert found == {
        f"{folder}a{ending}": kind
        for ending, kind in ENDINGS.items()
        for folder in ("", "deep/er/")
    }


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.gz", "jsonl", "a.jsonl.bz2"])
def test_any_other_ending_is_refused_with_the_known_ones(root, name):
    put(root, f"web/{name}")
    with pytest.raises(
        UserError,
        match=rf"^data\.sources web: \S*web/{name} is of no known format; the known ones end in "
        r"\.jsonl, \.jsonl\.gz, \.json\.gz, .*\.txt, so narrow the source's files to these\.$",
    ):
        list_sources(root, source())


def test_a_shard_is_named_by_its_path_below_the_root_and_has_its_size(root):
    put(root, "web/b.jsonl", "web/deep/a.jsonl", data=b"12345")
    put(root, "web/a.jsonl", data=b"1")
    manifest = list_sources(root, source(weight=2.5, text_key="content", max_epochs=3))
    assert manifest.sources == (
        Source(
            name="web",
            text_key="content",
            weight=2.5,
            shards=tuple(
                Shard(name=name, path=f"{root}/{name}", size=size, format="jsonl")
                for name, size in [("web/a.jsonl", 1), ("web/b.jsonl", 5), ("web/deep/a.jsonl", 5)]
            ),
            holdout=(),
            max_epochs=3,
        ),
    )
    assert manifest.num_bytes == 11


def test_a_root_of_a_source_is_below_the_data_root_or_elsewhere(root, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    put(root, "corpora/web/a.jsonl", "a.jsonl")
    put(elsewhere, "a.jsonl")
    put("memory://elsewhere", "deep/a.jsonl")
    listed = list_sources(
        root,
        source("plain", files=("*.jsonl",)),
        source("below", root="corpora", files=("web/*",)),
        source("folder", root=str(elsewhere), files=("*",)),
        source("url", root="memory://elsewhere/", files=("**/*.jsonl",)),
        source("pattern", files=("memory://elsewhere/**",)),
    )
    assert [(s.shards[0].name, s.shards[0].path) for s in listed.sources] == [
        ("a.jsonl", f"{root}/a.jsonl"),
        ("web/a.jsonl", f"{root}/corpora/web/a.jsonl"),
        ("a.jsonl", f"{elsewhere}/a.jsonl"),
        ("deep/a.jsonl", "memory://elsewhere/deep/a.jsonl"),
        ("memory://elsewhere/deep/a.jsonl", "memory://elsewhere/deep/a.jsonl"),
    ]


def test_sources_with_roots_of_their_own_need_no_data_root(tmp_path):
    put(tmp_path, "a.jsonl")
    assert names(list_sources(None, source(root=str(tmp_path), files=("*",)))) == [["a.jsonl"]]


def test_a_relative_root_is_that_of_the_working_directory(tmp_path, monkeypatch):
    put(tmp_path, "data/web/a.jsonl")
    monkeypatch.chdir(tmp_path)
    (listed,) = list_sources("data", source()).sources
    assert listed.shards[0].name == "web/a.jsonl"
    assert listed.shards[0].path == str(tmp_path / "data" / "web" / "a.jsonl")


def test_a_folder_that_moves_is_the_same_mixture(root, tmp_path):
    for folder in (root, f"{root}/moved"):
        put(folder, "corpus/web/a.jsonl", "corpus/web/b.jsonl")
    before = list_sources(root, source(root="corpus"))
    now = list_sources(f"{root}/moved", source(root="corpus"))
    assert before != now
    assert before.sha256() == now.sha256()
    assert describe_changes(before, now) == ""


def test_a_manifest_survives_its_json(root):
    put(root, "web/a.jsonl", "code/a.parquet", "held/b.txt")
    manifest = list_sources(root, source(max_epochs=2), source("code", holdout=("held/*",)))
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


def test_changes_are_told_by_source_and_name(root):
    put(root, "web/a.jsonl", "web/b.jsonl", "web/d.jsonl", "code/a.txt", "old/a.txt")
    web, code = source("web", root="web", files=("**",)), source("code")
    before = list_sources(root, web, code, source("old"))
    put(root, "web/c.jsonl", "new/a.txt")
    put(root, "web/d.jsonl", data=b"more than before")
    gone = {"web/a.jsonl", "web/b.jsonl"}
    now = list_sources(root, web, code, source("new"))
    shards = tuple(s for s in now.sources[0].shards if f"web/{s.name}" not in gone)
    now = Manifest(
        sources=(
            Source(name="web", text_key="text", weight=1, shards=shards, holdout=()),
            *now.sources[1:],
        )
    )
    assert describe_changes(before, now) == (
        "old: the source is gone; new: the source is new; web: 2 files gone (a.jsonl, b.jsonl), "
        "1 new (c.jsonl), 1 of another size (d.jsonl)"
    )
    assert before.sha256() != now.sha256()


def test_many_changes_are_told_by_the_first_of_them(root):
    put(root, "web/a.jsonl")
    before = list_sources(root, source())
    put(root, *(f"web/{number}.jsonl" for number in range(5)))
    now = list_sources(root, source())
    assert describe_changes(before, now) == (
        "web: 5 files new (web/0.jsonl, web/1.jsonl, web/2.jsonl and 2 more)"
    )


def test_another_order_of_the_sources_is_told(root):
    put(root, "web/a.jsonl", "code/a.jsonl")
    before, now = (list_sources(root, *map(source, n)) for n in (("web", "code"), ("code", "web")))
    assert describe_changes(before, now) == "the sources are in another order"
    assert before.sha256() != now.sha256()


def test_what_is_trained_on_and_held_out_is_refused(root):
    put(root, "web/a.jsonl", "web/b.jsonl")
    expected = (
        r"^data\.sources web: \S+web/b\.jsonl is matched by files and by the holdout of other, so"
    )
    with pytest.raises(UserError, match=expected):
        list_sources(root, source(), source("other", root="web", files=("a.*",), holdout=("b.*",)))
    both = list_sources(root, source(files=("web/a.*",), holdout=("web/b.*",)))
    assert names(both) == [["web/a.jsonl"]]
    assert names(both, "holdout") == [["web/b.jsonl"]]


def test_a_link_to_a_held_out_file_is_that_file(tmp_path):
    put(tmp_path, "held/a.jsonl")
    (tmp_path / "web").mkdir()
    os.symlink(tmp_path / "held" / "a.jsonl", tmp_path / "web" / "b.jsonl")
    with pytest.raises(UserError, match=r"b\.jsonl is matched by files and by the holdout of web"):
        list_sources(tmp_path, source(holdout=("held/*",)))


def test_nothing_that_matches_is_told_with_the_flag_of_the_root(root):
    put(root, "web/a.jsonl")
    with pytest.raises(
        UserError,
        match=rf"^data\.sources web: no file matches x/\*, y/\* below {root}; give the folder "
        r"with the data as --data\.root DIR, or correct the source's files\.$",
    ):
        list_sources(root, source(files=("x/*", "y/*")))
    with pytest.raises(UserError, match=rf"below {root}/web; .* as --data\.sources\.1\.root DIR"):
        list_sources(root, source(), source("other", root="web", files=("x/*",)))
    with pytest.raises(UserError, match=rf"there is no file {root}/web/b\.jsonl; correct"):
        list_sources(root, source(files=("web/*", "web/b.jsonl")))
    with pytest.raises(UserError, match=rf"the holdout pattern no/\* below {root}; correct it"):
        list_sources(root, source(holdout=("no/*",)))


def test_a_root_that_is_no_folder_is_told_with_its_flag(tmp_path):
    own = source("own", root="own", files=("*",))
    with pytest.raises(UserError, match=r"data\.root is not set.*\* in; add --data\.root DIR"):
        list_sources(None, own)
    nowhere = tmp_path / "nowhere"
    with pytest.raises(
        UserError, match=rf"data\.root {nowhere} is not a folder; give .* as --data\.root DIR\.$"
    ):
        list_sources(nowhere, own)
    put(tmp_path, "web/a.jsonl")
    with pytest.raises(
        UserError,
        match=rf"^data\.sources own: its root {tmp_path}/own is not a folder; give the folder with "
        r"the data as --data\.sources\.1\.root DIR\.$",
    ):
        list_sources(tmp_path, source(), own)


def test_empty_files_are_passed_over_unless_all_are(root):
    put(root, "web/a.jsonl", "held/a.jsonl", data=b"")
    with pytest.raises(UserError, match=r"all 1 files that match are empty \(the first is .*web/a"):
        list_sources(root, source())
    put(root, "web/b.jsonl")
    assert names(list_sources(root, source())) == [["web/b.jsonl"]]
    with pytest.raises(UserError, match=r"all 1 files that the holdout pattern held/\* matches"):
        list_sources(root, source(holdout=("held/*",)))


def test_a_file_that_two_patterns_match_is_one_shard(root):
    put(root, "web/a.jsonl")
    assert names(list_sources(root, source(files=("web/*", "**/*.jsonl")))) == [["web/a.jsonl"]]


def test_no_file_is_read(tmp_path):
    put(tmp_path, "web/a.jsonl")
    os.truncate(tmp_path / "web" / "a.jsonl", 1 << 40)  # a hole that takes no space
    assert list_sources(tmp_path, source()).num_bytes == 1 << 40
