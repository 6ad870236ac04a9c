"""`train` in two processes: profiles, differing commands, and going on in one on another mesh."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from ports import free_port
from small_runs import environment, params_of, read_metrics, train_command, write_corpus

pytestmark = pytest.mark.heavy

EIGHT = ("--training.global-batch-size", "8")


def start(experiment: Path, run: Path, *flags: str, devices: int = 1) -> subprocess.Popen:
    flag = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        train_command(experiment, run, *flags),
        env=environment(run.parent / "compiled") | {"XLA_FLAGS": flag},
        stderr=subprocess.PIPE,
        text=True,
    )


def train_in_two(
    experiment: Path, run: Path, *flags: str, only_first: tuple[str, ...] = (), code: int = 0
) -> list[str]:
    """Train in two processes of two devices, and return what each wrote to stderr."""
    coordinator = f"localhost:{free_port()}"
    running = []
    for process in range(2):
        several = ("--coordinator", coordinator, "--processes", "2", "--process", str(process))
        own = only_first if process == 0 else ()
        running.append(start(experiment, run, *several, *flags, *own, devices=2))
    try:
        said = [process.communicate(timeout=300)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [code] * 2, "\n".join(said)
    return said


def train_in_one(experiment: Path, run: Path, *flags: str, devices: int) -> str:
    process = start(experiment, run, *flags, devices=devices)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


def test_profiled_and_logged_at_each_step_it_is_the_run_of_one_process(experiment, tmp_path):
    flags = (*EIGHT, "--training.log-every", "1", "--training.profile-steps", "2:3")
    said, _ = train_in_two(experiment, tmp_path / "two", *flags, "--training.sample-prompts", "The")
    train_in_one(experiment, tmp_path / "one", *flags, devices=1)

    assert "profile of steps 2 to 3" in said
    assert list((tmp_path / "two" / "profile").rglob("*.trace.json.gz"))
    two, one = read_metrics(tmp_path / "two"), read_metrics(tmp_path / "one")
    for name in ("train/loss", "validation/bits_per_byte"):
        ours, theirs = ([line[name] for line in lines if name in line] for lines in (two, one))
        assert len(ours) == len(theirs) > 1
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_it_goes_on_in_one_process_on_another_mesh(experiment, tmp_path):
    few = ("--training.validate-every", "0", *EIGHT)
    unbroken, moved = tmp_path / "unbroken", tmp_path / "moved"
    train_in_one(experiment, unbroken, *few, devices=1)
    train_in_two(experiment, moved, *few, "--checkpoint.every", "8")
    last = moved / "checkpoints" / "000016"
    assert last.is_dir()
    for path in sorted(last.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    last.rmdir()  # as if it had been stopped at step 8
    mesh = ("--mesh.tensor", "2", "--mesh.context", "2")
    said = train_in_one(experiment, moved, *few, *mesh, devices=4)

    assert "resumed at step 8" in said
    ours, theirs = params_of(moved, 16), params_of(unbroken, 16)
    for name, array in theirs.items():
        assert np.linalg.norm(ours[name] - array) <= 1e-4 * np.linalg.norm(array), name


def test_processes_with_other_commands_are_refused(experiment, tmp_path):
    other_run = ("--reweight",)
    for said in train_in_two(experiment, tmp_path / "run", only_first=other_run, code=1):
        (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
        assert "process 1 has --reweight False and process 0 True" in error
    other_field = ("--optimizer.peak-lr", "0.5")
    for said in train_in_two(experiment, tmp_path / "run", only_first=other_field, code=1):
        (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
        assert "optimizer.peak_lr: 0.5, 0.01" in error
    assert not os.path.exists(tmp_path / "run" / "checkpoints")
