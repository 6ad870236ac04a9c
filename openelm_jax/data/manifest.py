"""Which shards a run reads: found by listing folders, never by reading files.

A shard is one file, or one part of the demo corpus. Shards are named by their path below
`data.root`, so that a data folder can move without changing what the run is.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from openelm_jax.config import DataConfig, SourceConfig
from openelm_jax.data import demo
from openelm_jax.errors import UserError

Format = Literal["jsonl", "jsonl.gz", "parquet", "demo"]
FORMATS: tuple[Format, ...] = ("jsonl", "jsonl.gz", "parquet")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file that holds documents."""

    name: str
    """Path below the root, or the demo corpus and its part."""
    path: str
    """Where the file is on this machine."""
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


def list_manifest(config: DataConfig) -> Manifest:
    """Return the shards that `config` names.

    Raises UserError for a missing root, a pattern or file that is not there, an unknown format,
    a source whose files, or a holdout pattern whose files, are all empty, and a shard that is both
    trained on and held out.
    """
    manifest = Manifest(sources=tuple(_list_source(config, source) for source in config.sources))
    _refuse_overlap(manifest)
    return manifest


def _list_source(config: DataConfig, source: SourceConfig) -> Source:
    where = f"data.sources {source.name}"
    root = f"below {config.root}" if config.root is not None else "(data.root is not set)"
    shards = _list_files(config, where, source.files, "train")
    if not shards:
        raise UserError(
            f"{where}: no file matches {', '.join(source.files)} {root}; give the folder with the "
            "data as --data.root DIR, or correct the source's files."
        )
    holdout: list[Shard] = []
    for pattern in source.holdout:
        found = _list_files(config, where, (pattern,), "holdout")
        if not found:
            raise UserError(
                f"{where}: no file matches the holdout pattern {pattern} {root}; "
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
    )


def _list_files(
    config: DataConfig, where: str, patterns: tuple[str, ...], part: demo.Part
) -> list[Shard]:
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
        for path in _match(config, where, pattern):
            name = path
            if config.root is not None and Path(path).is_relative_to(config.root):
                name = Path(path).relative_to(config.root).as_posix()
            shards[name] = Shard(
                name=name, path=path, size=os.path.getsize(path), format=_format(where, path)
            )
    return [shards[name] for name in sorted(shards)]


def _match(config: DataConfig, where: str, pattern: str) -> list[str]:
    if not os.path.isabs(pattern):
        if config.root is None:
            raise UserError(
                f"{where}: data.root is not set, so there is nothing to look for {pattern} in; "
                "add --data.root DIR, the folder with the data."
            )
        if not os.path.isdir(config.root):
            raise UserError(
                f"{where}: data.root {config.root} is not a folder; "
                "give the folder with the data as --data.root DIR."
            )
        pattern = os.path.join(glob.escape(config.root), pattern)
    paths = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    if not paths and not glob.has_magic(pattern):
        raise UserError(f"{where}: there is no file {pattern}; correct the source's files.")
    return paths


def _format(where: str, path: str) -> Format:
    for known in FORMATS:
        if path.endswith(f".{known}"):
            return known
    raise UserError(
        f"{where}: {path} is of no known format; the known ones end in "
        f"{', '.join(f'.{known}' for known in FORMATS)}, so narrow the source's files to these."
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
        os.path.realpath(shard.path): source.name
        for source in manifest.sources
        for shard in source.holdout
        if shard.format != "demo"
    }
    for source in manifest.sources:
        for shard in source.shards:
            other = held_out.get(os.path.realpath(shard.path))
            if other is not None:
                raise UserError(
                    f"data.sources {source.name}: {shard.path} is matched by files and by the "
                    f"holdout of {other}, so it would be trained on and validated on; move "
                    "held-out shards to a folder that files does not match, or narrow files."
                )
