"""Apple's Hugging Face layout, read and written: every tensor, every bit, every refusal."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from huggingface_directories import read_huggingface, with_rows, write_huggingface
from small_models import random_params, tiny

from openelm_jax import export
from openelm_jax.errors import UserError
from openelm_jax.model.decoder import init_params
from openelm_jax.tokenizer import train_tokenizer
from openelm_jax.weights import safetensors_files
from openelm_jax.weights.names import named_weights

FIXTURE = Path(__file__).parent / "data" / "tiny-openelm"


def assert_same_params(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(directory / "model.safetensors")


@pytest.fixture
def damaged(tmp_path):
    """A copy of the fixture whose configuration and tensors a test changes."""
    directory = tmp_path / "damaged"
    shutil.copytree(FIXTURE, directory)

    def change(fields=None, tensors=None):
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | (fields or {})))
        kept = {
            k: v for k, v in (read_tensors(directory) | (tensors or {})).items() if v is not None
        }
        safetensors.numpy.save_file(kept, directory / "model.safetensors")
        return directory

    return change


# --- what is written ---------------------------------------------------------------------------


def test_the_fixture_exports_to_the_files_it_came_from(tmp_path):
    config, params = read_huggingface(FIXTURE)
    write_huggingface(tmp_path / "export", config, params)

    original, exported = (
        json.loads((directory / "config.json").read_text())
        for directory in (FIXTURE, tmp_path / "export")
    )
    assert exported == original | {"num_hidden_layers": 4}  # which generic tools ask for
    original, exported = read_tensors(FIXTURE), read_tensors(tmp_path / "export")
    assert len(exported) == 34
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert exported[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize(
    ("dtype", "in_header"), [("float32", "F32"), ("bfloat16", "BF16"), ("float16", "F16")]
)
def test_the_file_says_what_it_holds(tmp_path, dtype, in_header):
    config = tiny()
    write_huggingface(tmp_path / "export", config, random_params(config), dtype=dtype)

    assert json.loads((tmp_path / "export" / "config.json").read_text())["torch_dtype"] == dtype
    with safetensors.safe_open(tmp_path / "export" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {in_header}  # noqa: SIM118


def test_the_weights_are_as_readable_as_the_rest(tmp_path):
    write_huggingface(tmp_path / "export", tiny(), random_params(tiny()))

    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "export").iterdir()}
    assert len(modes) == 1


def test_torch_reads_the_bfloat16_that_it_would_have_rounded_to(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    config = tiny()
    params = random_params(config)
    write_huggingface(tmp_path / "export", config, params, dtype="bfloat16")

    tensors = load_file(tmp_path / "export" / "model.safetensors")

    qkv = torch.tensor(params["layers_1"]["attention"]["qkv"]).to(torch.bfloat16)
    assert torch.equal(tensors["transformer.layers.1.attn.qkv_proj.weight"], qkv.T)
    embedding = torch.tensor(params["embedding"]).to(torch.bfloat16)
    assert torch.equal(tensors["transformer.token_embeddings.weight"], embedding)


def test_an_untied_layer_norm_model_has_a_head_and_biases():
    names = {w.name for w in named_weights(tiny(tie_embeddings=False, normalization="layer_norm"))}

    assert names >= {
        "lm_head.weight",
        "transformer.norm.bias",
        "transformer.layers.2.attn.q_norm.bias",
        "transformer.layers.2.ffn_norm.bias",
    }
    assert "lm_head.weight" not in {w.name for w in named_weights(tiny())}


def test_corenets_own_names_have_no_prefix():
    names = [weight.name for weight in named_weights(tiny(tie_embeddings=False), "corenet")]

    assert names[0] == "token_embeddings.weight"
    assert names[1] == "layers.0.attn.qkv_proj.weight"
    assert names[-2:] == ["norm.weight", "classifier.weight"]


def test_the_map_covers_every_parameter():
    for config in (tiny(), tiny(tie_embeddings=False, normalization="layer_norm")):
        shapes = jax.eval_shape(lambda config=config: init_params(config, 0))
        leaves = {
            tuple(key.key for key in path): leaf.shape
            for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
        }
        assert {weight.path: weight.shape for weight in named_weights(config)} == leaves


# --- round trips -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(tiny(), id="as published"),
        pytest.param(tiny(tie_embeddings=False), id="untied"),
        pytest.param(tiny(normalization="layer_norm"), id="layer_norm"),
        pytest.param(tiny(ffn_with_glu=False, activation="gelu"), id="gelu without a gate"),
        pytest.param(tiny(normalize_qk_projections=False), id="no QK-norm"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_round_trip_of_a_round_trip_keeps_every_bit(tmp_path, config, dtype):
    params = random_params(config)
    if dtype == "bfloat16":
        params = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), params)
    for name in ("first", "second"):
        write_huggingface(tmp_path / name, config, params, dtype=dtype)
        config_read, params_read = read_huggingface(tmp_path / name)
        assert config_read == config
        assert_same_params(params_read, params)
        config, params = config_read, params_read
    for file in ("config.json", "model.safetensors"):
        first, second = ((tmp_path / name / file).read_bytes() for name in ("first", "second"))
        assert first == second


def test_files_above_a_size_are_split_and_read_together(tmp_path):
    config = tiny()
    params = random_params(config)
    write_huggingface(tmp_path / "export", config, params, max_shard_bytes=100_000)

    files = sorted(file.name for file in (tmp_path / "export").glob("*.safetensors"))
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    total = sum(np.prod(weight.shape) for weight in named_weights(config)) * 4
    assert index["metadata"]["total_size"] == total
    assert_same_params(read_huggingface(tmp_path / "export")[1], params)

    (tmp_path / "export" / files[1]).unlink()
    with pytest.raises(UserError, match=f"{files[1]} is missing"):
        read_huggingface(tmp_path / "export")


NORM = "transformer.norm.weight"


def sharded(folder: Path) -> tuple[Path, list[Path], dict[str, str]]:
    """Return a directory of several files, the files, and the index's map."""
    write_huggingface(folder, tiny(), random_params(tiny()), max_shard_bytes=100_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder, sorted(folder.glob("*.safetensors")), index["weight_map"]


def test_a_tensor_that_a_second_file_holds_too_is_refused(tmp_path):
    """Whichever was read last would win, without a word."""
    directory, (first, *_, last), weight_map = sharded(tmp_path / "export")
    name = next(name for name, file in weight_map.items() if file == first.name)
    tensors = safetensors.numpy.load_file(last)
    zeros = np.zeros_like(safetensors.numpy.load_file(first)[name])
    safetensors.numpy.save_file(tensors | {name: zeros}, last)

    holds = f"{last.name} holds {name}, but model.safetensors.index.json says otherwise"
    with pytest.raises(UserError, match=holds):
        read_huggingface(directory)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("model-00001-of-00005.safetensors", f"lacks {NORM}, but"),
        ("../export/model-00001-of-00005.safetensors", f"has {NORM} in '../export/model.*no name"),
        ("..", f"has {NORM} in '..', which is no name of a file beside it"),
        (3, f"has {NORM} in 3, which is no name"),
        (["x"], f"has {NORM} in .'x'., which is no name"),
        (None, f"holds {NORM}, but"),
    ],
    ids=str,
)
def test_an_index_that_does_not_fit_the_files_is_refused(tmp_path, changed, message):
    directory, files, weight_map = sharded(tmp_path / "export")
    assert len(files) == 5
    weight_map[NORM] = changed
    kept = {name: file for name, file in weight_map.items() if file is not None}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": kept}))

    with pytest.raises(UserError, match=message):
        read_huggingface(directory)


