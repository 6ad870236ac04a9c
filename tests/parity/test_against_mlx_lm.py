"""mlx-lm's own OpenELM, unchanged, loads what we export and computes the same; and the reverse."""

from functools import partial

import jax
import numpy as np
import pytest
import small_models
from huggingface_directories import read_huggingface, with_rows, write_huggingface
from small_models import random_params

from openelm_jax.generation import engine
from openelm_jax.generation.language_model import language_model
from openelm_jax.generation.sampling import Sampling

mx = pytest.importorskip("mlx.core")
mlx_utils = pytest.importorskip("mlx_lm.utils")

TOKENS_BT = np.random.default_rng(1).integers(0, 150, (2, 24))

tiny = partial(small_models.tiny, vocab_size=160)


@pytest.mark.parametrize(
    "config",
    [
        tiny(),
        tiny(tie_embeddings=False),
        tiny(normalize_qk_projections=False, rope_base=500000.0, num_gqa_groups=1),
    ],
    ids=["tied", "untied", "no QK-norm, rope 500000, no groups"],
)
def test_mlx_lm_computes_our_logits_from_our_export(tmp_path, config):
    params = random_params(config, std=0.125)
    write_huggingface(tmp_path / "export", *with_rows(config, params, 150))

    model, _ = mlx_utils.load_model(tmp_path / "export")
    theirs_BTV = np.array(model(mx.array(TOKENS_BT)))

    ours_BTV = language_model(config, params, None, "float32").logits(TOKENS_BT)
    assert theirs_BTV.shape == (2, 24, 150)
    assert np.abs(theirs_BTV).max() > 1
    np.testing.assert_allclose(ours_BTV[..., :150], theirs_BTV, rtol=0, atol=2e-5)


def test_a_directory_that_mlx_lm_saved_reads_back_bit_for_bit(tmp_path):
    config = tiny()
    write_huggingface(
        tmp_path / "export", config, random_params(config, std=0.125), dtype="bfloat16"
    )
    model, fields = mlx_utils.load_model(tmp_path / "export")
    mlx_utils.save_model(tmp_path / "mlx", model)
    mlx_utils.save_config(fields, tmp_path / "mlx" / "config.json")

    config_read, params_read = read_huggingface(tmp_path / "mlx")

    assert config_read == config
    _, expected = read_huggingface(tmp_path / "export")
    jax.tree.map(np.testing.assert_array_equal, params_read, expected)


def test_the_config_json_that_mlx_lm_writes_is_accepted(tmp_path):
    write_huggingface(tmp_path / "export", tiny(), random_params(tiny(), std=0.125))
    _, fields = mlx_utils.load_model(tmp_path / "export")

    mlx_utils.save_config(dict(fields), tmp_path / "export" / "config.json")

    assert read_huggingface(tmp_path / "export")[0] == tiny()


def test_the_fixtures_logits_and_greedy_continuation_are_mlx_lms(request):
    from mlx_lm.generate import generate_step

    fixture = request.config.rootpath / "tests" / "data" / "tiny-openelm"
    config, params = read_huggingface(fixture)
    tokens = np.load(fixture / "ref_ids.npy")[:1]
    model, _ = mlx_utils.load_model(fixture)

    ours_BTV = language_model(config, params, None, "float32").logits(tokens)
    theirs_BTV = np.array(model(mx.array(tokens)))
    np.testing.assert_allclose(ours_BTV, theirs_BTV, rtol=0, atol=1e-5)

    (ours,) = engine.generate(
        config,
        params,
        tokens.tolist(),
        max_tokens=64,
        eos_id=-1,
        vocab_size=config.vocab_size,
        sampling=Sampling(temperature=0, top_k=0, top_p=1.0, seed=0),
        dtype="float32",
    )
    theirs = [int(token) for token, _ in generate_step(mx.array(tokens[0]), model, max_tokens=64)]
    assert list(ours.tokens) == theirs
