"""The stream of batches knows nothing of hosts, workers and restarts: the same bits under all."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from corpora import config, documents, source, tokenizer, write, write_shards

from openelm_jax.data import lanes, pipeline, storage
from openelm_jax.data.engine import DatasetIterator
from openelm_jax.data.pipeline import open_data
from openelm_jax.data.position import Position, join_positions
from openelm_jax.errors import UserError

LANES = 8
# Neighbours differ in both, and many hosts go over into few and back.
TOPOLOGIES = [
    *((1, 1), (8, 0), (2, 4), (4, 1), (1, 2), (8, 4), (2, 0), (4, 2)),
    *((1, 4), (2, 1), (8, 2), (4, 0), (2, 2), (8, 1), (4, 4), (1, 0)),
]
FORMATS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "array_record", "txt"]


def write_mixture(root: Path, ending: str) -> None:
    """Two sources: one with fewer shards than lanes where the format allows, one with more."""
    few = 9 if ending == "txt" else 3
    write_shards(root / "web", documents(90, seed=1, words=(1, 60)), ending, few)
    write_shards(root / "code", documents(40, seed=2, words=(1, 200)), ending, 10)


def open_mixture(root: Path, *, host: int = 0, hosts: int = 1, workers: int = 0, **changes):
    settings = {"lanes": LANES, "min_chars": 20, "min_tokens": 12, "workers": workers}
    sources = (source("web", weight=0.7), source("code", weight=0.3))
    return open_data(
        config(root, *sources, **{**settings, **changes}),
        tokenizer(),
        row_length=33,
        global_batch_size=2 * LANES,
        host=host,
        hosts=hosts,
    )


def through_json(position: Position) -> Position:
    return Position.from_json(json.loads(json.dumps(position.to_json())))


class InSlices(DatasetIterator):
    """What Grain does with W workers, in this process: slices w::W of the lanes take turns."""

    def __init__(self, group, workers: int) -> None:
        super().__init__()
        self._slices = []
        for worker in range(workers):
            part = lanes.LaneGroup(group._plan, group._lanes, group._step, group._states_NSC)
            part.set_slice(slice(worker, None, workers))
            self._slices.append(iter(part))
        self._turn = 0

    def __next__(self):
        self._turn += 1
        return next(self._slices[(self._turn - 1) % len(self._slices)])

    def get_state(self):
        raise NotImplementedError

    def set_state(self, state):
        raise NotImplementedError


def iterate_here(group, workers, contents):
    return InSlices(group, workers) if workers else iter(group)


@pytest.mark.parametrize("packing", ["concat", "corenet"])
@pytest.mark.parametrize("ending", FORMATS)
def test_batches_counters_and_positions_are_the_same_on_any_hosts_and_workers(
    tmp_path, monkeypatch, ending, packing
):
    """Each topology makes the first batch, and goes on for two from where the one before stood."""
    write_mixture(tmp_path, ending)
    options = {"packing": packing, "char_filter": "raw", "normalize": "none"}
    alone = open_mixture(tmp_path, **options)
    expected = [next(alone) for _ in range(1 + 2 * len(TOPOLOGIES))]
    saved = expected[0][1]
    assert alone.counters(expected[-1][1])["web"]["least_epochs"] >= 1
    # The files are listed once: every host and worker gets an equal plan anyway.
    monkeypatch.setattr(pipeline, "make_plan", lambda *_, **__: alone._plan)
    monkeypatch.setattr(pipeline, "iterate", iterate_here)
    for turn, (hosts, workers) in enumerate(TOPOLOGIES):
        parts = [
            open_mixture(tmp_path, host=host, hosts=hosts, workers=workers, **options)
            for host in range(hosts)
        ]
        require_batches(alone, parts, expected[:1])
        for part in parts:
            part.set_state(through_json(saved))
        saved = require_batches(alone, parts, expected[2 * turn + 1 : 2 * turn + 3])


def require_batches(alone, parts, expected) -> Position:
    """Require that the hosts together give these batches next; return where they stand then."""
    for rows_BL, position in expected:
        read = [next(part) for part in parts]
        assert (np.concatenate([rows for rows, _ in read]) == rows_BL).all()
        joined = join_positions([own for _, own in reversed(read)])
        assert joined.to_json() == position.to_json()
        assert alone.counters(joined) == alone.counters(position)
    return joined


def test_a_host_opens_only_the_shards_of_its_own_lanes(tmp_path, monkeypatch):
    write_mixture(tmp_path, "jsonl")
    opened: set[str] = set()
    real = lanes.SourceLane._read_block

    def watch(self):
        real(self)
        opened.add(self._shard.path)

    monkeypatch.setattr(lanes.SourceLane, "_read_block", watch)
    seen = []
    for host in range(4):
        opened.clear()
        data = open_mixture(tmp_path, host=host, hosts=4)
        for _ in range(30):
            next(data)
        seen.append({path for path in opened if "code" in path})
    assert all(seen)
    assert not any(a & b for a, b in pairwise(seen))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_the_first_batch_after_going_back_reads_as_much_early_and_late(
    tmp_path, monkeypatch, ending
):
    """Bytes and records differ by a block at most for each stream: a source in a lane."""
    monkeypatch.setattr(pipeline, "MOST_BLOCK_BYTES", 4096)
    for seed, (name, count) in enumerate({"web": 900, "code": 400}.items()):
        file, texts = tmp_path / name / f"0.{ending}", documents(count, seed, words=(100, 300))
        write(file, texts)
        if ending == "parquet":  # with an index that is small beside the texts
            table = pyarrow.table({"text": texts})
            pyarrow.parquet.write_table(table, file, row_group_size=5, write_statistics=False)
    sources = (source("web", weight=0.7), source("code", weight=0.3))
    settings = config(tmp_path, *sources, lanes=2)
    data = open_data(settings, tokenizer(), row_length=65, global_batch_size=8)
    positions = [data.get_state(), *(next(data)[1] for _ in range(600))]
    late = data.counters(positions[-1])
    assert all(counts["most_epochs"] == 0 for counts in late.values())
    assert late["web"]["records"] > 350

    blocks: list[tuple[int, int]] = []  # bytes and records of each
    read, read_block = storage.read, lanes.SourceLane._read_block

    def watch_read(*args):
        data = read(*args)
        blocks[-1] = (blocks[-1][0] + len(data), blocks[-1][1])
        return data

    def watch_block(self):
        blocks.append((0, 0))
        read_block(self)
        blocks[-1] = (blocks[-1][0], len(self._records))

    monkeypatch.setattr(storage, "read", watch_read)
    monkeypatch.setattr(lanes.SourceLane, "_read_block", watch_block)
    reads = []
    for step in (10, 600):
        blocks.clear()
        data.set_state(through_json(positions[step]))
        next(data)
        reads.append(np.array(blocks))
    early, later = reads
    # Parquet is five texts of at most 2 kB, and the last 64 KiB of the file, where the index is.
    block = np.array([{"jsonl": 4096, "parquet": 5 * 2048 + 65536}[ending], 5])
    assert (early <= block).all()
    assert (later <= block).all()
    streams = 4
    assert (np.abs(later.sum(axis=0) - early.sum(axis=0)) <= streams * block).all()


def test_lanes_that_hosts_cannot_share_evenly_are_refused(tmp_path):
    write_mixture(tmp_path, "jsonl")
    with pytest.raises(UserError, match=r"data\.lanes 8 cannot be shared out .* 3 hosts"):
        open_mixture(tmp_path, host=0, hosts=3)


@pytest.mark.heavy
def test_worker_processes_make_the_same_batches_and_leave_nothing_behind(tmp_path):
    write_mixture(tmp_path, "jsonl")
    alone, data = open_mixture(tmp_path), open_mixture(tmp_path, workers=3)
    expected = [next(alone) for _ in range(8)]
    for begin in (0, 5):  # from the beginning, and gone back to a position in between
        if begin:
            data.set_state(through_json(expected[begin - 1][1]))
        for rows_BL, position in expected[begin : begin + 3]:
            rows, own = next(data)
            assert (rows == rows_BL).all()
            assert own.to_json() == position.to_json()
    data.close()
    assert multiprocessing.active_children() == []


def test_a_worker_s_mistake_is_the_same_sentence(tmp_path):
    write_mixture(tmp_path, "jsonl")
    data = open_mixture(tmp_path, workers=2, min_chars=100_000)
    with pytest.raises(UserError, match="no training text in all records of lane"):
        next(data)
    data.close()


def test_a_worker_that_dies_is_named_with_its_lanes(tmp_path):
    write_mixture(tmp_path, "jsonl")
    data = open_mixture(tmp_path, workers=2)
    next(data)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"one of the 2 data workers of lanes 0 to 7 died"):
        for _ in iter(lambda: next(data), None):
            pass
    assert time.monotonic() - began < 60
    data.close()


PROGRAM = """\
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_elastic import open_mixture
if __name__ == "__main__":
    data = open_mixture(Path({root!r}), workers=2)
    for _ in range(4):
        next(data)
    {end}
