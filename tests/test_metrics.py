"""Figures reach the file and TensorBoard once a step, also after a resume."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openelm_jax.errors import UserError
from openelm_jax.training.metrics import MetricWriter, speed_figures


def write(directory: Path, resume_step: int, steps: list[int], loss: float) -> None:
    writer = MetricWriter(directory, resume_step)
    for step in steps:
        writer.write(step, {"train/loss": loss + step, "train/tokens": step * 1024})
    writer.close()


def read_lines(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_line_holds_the_step_and_its_figures(tmp_path: Path) -> None:
    write(tmp_path, 0, [10, 20], 0.5)
    assert read_lines(tmp_path) == [
        {"step": 10, "train/loss": 10.5, "train/tokens": 10240},
        {"step": 20, "train/loss": 20.5, "train/tokens": 20480},
    ]


def test_a_line_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    writer = MetricWriter(tmp_path, 0)
    writer.write(1, {"train/loss": 2.0})
    assert read_lines(tmp_path) == [{"step": 1, "train/loss": 2.0}]
    writer.close()


def test_after_a_resume_the_file_has_every_step_once(tmp_path: Path) -> None:
    write(tmp_path, 0, [10, 20, 30, 40], 0.25)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "train/lo')  # killed in the middle of a line
    write(tmp_path, 20, [30, 40, 50], 0.75)
    assert [(line["step"], line["train/loss"]) for line in read_lines(tmp_path)] == [
        (10, 10.25),
        (20, 20.25),
        (30, 30.75),
        (40, 40.75),
        (50, 50.75),
    ]


def test_a_run_that_starts_anew_starts_an_empty_file(tmp_path: Path) -> None:
    write(tmp_path, 0, [0, 10], 0.0)
    write(tmp_path, 0, [0], 1.0)
    assert [line["train/loss"] for line in read_lines(tmp_path)] == [1.0]


def test_what_is_not_finite_is_null_so_that_every_line_is_json(tmp_path: Path) -> None:
    writer = MetricWriter(tmp_path, 0)
    writer.write(1, {"a": math.nan, "b": -math.inf, "c": 1.0})
    writer.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "a": None, "b": None, "c": 1.0}


def test_tensorboard_shows_the_figures_of_a_resumed_run_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, 0, [10, 20, 30], 0.25)
    write(tmp_path, 20, [30, 40], 0.75)
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("train/loss")] == [
        (10, 10.25),
        (20, 20.25),
        (30, 30.75),
        (40, 40.75),
    ]


def test_without_tensorboard_a_note_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    writer = MetricWriter(tmp_path, 0)
    writer.write(1, {"train/loss": 2.0})
    writer.close()
    assert writer.notes == ("TensorBoard files are not written: pip install tensorboard for them.",)
    assert not (tmp_path / "tensorboard").exists()
    assert read_lines(tmp_path) == [{"step": 1, "train/loss": 2.0}]


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UserError, match=r"run: metrics cannot be written \("):
        MetricWriter(tmp_path / "run", 0)


def test_speeds_are_of_all_devices_and_of_each_and_a_share_of_the_known_peak() -> None:
    """The rate at which eight H200 would train 3B at half of their peak: 25.7 k tokens/s each."""
    figures = speed_figures(8 * 25_700, 19.25e9, devices=8, peak_flops=989e12)

    assert figures["speed/tokens_per_second"] == 8 * 25_700
    assert figures["speed/tokens_per_second_per_device"] == 25_700
    assert figures["speed/tflops_per_device"] == pytest.approx(494.7, abs=0.1)
    assert figures["speed/mfu"] == pytest.approx(0.5, abs=0.001)


def test_no_share_of_an_unknown_peak_is_given() -> None:
    assert "speed/mfu" not in speed_figures(100.0, 1e6, devices=1, peak_flops=None)


SHOW = """
from openelm_jax.training.metrics import progress
with progress(200, start=100) as bar:
    bar.update(150, loss=3.25, tokens_per_second=12345.6)
    print("result")
"""


def test_the_progress_bar_is_silent_where_stderr_is_no_terminal() -> None:
    shown = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True)
    assert (shown.stdout, shown.stderr) == ("result\n", "")


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_the_progress_bar_shows_steps_loss_and_speed_on_a_terminal() -> None:
    ours, theirs = os.openpty()
    shown = subprocess.run(
        [sys.executable, "-c", SHOW],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    assert shown.stdout == "result\n"
    line = os.read(ours, 100_000).decode()
    os.close(ours)
    for part in ("150/200", "loss 3.2500", "12,346 tokens/s"):
        assert part in line
