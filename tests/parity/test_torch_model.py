"""The PyTorch model that training is measured against computes our logits and our gradients."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_directories import read_huggingface
from small_models import random_params, tiny

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.model.decoder import Decoder, Params
from openelm_jax.weights.names import to_reference
from openelm_jax.weights.stored import in_memory
from openelm_jax.weights.torch_model import load_params, torch_model

torch = pytest.importorskip("torch")

TOKENS_BT = np.random.default_rng(1).integers(0, 40, (2, 24))


def theirs(config: ModelConfig, params: Params):
    model = torch_model(config)
    load_params(model, in_memory(config, params))
    return model


@pytest.mark.parametrize(
    "config",
    [
        tiny(),
        tiny(tie_embeddings=False),
        tiny(normalize_qk_projections=False, rope_base=500000.0, num_gqa_groups=1),
        tiny(ffn_with_glu=False, activation="gelu"),
    ],
    ids=["tied", "untied", "no QK-norm, rope 500000, no groups", "gelu without a gate"],
)
def test_logits_are_ours(config: ModelConfig) -> None:
    params = random_params(config, std=0.125)
    with torch.no_grad():
        theirs_BTV = theirs(config, params)(torch.from_numpy(TOKENS_BT)).logits.numpy()
    ours_BTV = jax.jit(Decoder(config).apply)({"params": params}, jnp.asarray(TOKENS_BT))
    assert np.abs(theirs_BTV).max() > 1
    np.testing.assert_allclose(ours_BTV, theirs_BTV, rtol=0, atol=1e-5)


def test_logits_are_those_of_apples_code(request: pytest.FixtureRequest) -> None:
    fixture = request.config.rootpath / "tests" / "data" / "tiny-openelm"
    config, params = read_huggingface(fixture)
    with torch.no_grad():
        tokens_BT = torch.from_numpy(np.load(fixture / "ref_ids.npy").astype(np.int64))
        logits_BTV = theirs(config, params)(tokens_BT).logits.numpy()
    np.testing.assert_allclose(logits_BTV, np.load(fixture / "ref_logits.npy"), rtol=0, atol=1e-5)


def test_gradients_are_ours() -> None:
    config = tiny()
    params = random_params(config, std=0.125)
    decoder = theirs(config, params)
    decoder(torch.from_numpy(TOKENS_BT)).logits.logsumexp(-1).sum().backward()

    def ours(params: Params) -> jax.Array:
        logits_BTV = Decoder(config).apply({"params": params}, jnp.asarray(TOKENS_BT))
        return jax.nn.logsumexp(logits_BTV, axis=-1).sum()

    gradients = dict(decoder.named_parameters())
    ours_read = in_memory(config, jax.jit(jax.grad(ours))(params)).read
    for name, gradient in to_reference(config, ours_read):
        error = np.linalg.norm(gradients[name].grad.numpy() - gradient)
        assert error <= 1e-5 * np.linalg.norm(gradient), name


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "transformers.initialization", raising=False)
    with pytest.raises(UserError, match=r"pip install 'openelm_jax\[torch\]'"):
        torch_model(tiny())


def test_a_model_that_is_no_openelm_is_refused() -> None:
    with pytest.raises(UserError, match=r"the PyTorch code computes rms_norm"):
        torch_model(tiny(normalization="layer_norm"))
