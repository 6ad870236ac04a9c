"""Four and eight bits a weight: the same tensors as mlx-lm makes, read back without MLX."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from huggingface_directories import read_huggingface, write_huggingface
from small_models import random_params, tiny

from openelm_jax import export
from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.generation.language_model import LanguageModel
from openelm_jax.weights.mlx_quantized import Quantization

mx = pytest.importorskip("mlx.core")
mlx_utils = pytest.importorskip("mlx_lm.utils")

CONFIG = tiny(model_dim=128, ffn_dim_divisor=64, vocab_size=96)
TOKENS_BT = np.random.default_rng(1).integers(0, 96, (2, 16))


def tensors_of(directory: Path) -> dict[str, mx.array]:
    return mx.load(str(directory / "model.safetensors"))


@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (4, 32), (8, 64)])
def test_tensors_and_configuration_are_those_of_mlx_lms_own_conversion(tmp_path, bits, group_size):
    write_huggingface(tmp_path / "hf", CONFIG, random_params(CONFIG), dtype="bfloat16")
    model, fields = mlx_utils.load_model(tmp_path / "hf")
    model, fields = mlx_utils.quantize_model(model, fields, group_size, bits)
    mlx_utils.save_model(tmp_path / "theirs", model)

    export.main(
        f"--from {tmp_path}/hf --to mlx --out {tmp_path}/ours --quantize {bits} "
        f"--group-size {group_size}".split()
    )

    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert mx.array_equal(ours[name], tensor), name
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    for name in ("quantization", "quantization_config"):
        assert written[name] == fields[name]


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_read_back_is_what_mlx_lm_computes_with(tmp_path, bits):
    params = random_params(CONFIG, std=0.125)
    how = Quantization(bits, 64)
    write_huggingface(tmp_path / "mlx", CONFIG, params, quantization=how)

    config, read = read_huggingface(tmp_path / "mlx")
    model, _ = mlx_utils.load_model(tmp_path / "mlx")

    assert config == CONFIG
    qkv = tensors_of(tmp_path / "mlx")
    name = "transformer.layers.1.attn.qkv_proj"
    theirs = mx.dequantize(
        *(qkv[f"{name}.{part}"] for part in ("weight", "scales", "biases")), 64, bits
    )
    np.testing.assert_allclose(
        read["layers_1"]["attention"]["qkv"].T, np.array(theirs), rtol=0, atol=1e-6
    )
    theirs_BTV = np.array(model(mx.array(TOKENS_BT)))
    ours_BTV = LanguageModel(config, read, None, "float32").logits(TOKENS_BT)
    np.testing.assert_allclose(ours_BTV, theirs_BTV, rtol=0, atol=1e-4)


def test_what_no_group_divides_is_named_and_the_bits_are_mlx_lms(tmp_path, capsys):
    config = tiny(vocab_size=96)  # out_proj of 32 and 64, proj_2 of 32 and more inputs
    write_huggingface(tmp_path / "hf", config, random_params(config))

    export.main(f"--from {tmp_path}/hf --to mlx --out {tmp_path}/ours --quantize 4".split())

    said = capsys.readouterr().err
    assert "groups of 64 do not divide its rows: transformer.layers.0.attn.out_proj.weight" in said
    stored = tensors_of(tmp_path / "ours")
    for line in said.splitlines():
        if "not quantised" in line:
            name = line.rpartition(": ")[2]
            assert stored[name].dtype == mx.bfloat16
            assert stored[name].shape[1] % 64
    model, _ = mlx_utils.load_model(tmp_path / "ours")
    assert f"4 bits, {mlx_utils.compute_bits_per_weight(model):.3f} a weight" in said


def test_a_quantised_model_becomes_any_other(tmp_path):
    write_huggingface(
        tmp_path / "mlx", CONFIG, random_params(CONFIG), quantization=Quantization(4, 32)
    )
    export.main(f"--from {tmp_path}/mlx --to hf --dtype float32 --out {tmp_path}/hf".split())

    for a, b in zip(
        *(jax.tree.leaves(read_huggingface(tmp_path / name)[1]) for name in ("mlx", "hf")),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "given",
    [
        {"bits": 4, "group_size": 32, "mode": "mxfp4"},
        {"bits": 3, "group_size": 64},
        {"bits": 4, "group_size": 64, "transformer.layers.0": {"bits": 8}},
    ],
)
def test_other_quantisations_are_refused(tmp_path, given):
    write_huggingface(tmp_path / "hf", CONFIG, random_params(CONFIG))
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization": given}))

    with pytest.raises(UserError, match="give the weights before quantisation"):
        read_huggingface(tmp_path / "hf")


def test_without_mlx_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.setitem(sys.modules, "mlx", None)
    with pytest.raises(UserError, match=r"pip install 'openelm_jax\[mlx\]'"):
        write_huggingface(
            tmp_path / "out", CONFIG, random_params(CONFIG), quantization=Quantization(4, 64)
        )
    assert not (tmp_path / "out").exists()


def test_float16_says_what_it_cannot_hold(tmp_path, capsys):
    params = random_params(CONFIG)
    params["layers_0"]["ffn"]["down"][3, 5] = 70000.0
    write_huggingface(tmp_path / "hf", CONFIG, params, dtype="float16")

    said = capsys.readouterr().err
    assert "transformer.layers.0.ffn.proj_2.weight reaches 70000" in said
    assert said.count("warning") == 1
    tensors = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    assert np.isinf(tensors["transformer.layers.0.ffn.proj_2.weight"]).sum() == 1


# --- the stock programs, with stdin closed -----------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model with a tokenizer, as mlx-lm gets it."""
    from openelm_jax.tokenizer import train_tokenizer

    directory = tmp_path_factory.mktemp("mlx")
    lines = [f"the {a} and the {b} are {a}{b}" for a in "abcdefgh" for b in "ijklmnop"]
    tokenizer = train_tokenizer(lines, 300, directory / "t.model")
    config = tiny(model_dim=128, ffn_dim_divisor=64, vocab_size=300)
    params = random_params(config, std=0.125)
    write_huggingface(directory / "tiny", config, params, tokenizer=tokenizer)
    return directory / "tiny", config, params, tokenizer


