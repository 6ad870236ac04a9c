"""`benchmark train` compares like with like; `benchmark accelerator` says all it could find out."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import benchmark_parts
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from small_runs import small_experiment, write_corpus

from openelm_jax.benchmark import main
from openelm_jax.benchmarks import accelerator, accelerator_parts, training
from openelm_jax.benchmarks.accelerator_parts import check_kernels, largest_batch, train_size
from openelm_jax.benchmarks.processes import process, questions
from openelm_jax.benchmarks.training_sides import rows_of
from openelm_jax.config import Experiment
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import load_experiment
from openelm_jax.model.scaling import flops_per_token, parameter_count
from openelm_jax.parallel.memory import device_bytes
from openelm_jax.parallel.mesh import MeshShape
from openelm_jax.parallel.sharding import make_layout

GIB = 2**30


def test_the_two_sides_make_the_same_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from openelm_jax.benchmarks import training_step

    monkeypatch.setattr(training_step, "LEARNING_RATE", 1e-2)
    monkeypatch.setattr(training_step, "num_cores", lambda: 1)
    small = small_experiment(tmp_path)
    # A clip that bites and a decay that shows.
    optimizer = dataclasses.replace(small.optimizer, clip_norm=0.1, weight_decay=1.0)
    experiment = dataclasses.replace(small, optimizer=optimizer)
    rows = list(itertools.islice(rows_of(experiment), 5))

    ours, theirs = training_step.our_step(experiment), training_step.torch_step(experiment)

    assert [ours(row) for row in rows] == pytest.approx([theirs(row) for row in rows], rel=2e-5)


def serve_wide(connection) -> None:
    for _ in questions(connection):
        connection.send(jax.config.jax_enable_x64)


@pytest.mark.parametrize("wide", [False, True])
def test_a_side_has_its_environment_before_its_module_imports_jax(wide: bool) -> None:
    """As this one does: jax reads the variable when it is imported."""
    before = dict(os.environ)
    how = {"environment": {"JAX_ENABLE_X64": str(int(wide))}, "benchmark": "b", "cure": "none"}
    with process(serve_wide, **how) as ask:
        assert ask("wide") is wide
    assert dict(os.environ) == before


def test_the_sides_take_turns_and_neither_is_always_the_later() -> None:
    order: list[str] = []
    pairs = training._alternate(
        lambda: order.append("a") or float(len(order)),  # type: ignore[func-returns-value]
        lambda: order.append("b") or float(len(order)),  # type: ignore[func-returns-value]
        seconds=0,
    )
    assert "".join(order) == "abbaabbaab"
    assert pairs == [(1, 2), (4, 3), (5, 6), (8, 7), (9, 10)]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[Any, float]:
    """Return what processes answer, by side and question; none is started."""
    known: dict[Any, float] = {}

    @contextlib.contextmanager
    def process(serve, *arguments, environment=None) -> Iterator[Any]:
        named = isinstance(arguments[0], str)
        side = arguments[0] if named else serve.__name__.removeprefix("serve_")
        yield lambda question: "a CPU" if question == "device" else known[side, question]

    monkeypatch.setattr(training, "_side", process)
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: object())
    return known


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, dict]:
    main(["train", "--exp", "tiny", "--json", "--seconds", "0", *argv])
    found = json.loads(capsys.readouterr().out)
    assert found["machine"].keys() >= {"processor", "cores", "load", "jax", "python", "date"}
    return {figure["name"]: figure for figure in found["figures"]}


def test_a_ratio_is_of_tokens_a_second_in_neighbouring_turns(
    answers: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    answers |= {("ours", "loss"): 8.3, ("torch", "loss"): 8.3001}
    answers |= {("ours", training.TURN_STEPS): 0.5, ("torch", training.TURN_STEPS): 0.75}
    figures = run(capsys, "--part", "step")
    assert figures["ratio_float32"]["value"] == figures["ratio_bfloat16"]["value"] == 1.5
    assert figures["ratio_float32"]["least"] == 1.05
    assert figures["ratio_bfloat16"]["least"] is None
    assert figures["ratio_float32"]["repetitions"] == 5
    # 8 rows of 128 tokens a step
    assert figures["rate_float32_ours"]["value"] == 1024 / 0.5
    assert figures["rate_float32_torch"]["value"] == 1024 / 0.75


def test_the_published_models_have_the_higher_target(
    answers: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    answers |= {(side, question): 1.0 for side in ("ours", "torch") for question in ("loss", 2)}
    main(["train", "--exp", "270m", "--part", "step", "--seconds", "0"])
    assert "target at least 1.3: MISSED" in capsys.readouterr().out


def test_sides_that_train_different_models_are_not_compared(answers: dict) -> None:
    answers |= {("ours", "loss"): 8.3, ("torch", "loss"): 8.4}
    with pytest.raises(AssertionError, match="different models"):
        training.measure_steps(load_experiment("tiny"), 0)


def test_the_loops_overhead_is_what_it_adds_to_the_bare_step(
    answers: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    answers |= {("loop", "loop"): 1.02, ("loop", "bare"): 1.0}
    figures = run(capsys, "--part", "loop", "--dtype", "float32")
    assert figures.keys() == {"overhead_float32"}
    assert figures["overhead_float32"]["value"] == pytest.approx(2)
    assert figures["overhead_float32"]["most"] == 2


def test_text_is_compared_with_rows_at_hand(answers: dict, tmp_path: Path, capsys) -> None:
    answers |= {("text", "text"): 0.5, ("text", "rows"): 0.45}
    experiment = small_experiment(write_corpus(tmp_path).parent)
    text, ratio = training.measure_text(experiment, 0, tmp_path)
    assert text.value == 4 * 32 / 0.5
    assert (ratio.value, ratio.least, ratio.is_reached) == (0.9, 0.98, False)


def test_text_that_is_not_there_is_refused_before_anything_runs(
    answers: dict, tmp_path: Path
) -> None:
    """No side has an answer, so that asking one is a KeyError."""
    experiment = small_experiment(write_corpus(tmp_path).parent)
    elsewhere = dataclasses.replace(experiment.data, root=str(tmp_path / "nowhere"))
    how = {"parts": ("loop", "text"), "dtypes": ("float32",), "seconds": 0}
    with pytest.raises(UserError, match="is not a folder"):
        training.measure_training(dataclasses.replace(experiment, data=elsewhere), **how)
    with pytest.raises(UserError, match=r"--exp 270m has no tokenizer: give .*--tokenizer.path"):
        training.measure_training(load_experiment("270m"), **how)


def test_the_program_says_how_long_it_compiles_and_what_it_needs(answers: dict) -> None:
    answers |= {("program", "program"): (4.5, 3 * GIB)}
    found = {f.name: f.value for f in training.measure_program(load_experiment("tiny"), 0)}
    assert found == {"compile_float32": 4.5, "memory_float32": 3.0}


def test_flops_are_the_models_and_mfu_is_left_out_where_no_peak_is_known(
    answers: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = load_experiment("tiny")
    answers |= {("ours", "loss"): 8.3, ("torch", "loss"): 8.3, ("torch", 2): 1.0, ("ours", 2): 0.5}
    figures = {f.name: f.value for f in training.measure_steps(experiment, 0)}
    a_token = 3 * flops_per_token(experiment.model)
    assert figures["tflops_float32"] == pytest.approx(1024 / 0.5 * a_token / 1e12)
    assert "mfu_float32" not in figures

    monkeypatch.setattr(training, "peak_flops", {"a CPU": 1e12}.get)
    figures = {f.name: f.value for f in training.measure_steps(experiment, 0)}
    assert figures["mfu_float32"] == pytest.approx(figures["tflops_float32"])


def test_without_pytorch_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'openelm_jax\[torch\]'"):
        training.measure_training(
            load_experiment("tiny"), ("loop", "step"), dtypes=("float32",), seconds=0
        )


@pytest.mark.heavy
def test_all_parts_run_in_processes_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    parts = ("--part", "step,loop,text,program")
    figures = run(capsys, "--model.num-layers", "1", "--dtype", "float32", *parts)
    assert figures["rate_float32_ours"]["low"] > 0
    assert figures["rate_float32_torch"]["low"] > 0
    assert figures["overhead_float32"]["repetitions"] >= 5
    assert figures["text_to_rows_float32"]["low"] > 0
    assert figures["compile_float32"]["value"] > 0.1
    # Parameters and two moments in float32 at least, and not the square of them.
    parameters = 12 * parameter_count(
        dataclasses.replace(load_experiment("tiny").model, num_layers=1)
    )
    assert parameters < figures["memory_float32"]["value"] * GIB < 20 * parameters


@pytest.mark.parametrize(
    ("size", "gib", "remat"),
    [("270m", 139, "none"), ("3b", 139, "none"), ("3b", 80, "none"), ("1_1b", 19, "block")],
)
def test_the_batch_is_the_largest_power_of_two_that_fits(size: str, gib: int, remat: str) -> None:
    chosen = largest_batch(load_experiment(size), gib * GIB, "NVIDIA H200")
    rows = chosen.training.global_batch_size
    twice = accelerator_parts._with_rows(chosen, 2 * rows, remat)
    layout = make_layout(chosen.model, MeshShape())

    def needed(experiment: Experiment) -> float:
        remats = (experiment.training.remat,) * experiment.model.num_layers
        return device_bytes(experiment, layout, remats, "NVIDIA H200").total / GIB

    assert (chosen.training.remat, chosen.training.accumulation) == (remat, 1)
    assert needed(chosen) <= gib
    assert needed(twice) > gib or rows == accelerator_parts.MOST_ROWS


def test_a_size_that_fits_no_row_is_refused_with_what_it_needs() -> None:
    with pytest.raises(UserError, match=r"^3b needs \d\d\.\d GiB .* this one has 16\.0"):
        largest_batch(load_experiment("3b"), 16 * GIB, "TPU v5 lite")


@pytest.mark.parametrize(
    ("kind", "limit", "gib"),
    [
        ("NVIDIA H200", 126 * GIB, 126),  # what the allocator may take, nine tenths already
        ("NVIDIA A100-SXM4-40GB", None, 36),
        ("cpu", None, None),
    ],
)
def test_the_memory_is_what_a_program_may_use(
    kind: str, limit: int | None, gib: float | None
) -> None:
    stats = None if limit is None else {"bytes_limit": limit}
    device: Any = SimpleNamespace(device_kind=kind, memory_stats=lambda: stats)
    memory = accelerator_parts._memory(device)
    assert memory == (None if gib is None else pytest.approx(gib * GIB))


def test_numbers_that_are_not_finite_are_null_in_the_report(tmp_path: Path) -> None:
    report = {
        "device": {"kind": "NVIDIA H200"},
        "machine": {"date": "2026-11-30T10:20:30"},
        "sizes": {"270m": {"last_loss": float("nan"), "step_seconds_range": (0.5, float("inf"))}},
    }
    text = accelerator._write(report, tmp_path).read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["sizes"]["270m"] == {"last_loss": None, "step_seconds_range": [0.5, None]}


@pytest.mark.heavy
def test_a_part_tells_what_it_found_however_it_ends() -> None:
    def collect(part, seconds: float = 60) -> dict:
        return accelerator._collect(part, (), time.monotonic() + seconds, lambda line: None)

    assert collect(benchmark_parts.complete) == {"first": 1, "second": 2}
    assert collect(benchmark_parts.dying) == {"first": 1, "ended": "the process ended with code 9"}
    assert collect(benchmark_parts.refusing) == {"first": 1, "refused": "this cannot be."}
    assert collect(benchmark_parts.failing) == {
        **{"first": 1, "failed": "KeyError: 'device'"},
        "ended": "the process ended with code 1",
    }
    assert collect(benchmark_parts.complete, 1) == {"left_out": "no time was left"}


@pytest.mark.heavy
def test_a_part_that_needs_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "FEWEST_SECONDS", 0)
    found = accelerator._collect(benchmark_parts.slow, (), time.monotonic() + 8, lambda line: None)
    assert found == {"first": 1, "ended": "its share of the time was over"}


def test_kernels_are_checked_in_both_types_with_and_without_documents_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accelerator_parts, "HEAD_DIMS", (64,))
    found: dict[str, dict] = {}
    for news in check_kernels():
        found |= news
    assert len(found) == 4
    compared = {name: check for name, check in found.items() if "left_out" not in check}
    # On a CPU the kernel is the portable one, which float32 would compare with itself.
    assert compared.keys() == {"head_dim 64, bfloat16", "head_dim 64, bfloat16, documents apart"}
    assert all(check["equal"] for check in compared.values())
    # Rounding to bfloat16 is seen: the comparison is with float32.
    rounded = found["head_dim 64, bfloat16, documents apart"]["errors"]
    assert min(rounded.values()) > 1e-4


@pytest.fixture
def as_in_a_process_of_its_own() -> Iterator[None]:
    """Let the cache of compiled code be chosen anew, and put it back."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.heavy
