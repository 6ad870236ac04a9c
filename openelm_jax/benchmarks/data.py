"""The data pipeline, measured on a corpus: what `benchmark data` prints.

Rates are taken as CPU time where another program on the machine would spoil wall time, the compared
runs alternate, and a figure is the median of its repetitions. The parts that measure rates take
few rows a batch, from fewer lanes, so that no repetition needs a batch of the experiment's size;
memory, positions and the draw are those of its own lanes and sources.

Axes: B rows of a batch, S sources, C columns of the state.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import multiprocessing
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from openelm_jax.benchmarks.report import Figure, median_figure
from openelm_jax.config import DataConfig, Experiment
from openelm_jax.data import order
from openelm_jax.data.columns import Column
from openelm_jax.data.lanes import LaneGroup, LaneGroupIterator
from openelm_jax.data.pipeline import DataIterator, make_plan, open_data, training_texts
from openelm_jax.data.source_lane import Plan
from openelm_jax.errors import UserError
from openelm_jax.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

BATCH = 16
# Of what needs many steps, and not much of each.
SMALL_BATCH = 4
SHORT_ROW = 65
DRAWN_STEPS = 1_000
COUNTED_STEPS = 20
SOON = 10
FEWEST_ROUNDS = 3
SAMPLE_SECONDS = 0.001
POSITIONS = 100
# In each place of a position that is only measured, of which no data is read.
LONG_COUNT = 10**9
# Of workers, by the clock.
WORKER_WINDOW = 3.0


def measure(
    experiment: Experiment, parts: Iterable[str], *, seconds: float, long_steps: int
) -> list[Figure]:
    """Return the figures of some parts of the benchmark, each of which takes about `seconds`.

    Raises UserError where the data or the tokenizer cannot be used.
    """
    plan = make_plan(
        experiment.data,
        _open_tokenizer(experiment),
        row_length=experiment.model.context_length + 1,
        global_batch_size=experiment.training.global_batch_size,
    )
    config = dataclasses.replace(experiment.data, workers=0)
    measures: dict[str, Callable[[], list[Figure]]] = {
        "encode": lambda: measure_encoding(plan, seconds),
        "workers": lambda: measure_workers(config, plan, seconds),
        "restore": lambda: measure_restoring(config, plan, long_steps),
        "memory": lambda: measure_memory(plan),
        "mixture": lambda: count_mixture(config, plan),
    }
    return [figure for part in parts for figure in measures[part]()]


def measure_encoding(plan: Plan, seconds: float) -> list[Figure]:
    """Compare the pipeline's CPU time with that of SentencePiece, in it and on whole documents."""
    plain = dataclasses.replace(plan, global_batch_size=BATCH, lanes=1)
    recorder = _Recorder(**_fields(plan.tokenizer))
    watched = dataclasses.replace(plain, tokenizer=recorder)
    encoder = recorder.watch()
    # Text enough that opening shards and looking at the clock are lost in it.
    steps = _count_steps(watched, seconds / 15)
    texts, tokens = recorder.texts, encoder.tokens
    encode = plan.tokenizer._processor.encode

    ratios: list[float] = []
    shares, rates = [], []
    end = time.monotonic() + seconds
    while len(ratios) < FEWEST_ROUNDS or time.monotonic() < end:
        pipeline_seconds = _cpu_seconds(lambda: _run(plain, steps))
        whole_tokens, begin = 0, time.thread_time()
        for text in texts:
            whole_tokens += len(encode(text, out_type="numpy"))
        whole_seconds = time.thread_time() - begin
        rates.append(tokens / pipeline_seconds)
        ratios.append(rates[-1] / (whole_tokens / whole_seconds))
        shares.append(_share_inside(recorder.watch(), lambda: _run(watched, steps)))
    return [
        median_figure(
            "encode", "share", shares, "", "of the CPU time is in SentencePiece", least=0.93
        ),
        median_figure(
            "encode", "ratio", ratios, "x", "tokens a CPU second, to whole documents in a loop",
            least=1.2,
        ),
        median_figure("encode", "rate", rates, "tokens/s", "of CPU time, one process"),
        Figure(
            part="encode", name="document_chars", unit="characters",
            value=round(sum(map(len, texts)) / len(texts)), meaning="a document tokenised, mean",
        ),
    ]  # fmt: skip


