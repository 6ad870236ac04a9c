"""Lets the tests of every folder import what stands beside this file, and train in small."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="session")
def compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the commands of a session keep what they compile."""
    return tmp_path_factory.mktemp("compiled_code")


@pytest.fixture(scope="module")
def no_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep a file's tests, and the processes that they start, from the Hub and from its cache."""
    pytest.importorskip("datasets")
    folders = {name: str(tmp_path_factory.mktemp(name)) for name in ("cache", "datasets")}
    with pytest.MonkeyPatch.context() as patch:
        for flag in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(flag, "1")
            patch.setattr(f"datasets.config.{flag}", True)
        patch.setenv("XDG_CACHE_HOME", folders["cache"])
        patch.setenv("HF_DATASETS_CACHE", folders["datasets"])
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folders["datasets"])
        yield


@pytest.fixture
def train_here(
    compiled_code: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Return train(experiment, run, *flags, code=0): the verb in this process, and its stderr."""
    from openelm_jax import train
    from openelm_jax.command_line import run

    def train_in_process(experiment: Path, directory: Path, *flags: str, code: int = 0) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run(train.main, ["--exp", str(experiment), "--run", str(directory), *flags])
        said = capsys.readouterr().err
        assert end.value.code == code, said
        return said

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(compiled_code))
    compilation_cache.reset_cache()
    yield train_in_process
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the list of (start, length) of all reads from files."""
    from openelm_jax.data import storage

    made = []
    real = storage.read

    def spy(path: str, start: int, length: int) -> bytes:
        made.append((start, length))
        return real(path, start, length)

    monkeypatch.setattr(storage, "read", spy)
    return made