# --- the vocabulary ----------------------------------------------------------------------------


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_rows_without_a_token_are_cut_and_come_back_as_the_mean(tmp_path, tie_embeddings):
    config = tiny(tie_embeddings=tie_embeddings)
    params = random_params(config)
    tables = ["embedding"] if tie_embeddings else ["embedding", "head"]
    write_huggingface(tmp_path / "export", *with_rows(config, params, 32))

    cut, cut_params = read_huggingface(tmp_path / "export")
    wide, wide_params = read_huggingface(tmp_path / "export", vocab_size=40)

    assert (cut.vocab_size, wide.vocab_size) == (32, 40)
    for table in tables:
        np.testing.assert_array_equal(cut_params[table], params[table][:32])
        np.testing.assert_array_equal(wide_params[table][:32], params[table][:32])
        mean = params[table][:32].mean(axis=0)
        for row in wide_params[table][32:]:
            np.testing.assert_allclose(row, mean, rtol=1e-5, atol=1e-7)
    assert_same_params(wide_params["layers_0"], params["layers_0"])


def test_a_new_row_is_less_likely_than_the_average_token():
    config = tiny()
    _, wide = with_rows(config, random_params(config), 50)

    for seed in range(20):
        hidden_D = np.random.default_rng(seed).normal(size=64)
        probability = np.exp(wide["embedding"] @ hidden_D)
        assert probability[40:].max() <= probability[:40].mean() * (1 + 1e-5)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    tokenizer = train_tokenizer(["a few words to make pieces of"] * 50, 275, tmp_path / "t.model")
    with pytest.raises(UserError, match="275 pieces and the model only 40 rows"):
        write_huggingface(tmp_path / "export", tiny(), random_params(tiny()), tokenizer=tokenizer)


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; known is openelm"),
        (
            {"activation_fn_name": "relu"},
            "activation_fn_name is 'relu'; known are swish, silu, gelu",
        ),
        (
            {"normalization_layer_name": "batch_norm"},
            "normalization_layer_name is 'batch_norm'; known are rms_norm, layer_norm",
        ),
        ({"quantization": {"bits": 4}}, "quantization is {'bits': 4}; known is MLX's affine"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05; known is 1e-06"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: this model has no such setting"),
        ({"zeta": 1, "attention_bias": False}, "attention_bias, zeta: this model has no such"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, but num_transformer_layers is 4"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False, .*_layers is True"),
        ({"pruned_heads": {"1": [0]}}, "pruned_heads is .* known is {}"),
        ({"rope_freq_constant": "big"}, "rope_freq_constant is 'big'; it must be a number"),
        ({"rope_freq_constant": 10**400}, "has a number that no float holds"),
        ({"activation_fn_name": ["swish"]}, r"activation_fn_name is \['swish'\]; known are"),
        ({"normalization_layer_name": {}}, "normalization_layer_name is {}; known are"),
        ({"num_transformer_layers": 200_000_000}, "is 200000000; it must be at most 10000"),
        ({"ffn_with_glu": "yes"}, "ffn_with_glu is 'yes'; known are true, false"),
        ({"ffn_multipliers": [1, 2, 3]}, "ffn_multipliers has 3 values"),
        ({"num_query_heads": [2, 4, 2, 4]}, "num_query_heads says 2 for layer 2, .* make it 4"),
        ({"num_kv_heads": [1, 2, 2]}, "num_kv_heads is .* each of the 4 layers"),
        ({"model_dim": 60}, "config.json: model.head_dim 16 does not divide model.model_dim 60"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_configuration_that_is_not_this_model_is_refused(damaged, fields, message):
    with pytest.raises(UserError, match=message) as refusal:
        read_huggingface(damaged(fields=fields))
    assert "config.json" in str(refusal.value)


def test_a_missing_and_an_unexpected_tensor_are_named(damaged):
    norm = "transformer.layers.2.ffn_norm.weight"
    directory = damaged(tensors={norm: None, "transformer.extra": np.zeros(3, np.float32)})

    with pytest.raises(UserError, match=f"1 missing .{norm}. and 1 unexpected .transformer.extra."):
        read_huggingface(directory)


def test_a_tensor_of_another_shape_is_named(damaged):
    name = "transformer.layers.1.ffn.proj_2.weight"
    directory = damaged(tensors={name: np.zeros((64, 8), np.float32)})

    with pytest.raises(UserError, match=rf"{name} is \[64, 8\].*\[64, 112\]"):
        read_huggingface(directory)


def test_another_vocabulary_than_the_configuration_s_is_named(damaged):
    rows = read_huggingface(FIXTURE)[0].vocab_size

    with pytest.raises(UserError, match=rf"token_embeddings.weight is \[{rows}, 64\], .*32000, 64"):
        read_huggingface(damaged(fields={"vocab_size": 32000}))


def test_a_tensor_of_another_type_is_named(damaged):
    name = "transformer.norm.weight"
    directory = damaged(tensors={name: np.ones(64, np.int32)})

    with pytest.raises(UserError, match=f"{name} is stored as I32; known are float32"):
        read_huggingface(directory)


def test_the_references_unused_matrix_is_left_out_of_an_untied_model(tmp_path):
    config = tiny(tie_embeddings=False)
    params = random_params(config)
    write_huggingface(tmp_path / "export", config, params)
    path = tmp_path / "export" / "model.safetensors"
    unused = {"transformer.classifier.weight": np.zeros((40, 64), np.float32)}
    safetensors.numpy.save_file(safetensors.numpy.load_file(path) | unused, path)

    assert_same_params(read_huggingface(tmp_path / "export")[1], params)


def test_a_file_cut_short_is_named(damaged):
    path = damaged() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(UserError, match=r"model\.safetensors is damaged or cut short"):
        read_huggingface(path.parent)


def test_a_directory_without_the_files_is_refused(tmp_path, damaged):
    with pytest.raises(UserError, match=r"config\.json is missing"):
        read_huggingface(tmp_path)
    (damaged() / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        read_huggingface(tmp_path / "damaged")


def test_a_directory_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "notes.txt").write_text("mine")

    with pytest.raises(UserError, match="export is not empty"):
        write_huggingface(tmp_path / "export", tiny(), random_params(tiny()))

    assert [path.name for path in (tmp_path / "export").iterdir()] == ["notes.txt"]


def test_a_file_in_the_way_is_left_alone(tmp_path):
    (tmp_path / "export").write_text("mine")

    with pytest.raises(UserError, match="export is a file"):
        write_huggingface(tmp_path / "export", tiny(), random_params(tiny()))

    assert (tmp_path / "export").read_text() == "mine"


def test_nothing_is_left_when_writing_fails(tmp_path, monkeypatch):
    def full(*arguments, **named):
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors_files, "as_bytes", full)
    with pytest.raises(UserError, match="No space left"):
        write_huggingface(tmp_path / "export", tiny(), random_params(tiny()))

    assert list(tmp_path.iterdir()) == []


