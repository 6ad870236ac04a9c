"""`benchmark accelerator` measures decoding and norms too, each part for its share of the time."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_models import tiny
from small_runs import small_experiment

from openelm_jax import benchmark
from openelm_jax.benchmarks import accelerator, accelerator_generation
from openelm_jax.benchmarks.accelerator_generation import compare_norms, decode_size
from openelm_jax.config import Experiment
from openelm_jax.errors import UserError
from openelm_jax.model.scaling import parameter_count


def small(tmp_path: Path) -> Experiment:
    model = tiny(num_layers=1, vocab_size=160)
    return dataclasses.replace(small_experiment(tmp_path), model=model)


def gathered(part: Iterator[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for news in part:
        found |= news
    return found


@pytest.mark.heavy
def test_decoding_is_rehearsed_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_generation, "READ_BYTES", 2**20)
    experiment = small(tmp_path)
    found = gathered(decode_size(experiment))
    assert found["parameters"] == parameter_count(experiment.model)
    assert found["weight_bytes"] == 4 * found["parameters"]
    assert (found["prompt_tokens"], found["new_tokens"], found["dtype"]) == (36, 16, "float32")
    assert found["compile_seconds"] > 0
    low, high = found["generation_tokens_per_second_range"]
    assert 0 < low <= found["generation_tokens_per_second"] <= high
    assert found["share_of_bound"] == pytest.approx(
        found["generation_tokens_per_second"] / found["bound_tokens_per_second"]
    )


@pytest.mark.heavy
def test_norms_are_rehearsed_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator_generation, "MODELS", ("olmo_1_18b",))
    monkeypatch.setattr(accelerator_generation, "TOKENS", (1,))
    monkeypatch.setattr(accelerator_generation, "seconds_of", lambda run: run() and 0.5)
    found = gathered(compare_norms(small(tmp_path)))
    microseconds = found["OLMo 1.18B, 33 norms, 1 tokens, microseconds"]
    assert microseconds.keys() == accelerator_generation.KINDS.keys()
    assert set(microseconds.values()) == {5e5}
    assert found["in_model"].keys() == {"rms_norm", "layer_norm", "none"}
    for rates in found["in_model"].values():
        assert rates.keys() == {
            f"{name}_tokens_per_second" for name in ("prompt", "generation", "total")
        }


def test_parts_share_the_time_and_the_last_takes_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[tuple[str, float]] = []

    def collect(part: Any, arguments: Any, until: float, say: Any) -> dict[str, Any]:
        given.append((part.__name__, until - time.monotonic()))
        return {"device": {"kind": "Some GPU"}, "found": part.__name__}

    monkeypatch.setattr(accelerator, "_collect", collect)
    (tmp_path / "tokenizer.model").touch()
    argv = ["--sizes", "tiny,sotu,tiny", "--minutes", "10", "--out", str(tmp_path)]
    argv += ["--tokenizer", str(tmp_path / "tokenizer.model"), "--data.root", str(tmp_path)]
    benchmark.main(["accelerator", *argv])

    # No time passes here, so each share is of all ten minutes; sizes divide theirs.
    expected = {
        "_kernels_part": [90],
        "_decode_part": [90, 180],
        "_norms_part": [120],
        "_train_part": [300, 600],
    }
    assert [name for name, _ in given] == [
        *("_kernels_part", "_decode_part", "_decode_part"),
        *("_norms_part", "_train_part", "_train_part"),
    ]
    for name, seconds in expected.items():
        shares = [share for part, share in given if part == name]
        assert shares == pytest.approx(seconds, abs=2)
    report = json.loads(Path(capsys.readouterr().out.strip()).read_text())
    assert report["device"] == {"kind": "Some GPU"}
    assert report["kernels"] == {"found": "_kernels_part"}
    assert report["sizes"] == {name: {"found": "_train_part"} for name in ("tiny", "sotu")}
    assert report["decode"] == {name: {"found": "_decode_part"} for name in ("tiny", "sotu")}


def test_only_the_parts_that_are_named_are_measured_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        accelerator, "_collect", lambda part, *_: seen.append(part.__name__) or {"device": None}
    )
    (tmp_path / "tokenizer.model").touch()
    argv = ["--part", "norms,decode", "--sizes", "tiny", "--out", str(tmp_path)]
    argv += ["--tokenizer", str(tmp_path / "tokenizer.model"), "--data.root", str(tmp_path)]
    benchmark.main(["accelerator", *argv])
    assert seen == ["_decode_part", "_norms_part"]


@pytest.mark.parametrize(
    ("argv", "mistake"),
    [
        (["--minutes", "0"], r"--minutes is 0: it must be above 0\."),
        (["--steps", "0"], r"--steps is 0: it must be at least 1\."),
        (["--out", __file__], r"--out .*\.py: File exists; give a folder to write into\."),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    argv: list[str], mistake: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=mistake):
        benchmark.main(["accelerator", "--sizes", "tiny", "--out", str(tmp_path), *argv])


def test_the_command_names_the_parts_that_there_are() -> None:
    assert benchmark.ACCELERATOR_PARTS == accelerator.PARTS
    assert accelerator.PARTS[-1] not in accelerator.SHARES
    assert accelerator.WHOLE.keys() | accelerator.OF_SIZE.keys() == set(accelerator.PARTS)