def measure_workers(config: DataConfig, plan: Plan, seconds: float) -> list[Figure]:
    """Compare two worker processes with one by the clock; nothing if there is only one lane."""
    lanes, row_length = math.gcd(BATCH, plan.lanes), plan.rules.row_length
    if lanes < 2:
        return []
    ratios: list[float] = []
    shares, rates = [], []
    end = time.monotonic() + seconds
    while len(ratios) < 2 or time.monotonic() < end:
        batches_per_second = []
        for workers in (1, 2):
            shared = dataclasses.replace(config, lanes=lanes, workers=workers)
            with closing(_open(shared, plan.tokenizer, row_length, BATCH)) as data:
                for _ in range(8):  # those that were made ahead, while nobody looked at the clock
                    next(data)
                count, begin, cpu = 0, time.monotonic(), time.process_time()
                elapsed = 0.0
                while elapsed < WORKER_WINDOW:
                    next(data)
                    count += 1
                    elapsed = time.monotonic() - begin
                shares.append((time.process_time() - cpu) / elapsed)
                batches_per_second.append(count / elapsed)
        ratios.append(batches_per_second[1] / batches_per_second[0])
        rates.append(batches_per_second[1] * BATCH * (row_length - 1))
    return [
        median_figure(
            "workers", "ratio", ratios, "x", "tokens a second of two workers to one", least=1.7
        ),
        median_figure("workers", "rate", rates, "tokens/s", "by the clock, two workers"),
        median_figure(
            "workers", "core", shares, "cores", "taken by the process that would train", most=0.1
        ),
    ]  # fmt: skip


def measure_restoring(config: DataConfig, plan: Plan, long_steps: int) -> list[Figure]:
    """Time positions and restoring, soon after the beginning and late, on short rows."""
    figures = measure_positions(config, plan)
    config = dataclasses.replace(config, lanes=math.gcd(SMALL_BATCH, plan.lanes))
    with closing(_open(config, plan.tokenizer, SHORT_ROW, SMALL_BATCH)) as data:
        first = data.get_state()
        for name, step in (("soon", SOON), ("late", long_steps)):
            while data.get_state().step < step:
                next(data)
            saved = data.get_state()
            times = []
            for _ in range(5):
                data.set_state(first)
                begin = time.monotonic()
                data.set_state(saved)
                next(data)
                times.append(time.monotonic() - begin)
            figures.append(
                median_figure(
                    "restore", f"first_batch_{name}", times, "s",
                    f"until the first batch after restoring step {saved.step:,}", most=1,
                )
            )  # fmt: skip
    return figures


def measure_positions(config: DataConfig, plan: Plan) -> list[Figure]:
    """Time positions of the experiment's lanes and sources, at counts of a long run, unread."""
    config = dataclasses.replace(config, lanes=plan.lanes)
    row_length, batch = plan.rules.row_length, plan.global_batch_size
    with closing(_open(config, plan.tokenizer, row_length, batch)) as data:
        table_NSC = np.full_like(plan.first_states_NSC(), LONG_COUNT)
        data.set_state(dataclasses.replace(data.get_state(), table_NSC=table_NSC))
        positions = _milliseconds(data.get_state)
        saved = _milliseconds(lambda: json.dumps(data.get_state().to_json()))
    return [
        median_figure(
            "restore", "get_state", positions, "ms",
            "get_state at the experiment's lanes and sources", most=10,
        ),
        median_figure("restore", "to_save", saved, "ms", "get_state and its JSON, to save it"),
        Figure(
            part="restore", name="state_bytes", value=table_NSC.nbytes, unit="bytes",
            meaning="of integers in a position",
        ),
    ]  # fmt: skip