# --- the command -------------------------------------------------------------------------------


def test_export_copies_the_tokenizer_and_cuts_the_vocabulary_to_it(tmp_path, capsys):
    lines = [f"the {a} and the {b} are {a}{b}" for a in "abcdefgh" for b in "ijklmnop"]
    tokenizer = train_tokenizer(lines, 300, tmp_path / "tokenizer.model")
    out = tmp_path / "export"

    export.main(
        f"--from {FIXTURE} --to hf --out {out} --dtype bfloat16 "
        f"--tokenizer {tmp_path / 'tokenizer.model'}".split()
    )

    config, params = read_huggingface(out)
    expected_config, expected = read_huggingface(FIXTURE)
    assert (out / "tokenizer.model").read_bytes() == tokenizer.model_bytes
    assert config == dataclasses.replace(expected_config, vocab_size=300)
    rounded = expected["embedding"][:300].astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(params["embedding"], rounded)
    output = capsys.readouterr()
    assert output.out == ""
    assert "written to" in output.err
    assert "warning" not in output.err


def test_export_says_what_it_could_not_do(tmp_path, capsys):
    config = tiny(activation="gelu", ffn_with_glu=False)
    write_huggingface(tmp_path / "first", config, random_params(config))

    export.main(
        ["--from", str(tmp_path / "first"), "--to", "hf", "--out", str(tmp_path / "second")]
    )

    warnings = capsys.readouterr().err
    assert "no tokenizer: all 40 rows" in warnings
    assert (
        "mlx-lm cannot run a model with the activation gelu and a feed-forward without a gate"
        in (warnings)
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalization": "layer_norm"}, "layer_norm as its norm"),
        ({"activation": "gelu"}, "the activation gelu"),
        ({"ffn_with_glu": False}, r"a feed-forward without a gate \(ffn_with_glu\)"),
    ],
    ids=str,
)
def test_export_refuses_what_mlx_lm_would_compute_otherwise(tmp_path, changes, reason):
    config = tiny(**changes)
    write_huggingface(tmp_path / "first", config, random_params(config))

    with pytest.raises(UserError, match=f"mlx-lm's openelm cannot run a model with {reason}; exp"):
        export.main(f"--from {tmp_path}/first --to mlx --out {tmp_path}/second".split())

    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_export_to_mlx_says_nothing_of_apples_code(tmp_path, capsys):
    config = tiny(qkv_multipliers=(0.5, 1.0, 0.75))
    write_huggingface(tmp_path / "first", config, random_params(config))

    for target, said in (("mlx", False), ("hf", True)):
        export.main(f"--from {tmp_path}/first --to {target} --out {tmp_path}/{target}".split())
        assert ("Apple's" in capsys.readouterr().err) == said


@pytest.mark.parametrize(
    ("flags", "said"), [("--to hf", True), ("--to hf --with-code", False), ("--to mlx", False)]
)
def test_export_says_what_transformers_needs(tmp_path, capsys, flags, said):
    export.main(f"--from {FIXTURE} --out {tmp_path}/out {flags}".split())

    message = "transformers needs the model's code as well: export --with-code"
    assert (message in capsys.readouterr().err) == said


@pytest.mark.parametrize(("dtype", "warned"), [("float16", True), ("bfloat16", False)])
def test_export_names_what_float16_cannot_hold(tmp_path, capsys, dtype, warned):
    params = random_params(tiny())
    params["layers_2"]["ffn"]["up"][5, 7] = -66_000.0
    write_huggingface(tmp_path / "first", tiny(), params)

    export.main(f"--from {tmp_path}/first --to hf --out {tmp_path}/out --dtype {dtype}".split())

    name = "transformer.layers.2.ffn.proj_1.weight"
    assert (f"{name} reaches 66000, which float16" in capsys.readouterr().err) == warned


def test_export_refuses_before_it_loads(tmp_path):
    with pytest.raises(UserError, match="not empty"):
        export.main(["--from", "nowhere", "--to", "hf", "--out", str(FIXTURE)])
