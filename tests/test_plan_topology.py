"""`plan --topology`: what a step needs of a machine that is not here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from openelm_jax import plan
from openelm_jax.config import Experiment, MeshConfig
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import load_experiment
from openelm_jax.model.scaling import flops_per_token, layer_shapes, parameter_count
from openelm_jax.parallel.mesh import MeshShape
from openelm_jax.parallel.sharding import make_layout
from openelm_jax.planning.estimate import (
    SLOWEST,
    Estimate,
    estimate,
    middle_seconds,
    pareto,
    search,
    settings,
)
from openelm_jax.planning.report import format_estimate, format_search
from openelm_jax.planning.table import ROWS
from openelm_jax.planning.topologies import GIB, parse_topology
from openelm_jax.planning.traffic import planned_collectives


def experiment(name: str = "270m", mesh: MeshConfig | None = None, **training: Any) -> Experiment:
    loaded = load_experiment(name)
    return dataclasses.replace(
        loaded,
        mesh=mesh or loaded.mesh,
        training=dataclasses.replace(loaded.training, **training),
    )


def sent(found: Estimate) -> dict[tuple[str, str, str], int]:
    return {(each.kind, each.dtype, each.purpose): each.bytes for each in found.collectives}


def test_weights_are_gathered_in_bfloat16_and_their_gradients_scattered_in_float32() -> None:
    chosen = experiment(accumulation=32, remat="dots")
    found = estimate(chosen, parse_topology("v5e:2x4"))
    config = chosen.model
    embedding = config.vocab_size * config.model_dim
    norms = config.num_layers * (2 * config.model_dim + 2 * config.head_dim) + config.model_dim
    matrices = parameter_count(config) - embedding - norms
    # Each of 32 parts: matrices forward and backward, the table for lookup and for the loss.
    assert sent(found) == {
        ("all-gather", "bfloat16", "weights"): 32 * 2 * (2 * matrices + 2 * embedding),
        ("reduce-scatter", "float32", "gradients"): 32 * 4 * (matrices + 2 * embedding),
        ("all-reduce", "float32", "norms"): 4 * norms,
    }


def test_copies_of_the_state_sum_their_shards_once_a_step() -> None:
    chosen = experiment(accumulation=16, remat="dots")
    found = estimate(chosen, parse_topology("v5e:2x4", 2))
    assert found.mesh == {"replica": 2, "fsdp": 8, "tensor": 1, "context": 1}
    config = chosen.model
    norms = config.num_layers * (2 * config.model_dim + 2 * config.head_dim) + config.model_dim
    assert sent(found)["all-reduce", "float32", "gradients"] == (
        4 * (parameter_count(config) - norms) // 8
    )
    assert found.bound.network_seconds > 0


def test_one_device_sends_nothing() -> None:
    found = estimate(experiment(accumulation=512, remat="dots"), parse_topology("h200:1"))
    assert found.collectives == ()
    assert found.bound.interconnect_seconds == found.bound.network_seconds == 0


@pytest.mark.parametrize(
    ("accumulation", "dtype", "compiled_gib"),
    [(256, "bfloat16", 9.23), (128, "bfloat16", 17.15), (256, "float32", 8.35)],
)
def test_scores_that_portable_attention_holds_are_counted(
    accumulation: int, dtype: str, compiled_gib: float
) -> None:
    """What XLA's compiler for an H200 allots (jaxlib 0.10.2, `plan --compile quick`)."""
    chosen = experiment(accumulation=accumulation, remat="dots", attention="portable", dtype=dtype)
    chosen = dataclasses.replace(chosen, model=dataclasses.replace(chosen.model, num_layers=2))
    found = estimate(chosen, parse_topology("h200:1"))
    rows, heads = 2048 // accumulation, 20
    bytes_a_score = 10 if dtype == "bfloat16" else 8
    assert found.memory["scores"] == rows * heads * 2048 * 2048 * bytes_a_score
    assert found.estimated_bytes / GIB == pytest.approx(compiled_gib, rel=0.15)


def test_kernels_that_hold_no_scores_take_no_memory_for_them() -> None:
    for topology in ("h200:1", "v5e:2x4"):
        assert (
            "scores" not in estimate(experiment(accumulation=64), parse_topology(topology)).memory
        )


