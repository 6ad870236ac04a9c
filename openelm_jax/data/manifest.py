"""Which shards a run reads: found by listing folders, never by reading files.

A shard is one file, or one part of the demo corpus. Shards are named by their path below the root
of their source, so that a data folder can move without changing what the run is.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from openelm_jax.config import DataConfig
from openelm_jax.data import demo, storage
from openelm_jax.errors import UserError

Format = Literal["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "array_record", "txt", "demo"]
ENDINGS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".json.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".json.zst": "jsonl.zst",
    ".parquet": "parquet",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
    ".txt": "txt",
}
MOST_NAMES = 3  # of the files in a message


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file that holds documents."""

    name: str
    """Path below the source's root, or the demo corpus and its part."""
    path: str
    """Where the file is: an absolute path of this machine, or a URL."""
    size: int
    """Bytes."""
    format: Format


@dataclass(frozen=True, kw_only=True)
class Source:
    """The shards of one source, in order of their names; none is empty."""

    name: str
    text_key: str
    weight: float
    shards: tuple[Shard, ...]
    holdout: tuple[Shard, ...]
    max_epochs: int | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Every shard of the mixture."""

    sources: tuple[Source, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the training shards."""
        return sum(shard.size for source in self.sources for shard in source.shards)

    def sha256(self) -> str:
        """Hash of the names, sizes and formats of all training shards."""
        listing = [
            [source.name, [[shard.name, shard.size, shard.format] for shard in source.shards]]
            for source in self.sources
        ]
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, which `from_json` turns back into an equal manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Manifest:
        """Return the manifest that `to_json` described."""
        return cls(sources=tuple(_source_from_json(source) for source in plain["sources"]))


def _source_from_json(plain: dict[str, Any]) -> Source:
    parts = {name: tuple(Shard(**s) for s in plain[name]) for name in ("shards", "holdout")}
    return Source(**{**plain, **parts})


def list_manifest(config: DataConfig) -> Manifest:
    """Return the shards that `config` names.

    Raises UserError for a missing root, a pattern or file that is not there, an unknown format,
    a source whose files, or a holdout pattern whose files, are all empty, and a shard that is both
    trained on and held out.
    """
    sources = (_list_source(config, number) for number in range(len(config.sources)))
    manifest = Manifest(sources=tuple(sources))
    _refuse_overlap(manifest)
    return manifest


def describe_changes(before: Manifest, now: Manifest) -> str:
    """Return how the training shards differ, source by source; nothing if they do not.

    "web: 2 files gone (a.jsonl, b.jsonl), 1 new (c.jsonl), 1 of another size (d.jsonl)"
    """
    old, new = ({source.name: source for source in m.sources} for m in (before, now))
    changes = [f"{name}: the source is gone" for name in old if name not in new]
    changes += [f"{name}: the source is new" for name in new if name not in old]
    both = [name for name in old if name in new]
    if both != [name for name in new if name in old]:
        changes.append("the sources are in another order")
    for name in both:
        differences = _differences(old[name].shards, new[name].shards)
        if differences:
            changes.append(f"{name}: {differences}")
    return "; ".join(changes)


def _differences(before: Sequence[Shard], now: Sequence[Shard]) -> str:
    old, new = ({shard.name: shard.size for shard in shards} for shards in (before, now))
    kinds = {
        "gone": [name for name in old if name not in new],
        "new": [name for name in new if name not in old],
        "of another size": [name for name in old if name in new and old[name] != new[name]],
    }
    parts: list[str] = []
    for kind, names in kinds.items():
        if names:
            files = "" if parts else " file" if len(names) == 1 else " files"
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            parts.append(f"{len(names)}{files} {kind} ({', '.join(names[:MOST_NAMES])}{more})")
    return ", ".join(parts)


def _list_source(config: DataConfig, number: int) -> Source:
    source = config.sources[number]
    where = f"data.sources {source.name}"
    root = _root_of(config, number)
    shards = _list_files(root, where, source.files, "train")
    if not shards:
        raise UserError(
            f"{where}: no file matches {', '.join(source.files)} {root.in_words}; give the folder "
            f"with the data as {root.flag} DIR, or correct the source's files."
        )
    holdout: list[Shard] = []
    for pattern in source.holdout:
        found = _list_files(root, where, (pattern,), "holdout")
        if not found:
            raise UserError(
                f"{where}: no file matches the holdout pattern {pattern} {root.in_words}; "
                "correct it or take it out."
            )
        if not any(shard.size for shard in found):
            raise UserError(
                f"{where}: all {len(found)} files that the holdout pattern {pattern} matches are "
                f"empty (the first is {found[0].path}); give files with text, or take it out."
            )
        holdout += found
    if demo.PATTERN in source.files:
        holdout.append(_demo_shard("holdout"))
    filled = tuple(shard for shard in shards if shard.size)
    if not filled:
        raise UserError(
            f"{where}: all {len(shards)} files that match are empty (the first is "
            f"{shards[0].path}); point the source's files at the data."
        )
    return Source(
        name=source.name,
        text_key=source.text_key,
        weight=source.weight,
        shards=filled,
        holdout=tuple(sorted({s for s in holdout if s.size}, key=lambda shard: shard.name)),
        max_epochs=source.max_epochs,
    )