def measure_memory(plan: Plan) -> list[Figure]:
    """Open every source in every lane in a fresh process, and see what it holds."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as process:
        gigabytes, files, seconds = process.submit(_open_all, plan).result()
    streams = plan.lanes * len(plan.manifest.sources)
    where = f"{plan.lanes} lanes of {len(plan.manifest.sources)} sources ({streams:,} streams)"
    figures = [
        Figure(
            part="memory", name="resident", value=gigabytes, unit="GB",
            meaning=f"resident at most with {where} open", most=4,
        ),
        Figure(part="memory", name="files", value=files, unit="files", meaning="open", most=256),
        Figure(
            part="memory", name="opening", value=seconds, unit="s",
            meaning="to open all of them, with a row of each",
        ),
    ]  # fmt: skip
    for name, factor in decompression_factors(plan).items():
        figures.append(
            Figure(
                part="memory", name=f"decompressed_{name}", value=factor, unit="times",
                meaning=f"a shard of {name} is decompressed in each epoch",
            )
        )  # fmt: skip
    return figures


def decompression_factors(plan: Plan) -> dict[str, int]:
    """Return for each source with compressed texts how many lanes read the most shared of them.

    Each lane decompresses a shard as a whole to take its part of the records.
    """
    factors = {}
    for index, source in enumerate(plan.manifest.sources):
        count = len(source.shards)
        shuffled = order.permutation((plan.seed, order.SHARDS, index), count)
        sharers = [
            order.lanes_of_place(place, plan.lanes, count)
            for place, number in enumerate(shuffled)
            if source.shards[int(number)].format in ("jsonl.gz", "jsonl.zst")
        ]
        if sharers:
            factors[source.name] = max(sharers)
    return factors


def count_mixture(config: DataConfig, plan: Plan) -> list[Figure]:
    """Compare the rows of each source with the weights: as drawn, and as they come."""
    shares_S = plan.weights_S / plan.weights_S.sum()
    batch = plan.global_batch_size
    drawn_S = np.zeros(len(shares_S), dtype=np.int64)
    rows_off = 0.0
    for step in range(DRAWN_STEPS):
        sources_B = order.draw_sources(plan.seed, step, plan.weights_S, batch)
        counts_S = np.bincount(sources_B, minlength=len(shares_S))
        rows_off = max(rows_off, float(np.abs(counts_S - shares_S * batch).max()))
        drawn_S += counts_S
    share_off = float(np.abs(drawn_S / drawn_S.sum() - shares_S).max())

    config = dataclasses.replace(config, lanes=1)
    counted_off = 0.0
    before_S = np.zeros_like(drawn_S)
    with closing(_open(config, plan.tokenizer, SHORT_ROW, batch)) as data:
        for _ in range(COUNTED_STEPS):
            _, position = next(data)
            rows_S = position.table_NSC[:, :, Column.ROWS].sum(axis=0)
            counted_off = max(
                counted_off, float(np.abs(rows_S - before_S - shares_S * batch).max())
            )
            before_S = rows_S
    return [
        Figure(
            part="mixture", name="rows_drawn", value=rows_off, unit="rows",
            meaning=f"off the weights in the worst of {DRAWN_STEPS:,} batches as drawn", most=1,
        ),
        Figure(
            part="mixture", name="rows_counted", value=counted_off, unit="rows",
            meaning=f"off the weights in the worst of {COUNTED_STEPS} batches as they came", most=1,
        ),
        Figure(
            part="mixture", name="share", value=100 * share_off, unit="%",
            meaning=f"of the tokens of {DRAWN_STEPS:,} steps off the weights, the worst source",
            most=0.1,
        ),
    ]  # fmt: skip


class _Encoder:
    """A SentencePiece processor that tells when it is at work, and counts its tokens."""

    def __init__(self, processor: Any) -> None:
        self._encode = processor.encode
        self.is_inside = False
        self.tokens = 0

    def encode(self, text: Any, **options: Any) -> Any:
        self.is_inside = True
        ids = self._encode(text, **options)
        self.is_inside = False
        self.tokens += len(ids)
        return ids


class _Recorder(Tokenizer):
    """A tokenizer that keeps the texts it is given, and whose processor is watched."""

    texts: list[str]

    def watch(self) -> _Encoder:
        """Begin anew."""
        vars(self).pop("_processor", None)
        encoder = _Encoder(self._processor)
        vars(self).update(_processor=encoder, texts=[])
        return encoder

    def encode_in_parts(self, text: str, **options: Any) -> Iterator[np.ndarray]:
        self.texts.append(text)
        return super().encode_in_parts(text, **options)


def _share_inside(encoder: _Encoder, function: Callable[[], None]) -> float:
    """Return the share of the CPU time of `function` that SentencePiece takes.

    A timer of CPU time looks whether it is at work: reading a clock before and after each of the
    many short calls would cost as much as the rest of the pipeline. Python lets it look when a
    call has returned.
    """
    samples: list[bool] = []
    before = signal.signal(signal.SIGPROF, lambda *_: samples.append(encoder.is_inside))
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)
    try:
        while not samples:
            function()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        # A signal may still be on its way, and by default it would end the process.
        ignored = before in (signal.SIG_DFL, None)
        signal.signal(signal.SIGPROF, signal.SIG_IGN if ignored else before)
    return statistics.mean(samples)


def _count_steps(plan: Plan, seconds: float) -> int:
    """Return how many batches take so long."""
    group = _group(plan)
    begin, steps = time.thread_time(), 0
    while steps == 0 or time.thread_time() - begin < seconds:
        next(group)
        steps += 1
    return steps


def _run(plan: Plan, steps: int) -> None:
    group = _group(plan)
    for _ in range(steps):
        next(group)


def _group(plan: Plan) -> LaneGroupIterator:
    return iter(LaneGroup(plan, range(plan.lanes), 0, plan.first_states_NSC()))


def _cpu_seconds(function: Callable[[], None]) -> float:
    begin = time.thread_time()
    function()
    return time.thread_time() - begin


def _milliseconds(function: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(POSITIONS):
        begin = time.perf_counter()
        function()
        times.append(1000 * (time.perf_counter() - begin))
    return times


def _open_all(plan: Plan) -> tuple[float, int, float]:
    """Return the gigabytes and files that this process holds with every stream open, and the time
    that opening took."""
    begin = time.monotonic()
    group = _group(plan)
    for place in range(plan.lanes):
        for source in range(len(plan.manifest.sources)):
            next(group._stream(place, source))
    return _most_resident_gigabytes(), _open_files(), time.monotonic() - begin


def _most_resident_gigabytes() -> float:
    try:  # of this program only: the other counter begins with what the parent had
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e9
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def _open_files() -> int:
    return len(os.listdir("/dev/fd")) - 1  # the listing is one itself


def _open_tokenizer(experiment: Experiment) -> Tokenizer:
    if experiment.tokenizer.path is not None:
        return load_tokenizer(experiment.tokenizer.path, experiment.model.vocab_size)
    if experiment.tokenizer.vocab_size is None:
        raise UserError(
            f"--exp {experiment.name} has no tokenizer: give a SentencePiece model with "
            "--tokenizer FILE."
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.model"
        texts = training_texts(experiment.data)
        return train_tokenizer(texts, experiment.tokenizer.vocab_size, path)


def _open(config: DataConfig, tokenizer: Tokenizer, row_length: int, batch: int) -> DataIterator:
    return open_data(config, tokenizer, row_length=row_length, global_batch_size=batch)


def _fields(tokenizer: Tokenizer) -> dict[str, Any]:
    return {field.name: getattr(tokenizer, field.name) for field in dataclasses.fields(tokenizer)}