def test_the_tensor_axis_sums_activations_twice_a_half_layer() -> None:
    mesh = MeshConfig(replica=1, fsdp=2, tensor=4)
    chosen = experiment(mesh=mesh, accumulation=64, remat="dots")
    layout = make_layout(chosen.model, MeshShape(1, 2, 4, 1))
    summed = [
        each
        for each in planned_collectives(chosen, layout, ("dots",) * 16)
        if each.axes == "tensor" and each.purpose == "activations"
    ]
    halves = sum(2 if kind != "whole" else 1 for kind in layout.attention)
    rows = 2048 // (2 * 64)
    assert [(each.count, each.bytes) for each in summed] == [
        # And at the end of each part, for the loss takes the tokens apart.
        ((2 * halves + 1) * 64, (2 * halves + 1) * 64 * rows * 2048 * 1280 * 2)
    ]


def test_the_context_axis_gathers_keys_and_values() -> None:
    mesh = MeshConfig(replica=1, fsdp=4, context=2)
    chosen = experiment(mesh=mesh, accumulation=64, remat="dots")
    found = estimate(chosen, parse_topology("v5e:2x4"))
    heads = sum(shape.kv_dim for shape in layer_shapes(chosen.model))
    elements = 64 * (2048 // (4 * 64)) * 2048 * 2 * heads
    # Not kept, and so gathered again backward.
    assert sent(found)["all-gather", "bfloat16", "keys and values"] == 2 * 2 * elements
    assert sent(found)["reduce-scatter", "float32", "keys and values"] == 4 * elements


def test_flops_are_the_models_and_recomputing_blocks_adds_their_forward_pass() -> None:
    chosen = experiment("3b", accumulation=8, remat="block")
    found = estimate(chosen, parse_topology("v5p:4x4x4"))
    tokens = 2048 * 2048 / 64
    assert found.model_flops == pytest.approx(3 * flops_per_token(chosen.model) * tokens)
    # By hand: forward but head and the product down, and the scores once more for their gradient.
    head = 2 * 3072 * 32128
    down = sum(2 * 3072 * shape.ffn_dim for shape in layer_shapes(chosen.model))
    scores = sum(shape.query_dim * 2049 for shape in layer_shapes(chosen.model))
    again = flops_per_token(chosen.model) - head - down + scores
    assert found.recomputed_flops == pytest.approx(again * tokens)


def test_a_state_of_twelve_bytes_a_parameter_is_divided_by_all_devices() -> None:
    found = estimate(experiment("3b", accumulation=32, remat="block"), parse_topology("v6e:4x4"))
    state = sum(found.memory[name] for name in ("parameters", "first moment", "second moment"))
    assert state == pytest.approx(12 * 3_037_040_640 / 16, rel=1e-3)


def test_what_does_not_fit_says_so_with_what_would() -> None:
    topology = parse_topology("v5e:2x4")
    found = estimate(experiment(), topology)
    text = format_estimate(experiment(), found)
    assert not found.fits
    line = next(line for line in text.splitlines() if line.startswith("does not fit: "))
    assert f"{found.estimated_bytes / GIB:.1f} of 16 GiB; try --training.accumulation " in line
    flags = line.partition("try ")[2].partition(" (")[0].split()
    named = dict(zip(flags[::2], flags[1::2], strict=True))
    advised = experiment(
        accumulation=int(named["--training.accumulation"]),
        remat=named.get("--training.remat", "none"),
    )
    assert estimate(advised, topology).fits


def test_a_machine_that_is_too_small_is_said_to_be() -> None:
    found = estimate(experiment("3b", accumulation=2048), parse_topology("v5e:1x1"))
    assert found.advice == (
        "no accumulation, remat or mesh of these devices fits: take more of them"
    )


@pytest.fixture(scope="module")
def searched() -> list[Estimate]:
    return search(experiment(), parse_topology("v5e:2x4"))


def test_no_setting_of_a_search_beats_another_in_everything(searched: list[Estimate]) -> None:
    assert len(searched) > 3
    assert all(found.fits for found in searched)
    figures = [
        (found.estimated_bytes, found.bound.step_seconds, found.bound.exposed_seconds)
        for found in searched
    ]
    for a in figures:
        assert not any(b != a and all(x <= y for x, y in zip(b, a, strict=True)) for b in figures)
    middles = [middle_seconds(found) for found in searched]
    assert middles == sorted(middles)


def test_every_setting_that_was_left_out_is_beaten(searched: list[Estimate]) -> None:
    topology = parse_topology("v5e:2x4")
    for accumulation in (16, 64, 256):
        for remat in ("dots", "save_attention", "block"):
            other = estimate(experiment(accumulation=accumulation, remat=remat), topology)
            slow = middle_seconds(other) > SLOWEST * middle_seconds(searched[0])
            assert (
                slow
                or not other.fits
                or any(
                    found.estimated_bytes <= other.estimated_bytes
                    and found.bound.step_seconds <= other.bound.step_seconds
                    and found.bound.exposed_seconds <= other.bound.exposed_seconds
                    for found in searched
                )
            )


def test_a_search_compares_no_budget_with_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """That tries hundreds of choices of layers a setting, and was five sixths of all its time."""

    def compared(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("openelm_jax.planning.estimate.uniform_remats_of", compared)
    assert search(experiment(), parse_topology("v5e:2x4"))
    with pytest.raises(AssertionError):
        estimate(experiment(accumulation=64, remat="budget"), parse_topology("v5e:2x4"))


def test_a_setting_is_named_by_the_flags_that_make_it(searched: list[Estimate]) -> None:
    topology = parse_topology("v5e:2x4")
    text = format_search(experiment(), topology, searched)
    flags = settings(experiment(), topology, searched[0])
    assert text.splitlines()[-1] == f"the first: {flags}"
    assert f"--training.accumulation {searched[0].accumulation}" in flags


def test_of_equal_times_the_smaller_memory_stays() -> None:
    one = estimate(experiment(accumulation=32, remat="dots"), parse_topology("v5e:2x4"))
    larger = dataclasses.replace(one, estimated_bytes=one.estimated_bytes + 1)
    assert pareto([larger, one]) == [one]


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["--topology", "v9:4x4"], "no topology 'v9:4x4': known are v4:"),
        (["--topology", "v5e:2x4", "--mesh.fsdp", "3"], "makes 6 devices, and there are 8"),
        (["--topology", "v5e:2x4", "--mesh.context", "3"], "there are 8"),
        (
            ["--topology", "v5e:2x4", "--training.accumulation", "512"],
            "training.global_batch_size 2048 cannot be divided",
        ),
        (
            ["--topology", "v5e:1x1", "--training.remat", "budget", "--training.accumulation",
             "2048", "--training.memory-gib", "0.5"],
            "training.remat=budget",
        ),
        (["--search"], "--search needs a machine"),
        (["--compile"], "--compile needs a machine"),
        (
            ["--topology", "v5e:2x4", "--training.accumulation", "32", "--compile", "--python",
             "/nowhere/python"],
            "--python /nowhere/python: it does not run",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(arguments: list[str], phrase: str) -> None:
    with pytest.raises(UserError) as refusal:
        plan.main(["--exp", "270m", *arguments])
    assert phrase in str(refusal.value)


def test_json_has_the_plan_and_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(["--exp", "270m", "--topology", "v5e:2x4", "--training.accumulation", "32",
               "--training.remat", "dots", "--json"])  # fmt: skip
    printed = json.loads(capsys.readouterr().out)
    there = printed["on_topology"]
    assert printed["experiment"] == there["experiment"] == "270m"
    assert there["mesh"] == {"replica": 1, "fsdp": 8, "tensor": 1, "context": 1}
    assert there["fits"] is True
    assert there["bound"]["binds"] == "compute"
    assert sum(there["memory"].values()) == there["estimated_bytes"]
    assert there["compiled"] is None


def test_budget_repeats_a_fifth_less_than_blocks_that_fit_as_well() -> None:
    """1.1B on 16 chips of v5e, 16 rows at a time: between keeping all and keeping nothing."""
    topology = parse_topology("v5e:4x4")
    layers = {
        remat: estimate(experiment("1_1b", accumulation=16, remat=remat), topology)
        for remat in ("none", "block", "budget")
    }
    assert not layers["none"].fits
    assert layers["block"].fits
    assert layers["budget"].fits
    assert layers["budget"].recomputed_flops < 0.8 * layers["block"].recomputed_flops


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_the_page_of_plans_has_these_estimates_near_what_was_compiled(row: tuple[Any, ...]) -> None:
    name, topology, accumulation, remat = row
    found = estimate(
        experiment(name, accumulation=accumulation, remat=remat), parse_topology(topology)
    )
    page = (Path(__file__).parent.parent / "docs" / "plans.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {name} | {topology} |")]
    _, _, cut, _, fits, estimated, compiled, *_ = line.strip("| ").split(" | ")
    assert cut == f"{found.rows} x {accumulation}"
    assert fits == "yes"
    assert float(estimated) == pytest.approx(found.estimated_bytes / GIB, abs=0.005)
    assert float(estimated) == pytest.approx(float(compiled.split()[0]), rel=0.15)


@pytest.mark.parametrize("memory_gib", [60.0, 70.0, 80.0])
def test_a_budget_repeats_a_fifth_less_than_blocks_alone_that_fit_it(memory_gib: float) -> None:
    chosen = experiment("1_1b", accumulation=64, remat="budget", memory_gib=memory_gib)
    found = estimate(chosen, parse_topology("h200:1"))
    assert found.block_alone is not None
    layers, times = found.block_alone
    assert 0 < layers < chosen.model.num_layers
    assert found.estimated_bytes <= memory_gib * GIB
    assert times is not None
    assert times >= 1 / 0.8
    assert f"block alone, on {layers} layers" in format_estimate(chosen, found)


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(fsdp=2),
        MeshConfig(replica=2),
        MeshConfig(replica=2, fsdp=8),
        MeshConfig(tensor=2),
    ],
)
def test_the_advice_is_taken_as_it_stands(mesh: MeshConfig, capsys) -> None:
    given = [
        part
        for name, value in dataclasses.asdict(mesh).items()
        if value is not None
        for part in (f"--mesh.{name}", str(value))
    ]
    command = ["--exp", "3b", "--topology", "v5e:4x4", *given]
    plan.main(command)
    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("does not fit: ")
    )
    advised = line.partition("try ")[2].partition(" (")[0].split()
    plan.main([*command, *advised])
    assert "does not fit" not in capsys.readouterr().out