@dataclass(frozen=True)
class _Root:
    """The folder or URL below which a source's files are."""

    path: str | None
    """Absolute, or None when it is not given."""
    flag: str
    """The flag that gives it."""
    field: str
    """What its value is called in messages."""

    @property
    def in_words(self) -> str:
        return "(data.root is not set)" if self.path is None else f"below {self.path}"


def _root_of(config: DataConfig, number: int) -> _Root:
    """Return the root of source `number`: its own, below data.root unless it is absolute."""
    own, top = config.sources[number].root, config.root
    if top is not None and not storage.is_url(top):
        top = os.path.abspath(top)
    if own is not None and (storage.is_url(own) or os.path.isabs(own)):
        return _Root(own, f"--data.sources.{number}.root", f"its root {own}")
    if own is None or top is None or not (storage.is_url(top) or os.path.isdir(top)):
        return _Root(top, "--data.root", f"data.root {config.root}")
    path = storage.join(top, own)
    return _Root(path, f"--data.sources.{number}.root", f"its root {path}")


def _list_files(root: _Root, where: str, patterns: tuple[str, ...], part: demo.Part) -> list[Shard]:
    shards: dict[str, Shard] = {}
    for pattern in patterns:
        if pattern.startswith("package:"):
            if pattern != demo.PATTERN:
                raise UserError(
                    f"{where}: {pattern} is no known corpus; the only one is {demo.PATTERN}."
                )
            shard = _demo_shard(part)
            shards[shard.name] = shard
            continue
        for path, size in _match(root, where, pattern):
            below = storage.join(root.path, "") if root.path is not None else path
            name = path.removeprefix(below) or path
            shards[name] = Shard(name=name, path=path, size=size, format=_format(where, path))
    return [shards[name] for name in sorted(shards)]


def _match(root: _Root, where: str, pattern: str) -> list[tuple[str, int]]:
    whole = pattern
    if not (storage.is_url(pattern) or os.path.isabs(pattern)):
        if root.path is None:
            raise UserError(
                f"{where}: data.root is not set, so there is nothing to look for {pattern} in; "
                "add --data.root DIR, the folder with the data."
            )
        if not storage.is_url(root.path) and not os.path.isdir(root.path):
            raise UserError(
                f"{where}: {root.field} is not a folder; "
                f"give the folder with the data as {root.flag} DIR."
            )
        whole = storage.join(glob.escape(root.path), pattern)
    files = storage.list_files(whole)
    if not files and not glob.has_magic(pattern):
        raise UserError(f"{where}: there is no file {whole}; correct the source's files.")
    return files


def _format(where: str, path: str) -> Format:
    for ending, known in ENDINGS.items():
        if path.endswith(ending):
            return known
    raise UserError(
        f"{where}: {path} is of no known format; the known ones end in "
        f"{', '.join(ENDINGS)}, so narrow the source's files to these."
    )


def _demo_shard(part: demo.Part) -> Shard:
    folder = demo.find()
    return Shard(
        name=f"{demo.PATTERN}/{part}",
        path=str(folder),
        size=sum(path.stat().st_size for path in demo.documents(folder, part)),
        format="demo",
    )


def _refuse_overlap(manifest: Manifest) -> None:
    held_out = {
        _identity(shard): source.name
        for source in manifest.sources
        for shard in source.holdout
        if shard.format != "demo"
    }
    for source in manifest.sources:
        for shard in source.shards:
            other = held_out.get(_identity(shard))
            if other is not None:
                raise UserError(
                    f"data.sources {source.name}: {shard.path} is matched by files and by the "
                    f"holdout of {other}, so it would be trained on and validated on; move "
                    "held-out shards to a folder that files does not match, or narrow files."
                )


def _identity(shard: Shard) -> str:
    return shard.path if storage.is_url(shard.path) else os.path.realpath(shard.path)
