"""`benchmark norms` times the norms of the paper's Table 8, each way computing the same."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import random_params, tiny

from openelm_jax import benchmark
from openelm_jax.benchmarks import generation_sides, norms, norms_in_model
from openelm_jax.benchmarks.norms import jax_pass, norm_shapes, random_inputs, torch_pass
from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.generation.forward import apply, decoding_params
from openelm_jax.model.decoder import Decoder, Params

SHAPES = [(3, 64), (3, 4, 16)]
MAKERS = {"jax": jax_pass, "torch": torch_pass}


def test_openelm_has_113_norms_a_token_and_olmo_33() -> None:
    openelm, olmo = norm_shapes("1_1b", 1), norm_shapes("olmo_1_18b", 36)
    assert len(openelm) == 113
    assert openelm[:4] == [(1, 2048), (1, 16, 64), (1, 4, 64), (1, 2048)]
    assert openelm[-4:] == [(1, 32, 64), (1, 8, 64), (1, 2048), (1, 2048)]
    assert olmo == [(36, 2048)] * 33


@pytest.mark.parametrize("program", MAKERS)
@pytest.mark.parametrize("kind", norms.KINDS)
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_every_way_computes_the_norm(program: str, kind: str, dtype: str, error: float) -> None:
    if program == "torch":
        pytest.importorskip("torch")
        if kind not in norms.IN_TORCH:
            pytest.skip("PyTorch runs eagerly")
    for x, normal in zip(
        random_inputs(SHAPES), MAKERS[program](kind, SHAPES, dtype)(), strict=True
    ):
        exact = x - x.mean(axis=-1, keepdims=True) if kind.startswith("layer") else x
        epsilon = 1e-5 if kind.startswith("layer") else 1e-6
        exact = exact / np.sqrt(np.square(exact).mean(axis=-1, keepdims=True) + epsilon)
        found = np.asarray(normal.float() if program == "torch" else normal, np.float32)
        np.testing.assert_allclose(found, exact, rtol=error, atol=error)


def test_passes_are_timed_until_a_tenth_of_a_second_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]

    def run() -> None:
        clock[0] += 0.03

    monkeypatch.setattr(norms.time, "perf_counter", lambda: clock[0])
    assert norms.seconds_of(run) == pytest.approx(0.03)
    assert clock[0] == pytest.approx(0.03 * 5)  # one is not counted


def test_a_rehearsal_prints_both_tables_and_json_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "TOKENS", (1,))
    monkeypatch.setattr(norms, "MODELS", ("olmo_1_18b",))
    argv = ["norms", "--backend", "jax", "--dtype", "float32", "--rounds", "2"]
    benchmark.main([*argv, "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["kind"] for row in rows] == list(norms.KINDS)
    for row in rows:
        assert row["invocations"] == 33
        call, token = row["call_microseconds"], row["token_microseconds"]
        assert token["median"] == pytest.approx(33 * call["median"])
        assert 0 < call["low"] <= call["high"]
    shown = norms.format_norms({}, None, [norms.NormRow(**_spreads(row)) for row in rows], [])
    assert [line.split()[:5] for line in shown.splitlines() if "op by op" in line] == [
        ["OLMo", "1.18B", "jax", "RMSNorm,", "op"]
    ]
    paper = [line.split() for line in shown.splitlines() if "Apex" in line]
    assert [line[-2:] for line in paper] == [["113", "113.42"]]


def _spreads(row: dict) -> dict:
    spreads = {
        name: norms.Spread(**value) for name, value in row.items() if isinstance(value, dict)
    }
    return row | spreads


PROMPTS_BT = np.random.default_rng(0).integers(3, 160, (1, 12), dtype=np.int32)


@pytest.mark.heavy
def test_a_model_generates_with_either_norm_or_without_any() -> None:
    config = tiny(num_layers=1, vocab_size=160)
    params = decoding_params(random_params(config), "float32")
    streams = norms_in_model.normalized_streams(config, params, "float32", PROMPTS_BT, 9)
    found = {
        name: np.concatenate([*stream(PROMPTS_BT, 9)], axis=1)[0].tolist()
        for name, stream in streams.items()
    }

    def chosen(config: ModelConfig, params: Params) -> list[int]:
        stream = generation_sides.our_stream(config, params, "float32")
        return np.concatenate([*stream(PROMPTS_BT, 9)], axis=1)[0].tolist()

    assert found["rms_norm"] == chosen(config, params)
    assert found["layer_norm"] == chosen(
        dataclasses.replace(config, normalization="layer_norm"),
        norms_in_model.with_biases(params),
    )
    assert len({tuple(tokens) for tokens in found.values()}) == 3


def test_without_norms_their_scales_do_not_count() -> None:
    config = tiny(num_layers=1, vocab_size=160)
    scaled = random_params(config)
    plain = jax.tree.map(lambda leaf: np.ones_like(leaf) if leaf.ndim == 1 else leaf, scaled)
    tokens_BT = jnp.asarray(PROMPTS_BT)

    def logits(params: Params) -> np.ndarray:
        placed = decoding_params(params, "float32")
        return np.asarray(apply(Decoder(config), placed, "__call__", tokens_BT))

    assert not np.array_equal(logits(scaled), logits(plain))
    with norms_in_model.without_norms():
        np.testing.assert_array_equal(logits(scaled), logits(plain))
    assert not np.array_equal(logits(scaled), logits(plain))


@pytest.mark.heavy
def test_normalizations_are_compared_by_turns_in_a_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "measure_norms", lambda *_: [])
    monkeypatch.setattr(norms, "model_of", lambda size: tiny(num_layers=1, vocab_size=160))
    monkeypatch.setattr(norms_in_model, "model_of", lambda size: tiny(num_layers=1, vocab_size=160))
    argv = ["--dtype", "float32", "--in-model", "270m", "--new-tokens", "9", "--rounds", "2"]
    benchmark.main(["norms", *argv, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [(row["normalization"], row["invocations"]) for row in found["in_model"]] == [
        *[("rms_norm", 5), ("layer_norm", 5), ("none", 0)]
    ]
    assert [figure["name"] for figure in found["figures"]] == [
        "generation_270m_float32_rms_norm_to_layer_norm",
        "generation_270m_float32_rms_norm_to_none",
    ]
    assert all(figure["repetitions"] == 2 for figure in found["figures"])
    rows = [norms_in_model.ModelRow(**_spreads(row)) for row in found["in_model"]]
    shown = norms_in_model.format_in_model(rows, [])
    assert [line.split()[:4] for line in shown if "no norms" in line] == [
        ["OpenELM", "270M", "no", "norms"]
    ]


def test_on_accelerators_rms_norm_must_be_within_three_percent() -> None:
    rates = {"rms_norm": [98.0, 96.0], "layer_norm": [100.0, 100.0], "none": [98.0, 96.0]}
    found = norms_in_model.norm_ratios(
        "1_1b", "bfloat16", {name: {"generation": each} for name, each in rates.items()}, 0.97
    )
    assert [figure.is_reached for figure in found] == [True, True]
    (slow, _) = norms_in_model.norm_ratios(
        "1_1b",
        "bfloat16",
        {name: {"generation": [96.0 if name == "rms_norm" else 100.0]} for name in rates},
        0.97,
    )
    assert slow.is_reached is False


def test_turns_turn_round() -> None:
    order: list[str] = []

    def stream_of(name: str) -> norms_in_model.Stream:
        def stream(prompts_BT: np.ndarray, new_tokens: int):
            order.append(name)
            yield np.zeros((1, 9))

        return stream

    streams = {name: stream_of(name) for name in "abc"}
    for number in range(2):
        norms_in_model.round_of(streams, number, PROMPTS_BT, 9)
    # Each is warmed up before it is timed.
    assert "".join(order) == "aabbccccbbaa"


def test_without_pytorch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'openelm_jax\[torch\]'"):
        benchmark.main(["norms"])


@pytest.mark.parametrize(
    ("argv", "mistake"),
    [
        (["--rounds", "0"], "--rounds is 0: it must be at least 1"),
        (["--in-model", "10m", "--new-tokens", "1"], "--new-tokens is 1: it must be at least 2"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_anything_is(
    argv: list[str], mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "process", None)  # none may be started
    with pytest.raises(UserError, match=mistake):
        benchmark.main(["norms", "--backend", "jax", *argv])