"""


@pytest.mark.parametrize("end", ["data.close()", "raise SystemExit(3)"])
def test_a_program_ends_quietly_whether_or_not_it_closes_its_workers(tmp_path, end):
    write_mixture(tmp_path, "jsonl")
    program = tmp_path / "program.py"
    tests = str(Path(__file__).parent)
    program.write_text(PROGRAM.format(tests=tests, root=str(tmp_path), end=end))
    ended = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (3 if "3" in end else 0, "")


def test_workers_never_start_a_device(tmp_path):
    """Asked in the worker, after it has made rows: JAX has begun no backend there."""
    write_mixture(tmp_path, "jsonl")
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        + DEVICE_PROGRAM.format(root=str(tmp_path))
    )
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    ended = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert ended.stdout.split() == ["cpu", "False"], ended.stderr


DEVICE_PROGRAM = """\
from pathlib import Path
from openelm_jax.data import lanes, pipeline, storage
from test_elastic import open_mixture

class Asking(lanes.LaneGroup):
    def __iter__(self):
        rows = super().__iter__()
        next(rows)
        import jax
        from jax._src import xla_bridge
        begun = xla_bridge.backends_are_initialized()
        Path({root!r}, "answer").write_text(f"{{jax.config.jax_platforms}} {{begun}}")
        return super().__iter__()

if __name__ == "__main__":
    from openelm_jax.data import pipeline
    pipeline.LaneGroup = Asking
    data = open_mixture(Path({root!r}), workers=1)
    next(data)
    data.close()
    print(Path({root!r}, "answer").read_text())
"""
