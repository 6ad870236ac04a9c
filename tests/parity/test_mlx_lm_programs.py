"""mlx-lm's programs take what we export, with stdin closed and no network; and the reverse."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import jax
import numpy as np
import pytest
from huggingface_directories import read_huggingface, write_huggingface
from ports import free_port
from small_models import random_params, tiny

from openelm_jax import export
from openelm_jax.generation.language_model import language_model
from openelm_jax.tokenizer import train_tokenizer

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")


def tensors_of(directory: Path) -> dict[str, mx.array]:
    return mx.load(str(directory / "model.safetensors"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model with a tokenizer, as mlx-lm gets it."""
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
        timeout=300,
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
    ours = language_model(config, params, tokenizer, "float32").generate(["the a and"], 24)[0]
    assert ours.strip()
    assert written.strip("\n").strip() == ours.strip()


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
    read = [read_huggingface(tmp_path / name) for name in ("ours", "theirs")]
    assert read[0][0] == read[1][0]
    jax.tree.map(np.testing.assert_array_equal, read[0][1], read[1][1])


@pytest.mark.heavy
@pytest.mark.parametrize("bits", [None, 4], ids=["whole", "quantised"])
def test_lora_trains_and_fuse_gives_a_model_that_we_read(exported, tmp_path, bits):
    directory, config, *_ = exported
    if bits:
        export.main(f"--from {directory} --to mlx --quantize {bits} --out {tmp_path}/q".split())
        directory = tmp_path / "q"
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

    (config_read, read), (_, before) = read_huggingface(fused), read_huggingface(directory)
    assert config_read == config
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), read, before)
    assert not any(jax.tree.leaves([changed["embedding"], changed["layers_0"]]))
    assert changed["layers_2"]["attention"]["qkv"]


def test_the_server_answers(exported, tmp_path):
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