def mlx_lm(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mlx_lm", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(cwd)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.heavy
def test_generate_takes_the_export_and_continues_as_we_do(exported, tmp_path):
    directory, config, params, tokenizer = exported
    written = mlx_lm(
        *("generate", "--model", str(directory), "--prompt", "the a and", "--temp", "0"),
        *("--max-tokens", "24", "--verbose", "False", "--ignore-chat-template"),
        cwd=tmp_path,
    )
    ours = LanguageModel(config, params, tokenizer, "float32").generate(["the a and"], 24)[0]
    assert ours.strip()
    assert written.strip("\n").strip() == ours.strip()


@pytest.mark.heavy
def test_convert_quantises_the_export_to_our_own_quantised_tensors(exported, tmp_path):
    directory, *_ = exported
    export.main(f"--from {directory} --to hf --out {tmp_path}/bf16".split())
    export.main(f"--from {directory} --to mlx --quantize 4 --out {tmp_path}/ours".split())
    mlx_lm(
        *("convert", "--hf-path", str(tmp_path / "bf16"), "--mlx-path", str(tmp_path / "theirs")),
        *("-q", "--q-bits", "4", "--q-group-size", "64"),
        cwd=tmp_path,
    )

    ours, theirs = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.heavy
def test_lora_trains_and_fuse_gives_a_model_that_we_read(exported, tmp_path):
    directory, config, params, _ = exported
    data = tmp_path / "data"
    data.mkdir()
    for split in ("train", "valid"):
        rows = [json.dumps({"text": f"the {a} and the {a} are {a}{a}"}) for a in "abcdefgh"]
        (data / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    adapters, fused = tmp_path / "adapters", tmp_path / "fused"
    mlx_lm(
        *("lora", "--model", str(directory), "--data", str(data), "--train", "--iters", "2"),
        *("--batch-size", "2", "--num-layers", "2", "--adapter-path", str(adapters)),
        cwd=tmp_path,
    )
    mlx_lm(
        *("fuse", "--model", str(directory), "--adapter-path", str(adapters)),
        *("--save-path", str(fused)),
        cwd=tmp_path,
    )

    config_read, read = read_huggingface(fused)
    assert isinstance(config_read, ModelConfig)
    assert config_read == config
    changed = [
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(read), jax.tree.leaves(params), strict=True)
    ]
    assert any(changed)
    assert not all(changed)


@pytest.mark.heavy
def test_the_server_answers(exported, tmp_path):
    import time
    import urllib.error
    import urllib.request

    from ports import free_port

    directory, *_ = exported
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-m", "mlx_lm", "server", "--model", str(directory), "--port", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)},
    ) as server:
        try:
            body = {"model": "default_model", "prompt": "the a", "max_tokens": 5, "temperature": 0}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            for _ in range(120):
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        completion = json.load(answer)
                    break
                except urllib.error.URLError:
                    assert server.poll() is None, "the server ended"
                    time.sleep(0.5)
            assert completion["choices"][0]["text"]
            assert completion["usage"]["completion_tokens"] <= 5
        finally:
            server.terminate()