def test_devices_that_compute_all_heads_lower_the_share_of_the_peak() -> None:
    """MFU is of the model's FLOPs, however many devices compute them."""
    topology = parse_topology("h100:8")
    alone, eight = (
        estimate(experiment("3b", MeshConfig(tensor=tensor), accumulation=32), topology)
        for tensor in (1, 8)
    )
    assert alone.model_flops == eight.model_flops
    assert alone.model_flops == 3 * flops_per_token(load_experiment("3b").model) * 2**22 / 8
    assert eight.bound.mfu < 0.6 < alone.bound.mfu


@pytest.mark.parametrize(("name", "slower"), [("v5e:2x4", 6), ("h100:8", 989 / 67)])
def test_float32_takes_its_own_peak_and_twice_the_bytes(name: str, slower: float) -> None:
    topology = parse_topology(name)
    half, whole = (
        estimate(experiment(accumulation=64, remat="block", dtype=dtype), topology)
        for dtype in ("bfloat16", "float32")
    )
    assert whole.notes == ()
    assert whole.bound.compute_seconds == pytest.approx(slower * half.bound.compute_seconds)
    assert whole.bound.mfu == pytest.approx(half.bound.mfu / slower)  # of the peak in bfloat16
    assert "of the peak in bfloat16" in format_estimate(experiment(dtype="float32"), whole)
    # What is float32 in either stays: gradients, logits, the state.
    assert 1.5 < whole.bound.memory_seconds / half.bound.memory_seconds < 2


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--slices", "2"], "--slices needs a machine"),
        (["--topology", "v5e:4x4", "--search", "--compile"], "two questions"),
        (["--topology", "v5e:4x4", "--python", "x"], "give --compile as well"),
        (
            ["--topology", "v5p:8x8x16", "--search", *["--training.global-batch-size", "12"]],
            "cannot be divided among",
        ),
    ],
)
def test_flags_that_say_nothing_together_are_refused(flags: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        plan.main(["--exp", "3b", "--data.lanes", "1", *flags])
