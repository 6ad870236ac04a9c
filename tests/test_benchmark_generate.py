"""`benchmark generate` measures what the paper's Table 7 does, of equal models, by turns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import tiny

from openelm_jax import benchmark
from openelm_jax.benchmarks import (
    bandwidth,
    generation,
    generation_models,
    generation_report,
    generation_sides,
)
from openelm_jax.benchmarks.generation_models import (
    OTHERS,
    cost_of,
    cost_of_other,
    model_of,
    other_model,
    uniform,
    write_random,
)
from openelm_jax.benchmarks.generation_report import Key, Result, bound_of, make_ratios, make_row
from openelm_jax.benchmarks.generation_sides import PROGRAMS, Facts, Turn, time_stream, warm_up
from openelm_jax.errors import UserError
from openelm_jax.model.scaling import layer_shapes, parameter_count

PUBLISHED = {
    "opt_350m": 331_196_416,
    "mobillama_0_5b": 534_865_920,
    "mobillama_0_8b": 819_315_200,
    "pythia_1_4b": 1_414_647_808,
    "mobillama_1_26b": 1_261_529_088,
    "olmo_1_18b": 1_176_764_416,
}


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("270m", 271_527_168),
        ("450m", 457_179_136),
        ("1_1b", 1_079_891_456),
        ("3b", 3_036_647_424),
    ],
)
def test_sizes_have_the_published_parameters(size: str, parameters: int) -> None:
    assert parameter_count(model_of(size)) == parameters


def test_the_small_size_has_ten_million_parameters() -> None:
    assert round(parameter_count(model_of("10m")) / 1e6) == 10


@pytest.mark.parametrize("size", generation_models.SIZES)
def test_a_uniform_model_has_the_layers_and_the_budget_but_one_shape(size: str) -> None:
    config = model_of(size)
    made = uniform(config)
    assert len(layer_shapes(made)) == len(layer_shapes(config))
    assert len({dataclasses.astuple(shape) for shape in layer_shapes(made)}) == 1
    assert made.model_dim == config.model_dim
    # Half a step of the FFN's width in every layer.
    step = 3 * config.model_dim * 64 * config.num_layers
    assert abs(parameter_count(made) - parameter_count(config)) <= step / 2


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_have_the_published_parameters(name: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = other_model(OTHERS[name])
    assert cost_of_other(model).parameters == PUBLISHED[name]


def test_one_feed_forward_serves_all_layers_of_mobillama_and_is_read_in_each() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with torch.device("meta"):
        shared, own = (other_model(OTHERS[f"mobillama_{size}"]) for size in ("0_5b", "1_26b"))
    assert len({id(layer.mlp) for layer in shared.model.layers}) == 1
    assert len({id(layer.mlp) for layer in own.model.layers}) == 22
    # The same layers otherwise: all that a token reads is equal.
    assert cost_of_other(shared).weights_read == cost_of_other(own).weights_read
    embedding = 32000 * 2048
    assert cost_of_other(own).weights_read == PUBLISHED["mobillama_1_26b"] - embedding
    assert cost_of_other(own).cache_per_token == 22 * 2 * 2048


def test_the_command_names_the_models_and_sizes_that_there_are() -> None:
    assert benchmark.GENERATION_SIZES == generation_models.SIZES
    assert set(benchmark.OTHERS) == {generation.UNIFORM, *OTHERS}
    assert set(benchmark.PRECISIONS) == generation_sides.BYTES.keys() | generation_sides.BITS.keys()
    assert set(benchmark.BACKENDS) == PROGRAMS.keys() - {"transformers"}


@pytest.fixture
def directory(tmp_path: Path) -> str:
    write_random(tmp_path / "tiny", tiny(vocab_size=160), "float32")
    return str(tmp_path / "tiny")


PROMPTS_BT = np.random.default_rng(0).integers(3, 160, (2, 12), dtype=np.int32)


def test_all_programs_choose_the_same_tokens_and_our_batch_is_one_by_one(directory: str) -> None:
    def generated(program: str, prompts_BT: np.ndarray) -> list[list[int]]:
        stream = PROGRAMS[program](directory, "float32", 50).stream
        return np.concatenate([*stream(prompts_BT, 20)], axis=1).tolist()

    ours = generated("jax", PROMPTS_BT)
    assert len(set(ours[0])) > 5  # not one token over and over
    assert generated("jax", PROMPTS_BT[:1]) == ours[:1]
    for program, package, prompts_BT in (
        ("torch", "transformers", PROMPTS_BT),
        ("mlx", "mlx_lm", PROMPTS_BT[:1]),
    ):
        pytest.importorskip(package)
        assert generated(program, prompts_BT) == ours[: len(prompts_BT)]


def test_a_side_reads_its_weights_as_they_are_stored_and_its_cache_as_it_computes(
    directory: str,
) -> None:
    config = tiny(vocab_size=160)
    numbers, vectors = parameter_count(config), 3 * (2 * 64 + 2 * 16) + 64
    keys_and_values = sum(2 * shape.num_kv_heads * 16 for shape in layer_shapes(config))
    facts = {name: PROGRAMS["jax"](directory, name, 50).facts for name in benchmark.PRECISIONS}
    assert facts["float32"] == Facts(numbers, 4 * numbers, 4 * keys_and_values, "cpu")
    # Norms stay in float32.
    matrices = numbers - vectors
    assert facts["bfloat16"] == Facts(
        numbers, 2 * matrices + 4 * vectors, 2 * keys_and_values, "cpu"
    )
    # A scale for each output, at most 160 inputs to one.
    assert matrices < facts["int8"].weight_bytes - 4 * vectors < 1.2 * matrices
    assert facts["int8"].cache_bytes == facts["int4"].cache_bytes == 4 * keys_and_values
    assert facts["int4"].weight_bytes < facts["bfloat16"].weight_bytes
    assert cost_of(config).cache_per_token == keys_and_values


@pytest.mark.parametrize("architecture", ["OPT", "GPTNeoX", "Olmo", "Llama"])
def test_other_programs_generate_with_a_static_cache_what_they_do_without(
    architecture: str,
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    (name, *_) = [name for name, other in OTHERS.items() if other.architecture == architecture]
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    small |= {"vocab_size": 160, "initializer_range": 0.2, "init_std": 0.2}
    widths = {"intermediate_size": 96, "ffn_dim": 96, "word_embed_proj_dim": 32}
    fields = OTHERS[name].fields
    small |= {field: value for field, value in widths.items() if field in fields}
    small |= {"num_key_value_heads": 4} if "num_key_value_heads" in fields else {}
    torch.manual_seed(0)
    model = other_model(dataclasses.replace(OTHERS[name], fields=fields | small))

    stream = generation_sides.torch_stream(model)
    found_BT = np.concatenate([PROMPTS_BT, *stream(PROMPTS_BT, 6)], axis=1)

    with torch.inference_mode():
        logits_BTV = model(torch.from_numpy(found_BT[:, :-1].astype(np.int64)), use_cache=False)[0]
    assert found_BT[:, 12:].tolist() == logits_BTV[:, 11:].argmax(dim=-1).tolist()


def scripted(pieces: list[int], drawn: list[int]) -> Any:
    """Return a stream of pieces of tokens, which notes how many of them were drawn."""

    def stream(prompts_BT: np.ndarray, new_tokens: int) -> Iterator[np.ndarray]:
        for piece in pieces:
            drawn.append(piece)
            yield np.full((len(prompts_BT), piece), len(drawn))

    return stream


def test_the_prompts_time_ends_with_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(generation_sides.time, "perf_counter", lambda: float(sum(drawn)))
    turn = time_stream(scripted([1, 4, 4], drawn), PROMPTS_BT, 9)
    assert turn == Turn(prompt_seconds=1.0, seconds=9.0)


def test_a_stream_that_ends_early_is_not_timed() -> None:
    with pytest.raises(AssertionError, match="5 tokens of 9"):
        time_stream(scripted([1, 4], []), PROMPTS_BT, 9)


def test_a_warm_up_is_eight_tokens_in_whole_blocks() -> None:
    drawn: list[int] = []
    assert warm_up(scripted([1, 4, 4, 4], drawn), PROMPTS_BT, 13).shape == (2, 8)
    assert drawn == [1, 4, 4]


def result(model: str, program: str, dtype: str, batch: int = 1, **changes: Any) -> Result:
    fields: dict[str, Any] = {
        "facts": Facts(parameters=1000, weight_bytes=3600, cache_bytes=8, device="cpu"),
        "turns": (Turn(0.5, 10.5), Turn(0.25, 5.25), Turn(1.0, 11.0)),
        "prompt_tokens": 10,
        "new_tokens": 101,
    }
    key = Key(model, program, dtype, batch)
    return Result(key=key, **(fields | changes))


def test_rates_count_the_first_token_with_the_prompt_and_all_rows_of_a_batch() -> None:
    assert result("270m", "jax", "float32").rates() == {
        "prompt": [20, 40, 10],
        "generation": [10, 20, 10],
        "total": [111 / 10.5, 111 / 5.25, 111 / 11],
    }
    assert result("270m", "jax", "float32", batch=4).rates()["generation"] == [40, 80, 40]


def test_the_bound_is_weights_once_and_the_mean_cache_of_every_row() -> None:
    # Of each row 8 bytes for each of 10 + 101 / 2 tokens.
    one = bound_of(result("270m", "jax", "float32"), {"cpu": 4084.0})
    assert (one.weight_bytes, one.cache_bytes) == (3600, 484)
    assert one.tokens_per_second == 1
    three = bound_of(result("270m", "torch", "float32", batch=3), {"cpu": 5052.0})
    assert (three.weight_bytes, three.cache_bytes) == (3600, 1452)
    assert three.tokens_per_second == 3
    assert bound_of(result("270m", "torch", "float32"), {"gpu": 1.0}).tokens_per_second is None


def test_a_row_has_medians_its_share_and_the_papers_figures() -> None:
    measured = result("270m", "jax", "float32")
    row = make_row(measured, bound_of(measured, {"cpu": 20 * 4084.0}))
    assert dataclasses.astuple(row.generation) == (10, 10, 20)
    assert row.share == 0.5
    assert row.paper == 159.67
    assert make_row(result("mobillama_0_5b", "torch", "float32"), row.bound).paper is None


def test_ratios_are_of_turns_of_the_same_round() -> None:
    slow = (Turn(1.0, 21.0), Turn(0.25, 10.25), Turn(1.0, 41.0))
    results = [
        result("270m", "jax", "float32"),
        result("270m", "jax", "bfloat16", turns=slow),
        result("270m", "torch", "float32", turns=slow),
        result("270m_uniform", "jax", "float32", turns=slow),
        result("270m", "jax", "float32", batch=8),
        result("270m", "torch", "float32", facts=Facts(1000, 3600, 8, "gpu"), batch=8),
    ]
    found = {figure.name: figure for figure, _ in make_ratios(results)}
    to_torch = found["generation_270m_jax_float32_1_to_270m_torch_float32_1"]
    assert (to_torch.value, to_torch.low, to_torch.high) == (2, 2, 4)
    assert (to_torch.least, to_torch.is_reached) == (2.2, False)
    assert found["prompt_270m_jax_float32_1_to_270m_torch_float32_1"].value == 1
    assert found["generation_270m_jax_bfloat16_1_to_270m_jax_float32_1"].least == 0.7
    assert found["generation_270m_jax_float32_8_to_270m_jax_float32_1"].value == 8
    assert found["generation_270m_jax_float32_8_to_270m_jax_float32_1"].least == 4
    assert found["generation_270m_jax_float32_1_to_270m_uniform_jax_float32_1"].value == 2
    # Another device has no target.
    assert found["generation_270m_jax_float32_8_to_270m_torch_float32_8"].least is None
    assert len(found) == 2 * 6


def test_readers_are_shown_the_ratios_that_they_want_and_programs_all_of_them() -> None:
    programs = [(p, dtype) for dtype in ("float32", "bfloat16") for p in ("jax", "torch", "mlx")]
    sides = [*programs, ("jax", "int8")]
    results = [result("450m", *side, batch=batch) for side in sides for batch in (1, 8)]
    results += [result("450m_uniform", "jax", dtype) for dtype in ("float32", "int8")]
    names = {True: set[str](), False: set[str]()}
    for figure, is_shown in make_ratios(results):
        names[is_shown].add(figure.name)
    of_batch_1 = {
        *("float32_1_to_450m_torch_float32_1", "float32_1_to_450m_mlx_float32_1"),
        *("bfloat16_1_to_450m_torch_bfloat16_1", "bfloat16_1_to_450m_mlx_bfloat16_1"),
        *("bfloat16_1_to_450m_jax_float32_1", "int8_1_to_450m_jax_float32_1"),
    }
    to_uniform = {f"{t}_1_to_450m_uniform_jax_{t}_1" for t in ("float32", "int8")}
    expected = of_batch_1 | {name.replace("_1", "_8") for name in of_batch_1} | to_uniform
    assert names[True] == {
        f"{rate}_450m_jax_{name}" for rate in ("prompt", "generation") for name in expected
    }
    assert "generation_450m_jax_int8_1_to_450m_torch_float32_1" in names[False]
    assert "generation_450m_jax_float32_8_to_450m_jax_float32_1" in names[False]


def test_ratios_with_a_target_are_shown_whatever_they_compare() -> None:
    results = [
        *(result("270m", "jax", "float32"), result("270m", "jax", "float32", batch=8)),
        result("270m", "torch", "bfloat16"),
    ]
    shown = {figure.name for figure, is_shown in make_ratios(results) if is_shown}
    assert shown == {
        "generation_270m_jax_float32_1_to_270m_torch_bfloat16_1",
        "generation_270m_jax_float32_8_to_270m_jax_float32_1",
    }


def test_reading_bandwidth_is_what_numpy_reads() -> None:
    found = bandwidth.host_bandwidth(np.ones(2**20, np.float32))
    assert 1e8 < found < 1e13


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    benchmark.main(["generate", *argv])
    return capsys.readouterr().out


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "model_of", lambda size: tiny(vocab_size=160))
    monkeypatch.setattr(generation, "READ_BYTES", 2**20)


@pytest.mark.heavy
@pytest.mark.usefixtures("small_sizes")
def test_programs_are_measured_by_turns_in_processes_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    found = json.loads(
        run(
            capsys,
            *("--backend", "jax,torch", "--dtype", "float32"),
            *("--new-tokens", "12", "--rounds", "2", "--json"),
        )
    )
    rows = {(row["model"], row["program"]): row for row in found["rows"]}
    assert rows.keys() == {("270m", "jax"), ("270m", "torch")}
    for row in rows.values():
        assert row["device"] == "cpu"
        assert len(row["turns"]) == 2
        assert 0 < row["generation"]["low"] <= row["generation"]["high"]
    assert found["machine"].keys() >= {"processor", "load", "jax", "torch", "date"}
    assert found["bandwidths"]["cpu"] > 0
    assert "RTX 4090" in found["paper"]["table_7"]
    assert any(figure["name"].startswith("generation_270m_jax") for figure in found["figures"])


@contextlib.contextmanager
def no_process(serve: Any, *arguments: Any, **_: Any) -> Iterator[Any]:
    """Answer like a side; none is started."""

    def ask(question: Any) -> Any:
        if serve is generation.serve_bandwidth:
            return "cpu", 1e9
        if question == "facts":
            return Facts(1000, 4000, 8, "cpu")
        kind, batch = question
        seconds = {"jax": 1.0, "torch": 2.0, "mlx": 4.0}.get(arguments[0], 3.0)
        return np.full((batch, 8), 7) if kind == "first" else Turn(0.1, 0.1 + seconds)

    yield ask


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch, small_sizes: None) -> None:
    monkeypatch.setattr(generation, "process", no_process)
    monkeypatch.setattr(generation, "_is_missing", lambda package: False)


@pytest.mark.usefixtures("no_processes")
def test_the_table_is_shaped_like_the_papers_with_its_figures_beside_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    others = "uniform,olmo_1_18b"
    which = ("--others", others, "--batch", "1,2", "--dtype", "float32,bfloat16,int8")
    shown = run(capsys, *which, "--new-tokens", "101")
    lines = [line.split() for line in shown.splitlines()]

    def rows(*cells: str) -> list[list[str]]:
        return [line for line in lines if tuple(line[: len(cells)]) == cells]

    (ours,) = rows("OpenELM", "270M", "jax", "float32", "1")
    assert ours[-1] == "159.67"
    mlx = rows("OpenELM", "270M", "mlx")
    # One text at a time.
    assert [line[4] for line in mlx] == ["1", "1"]
    (olmo,) = rows("OLMo", "1.18B", "transformers", "bfloat16", "2")
    assert olmo[-1] == "203"
    assert rows("OpenELM", "270M", "jax", "int8", "1")
    assert not rows("OpenELM", "270M", "torch", "int8")
    assert rows("uniform,", "as", "OpenELM", "270M", "jax", "bfloat16", "1")
    assert "target at least 2.2: MISSED" in shown
    assert "generation: jax int8 to jax float32" in shown
    assert "generation: jax int8 to torch" not in shown


@pytest.mark.usefixtures("no_processes")
def test_json_has_the_figures_too_that_readers_are_not_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    which = ("--backend", "jax,torch", "--dtype", "float32,int8")
    found = json.loads(run(capsys, *which, "--new-tokens", "9", "--json"))
    name = "generation_270m_jax_int8_1_to_270m_{}_float32_1"
    assert name.format("jax") in {figure["name"] for figure in found["figures"]}
    assert name.format("torch") in {figure["name"] for figure in found["further"]}


@pytest.mark.usefixtures("no_processes")
def test_what_is_named_twice_is_measured_once(capsys: pytest.CaptureFixture[str]) -> None:
    twice = ("--size", "270m,270m", "--backend", "jax,jax", "--batch", "1,1")
    found = json.loads(
        run(capsys, *twice, "--dtype", "float32,float32", "--new-tokens", "9", "--json")
    )
    assert [len(row["turns"]) for row in found["rows"]] == [3]


@pytest.mark.usefixtures("no_processes")
def test_a_text_longer_than_the_models_is_a_note_only(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main(["generate", "--backend", "jax", "--new-tokens", "100"])
    assert "note: 270m is made for texts of 64 tokens, not 136" in capsys.readouterr().err


@pytest.mark.usefixtures("no_processes")
def test_programs_that_generate_other_tokens_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    firsts = iter([np.zeros((1, 8)), np.ones((1, 8))])
    entries = [generation.Entry("270m", program, "float32", "") for program in ("jax", "torch")]
    with pytest.raises(AssertionError, match="torch generates other tokens of 270m"):
        generation._check_same({(entry, 1): next(firsts) for entry in entries})


@pytest.mark.parametrize(
    ("argv", "mistake"),
    [
        (["--new-tokens", "1"], r"--new-tokens is 1: it must be at least 2\."),
        (["--rounds", "0"], r"--rounds is 0: it must be at least 1\."),
        (["--batch", "0"], r"--batch is 0: it must be at least 1\."),
        (["--backend", "torch", "--dtype", "int8"], r"only jax has weights in so few bits"),
        (["--dtype", "int4", "--others", "opt_350m"], r"float32 or bfloat16 in --dtype"),
        (["--backend", "mlx", "--batch", "8"], r"one text at a time: have 1 in --batch"),
    ],
)
@pytest.mark.usefixtures("no_processes")
def test_what_cannot_be_measured_is_refused_in_a_sentence(argv: list[str], mistake: str) -> None:
    with pytest.raises(UserError, match=mistake):
        benchmark.main(["generate", *argv])


@pytest.mark.parametrize(
    ("missing", "argv", "extra"),
    [
        ("torch", ["--backend", "jax,torch"], "torch"),
        ("mlx_lm", ["--backend", "mlx"], "mlx"),
        ("transformers", ["--backend", "jax", "--others", "opt_350m"], "torch"),
    ],
)
@pytest.mark.usefixtures("small_sizes")
def test_without_a_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, missing: str, argv: list[str], extra: str
) -> None:
    monkeypatch.setattr(generation, "_is_missing", lambda package: package == missing)
    with pytest.raises(UserError, match=rf"{missing}.* pip install 'openelm_jax\[{extra}\]'"):
        benchmark.main(["generate", *argv])


@pytest.mark.parametrize(
    ("argv", "known"),
    [
        (["--size", "7b"], "no size 7b; known are 270m, 450m, 1_1b, 3b, 10m"),
        (["--backend", "onnx"], "no backend onnx; known are jax, torch, mlx"),
        (["--others", "gpt2"], "no others gpt2; known are uniform, opt_350m"),
        (["--batch", "two"], "two is no list of whole numbers like 1,8"),
    ],
)
def test_unknown_names_are_answered_with_the_known_ones(
    argv: list[str], known: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["generate", *argv])
    assert ended.value.code == 2
    assert known in capsys.readouterr().err


def test_shares_of_the_bound_have_their_target() -> None:
    measured = result("270m", "jax", "float32")
    bound = bound_of(measured, {"cpu": 20 * 4084.0})
    ((figure, is_shown),) = generation_report.make_shares([measured], [bound])
    assert is_shown
    assert (figure.value, figure.least, figure.is_reached) == (50, 50, True)
