"""`benchmark norms` times the norms of the paper's Table 8, each way computing the same."""

from __future__ import annotations

import json

import numpy as np
import pytest

from openelm_jax import benchmark
from openelm_jax.benchmarks import norms
from openelm_jax.benchmarks.norms import jax_pass, norm_shapes, random_inputs, torch_pass
from openelm_jax.errors import UserError

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
    shown = norms.format_norms({}, None, [norms.NormRow(**_spreads(row)) for row in rows])
    assert [line.split()[:5] for line in shown.splitlines() if "op by op" in line] == [
        ["OLMo", "1.18B", "jax", "RMSNorm,", "op"]
    ]
    paper = [line.split() for line in shown.splitlines() if "Apex" in line]
    assert [line[-4:] for line in paper] == [["113", "4,280.66", "113.42", "117.81"]]


def _spreads(row: dict) -> dict:
    spreads = {
        name: norms.Spread(**value) for name, value in row.items() if isinstance(value, dict)
    }
    return row | spreads


def test_without_pytorch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'openelm_jax\[torch\]'"):
        benchmark.main(["norms"])


def test_no_rounds_are_refused() -> None:
    with pytest.raises(UserError, match="--rounds is 0: it must be at least 1"):
        benchmark.main(["norms", "--backend", "jax", "--rounds", "0"])