@pytest.mark.usefixtures("as_in_a_process_of_its_own")
def test_a_size_is_rehearsed_on_the_cpu(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "size").mkdir()
    found: dict[str, Any] = {}
    for news in train_size(small_experiment(tmp_path), tmp_path / "size", 600, steps=5):
        found |= news
    assert found["rows"] == 2
    assert found["steps"] == 5
    assert found["kernel"].startswith("portable")
    assert found["compile_cache"] == "hit"
    assert 0 < found["compile_seconds_warm"] < found["compile_seconds_cold"]
    # 2 rows of 32 tokens
    assert found["tokens_per_second"] == pytest.approx(64 / found["step_seconds"])
    assert found["mfu"] is None
    assert found["peak_gib"] is None
    assert 0 <= found["data_wait_share"] < 1
    assert found["first_loss"] > found["last_loss"] > 0
    assert found["save_stall_seconds"] <= found["save_seconds"]
    # Parameters and two moments, float32, and the step.
    assert found["saved_gib"] * GIB == pytest.approx(12 * found["parameters"], rel=1e-3)


@pytest.mark.heavy
def test_the_report_of_a_rehearsal_is_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = write_corpus(tmp_path)
    main(
        [
            *("accelerator", "--sizes", str(experiment), "--steps", "4", "--minutes", "8"),
            *("--data.root", str(tmp_path / "train"), "--out", str(tmp_path / "out")),
            *("--tokenizer", str(tmp_path / "tokenizer.model")),
        ]
    )
    file = Path(capsys.readouterr().out.strip())
    assert file.parent == tmp_path / "out"
    report = json.loads(file.read_text())
    assert report["device"]["platform"] == "cpu"
    assert report["sizes"]["small"]["tokens_per_second"] > 0
    assert report["decode"]["small"]["generation_tokens_per_second"] > 0
    assert report["norms"]["in_model"]["rms_norm"]["generation_tokens_per_second"] > 0
    assert report.keys() == {
        *("machine", "commit", "flags", "minutes", "text", "device"),
        *("kernels", "decode", "norms", "sizes"),
    }
