"""The paper's sizes with random weights in every program that we export to, beside our own logits.

    python tests/parity/sizes.py 270m [--programs mlx,torch,llama_cpp] [--greedy 64] [--work DIR]

Not a test: 3B takes 12 GB of disk a format, as much memory, and minutes. Each program runs in a
process of its own, the exported files between them. Norms are drawn around 1 with a spread of 0.2,
since with norms of exactly 1 a program that forgets them is right. Prints, for each program, the
largest difference of a logit from ours, as a share of the logits' standard deviation, and how many
tokens of a greedy continuation are the same; with float64 among the programs, how far each is from
that as well.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from openelm_jax.config import ModelConfig
from openelm_jax.experiment_file import load_experiment
from openelm_jax.tokenizer import load_tokenizer
from openelm_jax.weights.names import ParamPath, named_weights
from openelm_jax.weights.stored import StoredWeights

TOKENIZER = Path(__file__).parent.parent / "data" / "tokenizer-mistral-v1" / "tokenizer.model"
NUM_TOKENS = 32


def random_weights(config: ModelConfig) -> StoredWeights:
    """Return a model whose every parameter is drawn when it is read, always the same."""
    shapes = {weight.path: weight.shape for weight in named_weights(config)}

    def read(path: ParamPath) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32("/".join(path).encode()))
        array = rng.standard_normal(shapes[path], dtype=np.float32)
        return 1 + 0.2 * array if array.ndim == 1 else array * config.model_dim**-0.5

    return StoredWeights(
        config=config, read=read, source="random weights", tokenizer=load_tokenizer(TOKENIZER)
    )


def ours(directory: Path, tokens: np.ndarray, greedy: int) -> tuple[np.ndarray, list[int]]:
    from openelm_jax.generation import engine
    from openelm_jax.generation.language_model import load
    from openelm_jax.generation.sampling import Sampling

    model = load(directory / "hf", dtype="float32")
    logits_TV = model.logits(tokens[None])[0]
    if not greedy:
        return logits_TV, []
    sampling = Sampling(temperature=0, top_k=0, top_p=1.0, seed=0)
    (new,) = engine.generate(
        model.config,
        model.params,
        [tokens.tolist()],
        max_tokens=greedy,
        eos_id=-1,
        vocab_size=model.config.vocab_size,
        sampling=sampling,
        dtype="float32",
    )
    return logits_TV, list(new.tokens)


def mlx(directory: Path, tokens: np.ndarray, greedy: int) -> tuple[np.ndarray, list[int]]:
    import mlx.core as mx
    from mlx_lm import utils
    from mlx_lm.generate import generate_step

    model, _ = utils.load_model(directory / "hf")
    logits_TV = np.array(model(mx.array(tokens[None])))[0]
    steps = generate_step(mx.array(tokens), model, max_tokens=greedy) if greedy else ()
    return logits_TV, [int(token) for token, _ in steps]


def torch(directory: Path, tokens: np.ndarray, greedy: int) -> tuple[np.ndarray, list[int]]:
    import torch

    from openelm_jax.weights.load import open_weights
    from openelm_jax.weights.torch_model import load_params, torch_model

    with open_weights(directory / "hf") as stored, torch.no_grad():
        model = torch_model(stored.config)
        load_params(model, stored)
    model.eval()
    ids = torch.from_numpy(tokens[None].astype(np.int64))
    with torch.no_grad():
        logits_TV = model(ids).logits[0].float().numpy()
        if not greedy:
            return logits_TV, []
        whole = model.generate(
            ids, max_new_tokens=greedy, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return logits_TV, whole[0, len(tokens) :].tolist()


def float64(directory: Path, tokens: np.ndarray, greedy: int) -> tuple[np.ndarray, list[int]]:
    """PyTorch in float64, to see whose rounding a difference is."""
    import torch

    from openelm_jax.weights.load import open_weights
    from openelm_jax.weights.torch_model import load_params, torch_model

    with open_weights(directory / "hf") as stored, torch.no_grad():
        model = torch_model(stored.config)
        load_params(model, stored)
        model = model.eval().double()
        # rotate() and angles() take float() of what they get: here that must keep 64 bits.
        torch.Tensor.float = torch.Tensor.double
        ids = torch.from_numpy(tokens[None].astype(np.int64))
        return model(ids).logits[0].numpy(), []


def llama_cpp(directory: Path, tokens: np.ndarray, greedy: int) -> tuple[np.ndarray, list[int]]:
    from llama_cpp import GGML_TYPE_F32, Llama

    model = Llama(
        str(directory / "gguf" / "model.gguf"),
        n_ctx=NUM_TOKENS + greedy + 8,
        logits_all=True,
        type_k=GGML_TYPE_F32,
        type_v=GGML_TYPE_F32,
        verbose=False,
    )
    model.eval(tokens.tolist())
    logits_TV = np.array(model.scores[: len(tokens)])
    chosen: list[int] = []
    while len(chosen) < greedy:
        chosen.append(int(model.scores[model.n_tokens - 1].argmax()))
        model.eval(chosen[-1:])
    return logits_TV, chosen


PROGRAMS: dict[str, Callable] = {
    "ours": ours, "mlx": mlx, "torch": torch, "llama_cpp": llama_cpp, "float64": float64,
}  # fmt: skip


def export(directory: Path, config: ModelConfig, programs: list[str]) -> None:
    from openelm_jax.weights.huggingface import write_huggingface
    from openelm_jax.weights.vocabulary import cut_to_tokenizer

    stored = cut_to_tokenizer(random_weights(config))
    (directory / "hf").mkdir()
    write_huggingface(directory / "hf", stored, dtype="float32")
    if "llama_cpp" in programs:
        from openelm_jax.weights.gguf_file import write_gguf

        (directory / "gguf").mkdir()
        write_gguf(directory / "gguf", stored, outtype="f32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("size", help="an experiment: 270m, 450m, 1_1b, 3b")
    parser.add_argument("--programs", default="mlx,torch")
    parser.add_argument("--greedy", type=int, default=0)
    parser.add_argument("--work", type=Path, help="where the files go, and are deleted (/tmp)")
    arguments = parser.parse_args()
    programs = arguments.programs.split(",")
    config = load_experiment(arguments.size).model
    tokens = np.random.default_rng(0).integers(3, 32000, NUM_TOKENS).astype(np.int32)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        begin = time.perf_counter()
        export(Path(work), config, programs)
        print(f"{arguments.size}: exported in {time.perf_counter() - begin:.1f} s", flush=True)
        logits, continuations = {}, {}
        for name in ["ours", *programs]:
            with spawn.Pool(1) as pool:
                logits[name], continuations[name] = pool.apply(
                    PROGRAMS[name], (Path(work), tokens, arguments.greedy)
                )
        std = float(logits["ours"].std())
        for name in programs:
            parts = [f"{_apart(logits[name], logits['ours']) / std:.2e} of the standard deviation"]
            if "float64" in logits and name != "float64":
                parts.append(f"{_apart(logits[name], logits['float64']) / std:.2e} from float64")
            if continuations[name]:
                pairs = zip(continuations[name], continuations["ours"], strict=True)
                parts.append(f"{sum(a == b for a, b in pairs)} of {arguments.greedy} tokens")
            print(f"{arguments.size} {name}: {'; '.join(parts)}", flush=True)


def _apart(these: np.ndarray, those: np.ndarray) -> float:
    return float(np.abs(these - those).max())


if __name__ == "__main__":
    main()
