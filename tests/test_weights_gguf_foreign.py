"""GGUF files of other programs, and damaged ones: what is read, what is refused, and how."""

from functools import partial

import jax
import numpy as np
import pytest
import small_models
from corpora import tokenizer
from gguf_files import PIECES, fields_of, gguf, read, rewrite, write
from small_models import random_params

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import load_experiment
from openelm_jax.model.scaling import layer_shapes
from openelm_jax.weights.gguf_config import CONFIG_KEY, config_of

HEAD_DIM_KEYS = [
    f"openelm.{name}"
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count")
]

tiny = partial(small_models.tiny, vocab_size=PIECES)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


# --- files of other programs -------------------------------------------------------------------


def test_a_file_of_llama_cpps_converter_is_read(tmp_path):
    """It has neither our key nor ids and flags of the tokenizer, and calls <unk> control."""
    config = tiny(ffn_multipliers=(0.5, 4.0), qkv_multipliers=(0.5, 1.0))
    params = random_params(config)
    file = write(tmp_path, config, params)
    fields = fields_of(file)
    left_out = [CONFIG_KEY] + [
        f"tokenizer.ggml.{name}"
        for name in ("unknown_token_id", "add_bos_token", "add_eos_token", "add_space_prefix")
    ]
    foreign = rewrite(
        file,
        dict.fromkeys(left_out)
        | {
            "tokenizer.ggml.scores": [-1000.0] * 3 + fields["tokenizer.ggml.scores"][3:],
            "tokenizer.ggml.token_type": [3] * 3 + fields["tokenizer.ggml.token_type"][3:],
        },
    )
    assert CONFIG_KEY not in fields_of(foreign)

    config_read, params_read, tok = read(foreign)

    assert config_read == config
    jax.tree.map(np.testing.assert_array_equal, params_read, params)
    np.testing.assert_array_equal(tok.encode("the people"), tokenizer().encode("the people"))


def test_a_file_without_a_tokenizer_has_none(tmp_path):
    bare = rewrite(
        write(tmp_path, tiny()),
        {f"tokenizer.ggml.{name}": None for name in ("model", "tokens", "scores", "token_type")},
    )
    assert read(bare)[2] is None


def widths(config: ModelConfig) -> dict:
    """Return what a file says of a model's widths, without our key."""
    shapes = layer_shapes(config)
    return dict.fromkeys(HEAD_DIM_KEYS, config.head_dim) | {
        "general.architecture": "openelm",
        "openelm.block_count": config.num_layers,
        "openelm.context_length": config.context_length,
        "openelm.embedding_length": config.model_dim,
        "openelm.rope.freq_base": config.rope_base,
        "openelm.attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
        "openelm.feed_forward_length": [shape.ffn_dim for shape in shapes],
        "openelm.attention.head_count": [shape.num_query_heads for shape in shapes],
        "openelm.attention.head_count_kv": [shape.num_kv_heads for shape in shapes],
    }


@pytest.mark.parametrize("size", ["270m", "450m", "1_1b", "3b"])
def test_the_papers_multipliers_are_found_from_the_widths(size):
    config = load_experiment(f"openelm_{size}").model

    assert config_of(widths(config), config.vocab_size, "file") == config


@pytest.mark.parametrize(
    "config",
    [
        tiny(qkv_multipliers=1.0, ffn_multipliers=3.0),
        tiny(num_layers=5, ffn_multipliers=(1.0, 4.0, 2.0, 0.5, 3.3)),
        tiny(num_layers=2, model_dim=96, ffn_dim_divisor=1, ffn_multipliers=(0.33, 2.71)),
        tiny(num_layers=7, model_dim=4096, ffn_dim_divisor=1, ffn_multipliers=(0.333, 2.717)),
    ],
    ids=["uniform", "no pair", "two layers", "fine divisor"],
)
def test_any_widths_are_made_again(config):
    derived = config_of(widths(config), PIECES, "file")

    assert [(s.num_query_heads, s.num_kv_heads, s.ffn_dim) for s in layer_shapes(derived)] == [
        (s.num_query_heads, s.num_kv_heads, s.ffn_dim) for s in layer_shapes(config)
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "llama"}, "its architecture is llama"),
        ({"openelm.block_count": 0}, r"openelm\.block_count is 0"),
        ({"openelm.block_count": 2**31}, "at most 512"),
        ({"openelm.embedding_length": None}, r"embedding_length is None"),
        ({"openelm.feed_forward_length": [64, 64]}, "for each of 3 layers"),
        ({"openelm.attention.head_count": [2, "4", 4]}, "for each of 3 layers"),
        ({"openelm.attention.head_count_kv": [1, 4, 2]}, "one whole ratio"),
        ({"openelm.attention.head_count_kv": [2, 3, 3]}, "one whole ratio"),
        ({"openelm.attention.layer_norm_rms_epsilon": 1e-5}, "must be 1e-06"),
        ({"openelm.attention.value_length": 8}, "must be 16"),
        ({"openelm.rope.dimension_count": 8}, "must be 16"),
        ({"openelm.rope.scaling.factor": 4.0}, "must be 1 for"),
        (dict.fromkeys(HEAD_DIM_KEYS, 17), r"model\.head_dim is 17"),
        ({CONFIG_KEY: "{"}, "holds no JSON"),
        ({CONFIG_KEY: "[1]"}, "holds no JSON"),
        ({CONFIG_KEY: 1}, "holds no JSON"),
        ({CONFIG_KEY: "{}"}, "num_transformer_layers is missing"),
    ],
)
def test_metadata_of_no_openelm_is_refused(changes, words):
    with pytest.raises(UserError, match=words) as mistake:
        config_of(widths(tiny()) | changes, PIECES, "some.gguf")
    assert str(mistake.value).startswith("some.gguf: ")


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0"])
def test_quantised_tensors_are_read_as_what_they_stand_for(tmp_path, kind):
    config = tiny()
    params = random_params(config)
    out_proj = params["layers_0"]["attention"]["out"].T
    qtype = gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(np.ascontiguousarray(out_proj), qtype)
    file = rewrite(
        write(tmp_path, config, params), tensors={"blk.0.attn_output.weight": (packed, qtype)}
    )

    _, params_read, _ = read(file)

    got = params_read["layers_0"]["attention"]["out"]
    step = np.abs(out_proj).max() / {"Q4_0": 8, "Q5_1": 15, "Q8_0": 127}[kind]
    assert 0 < np.abs(got - out_proj.T).max() < 1.1 * step


# --- damage ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"blk.1.ffn_up.weight": None}, r"blk\.1\.ffn_up\.weight is missing"),
        ({"token_embd.weight": None}, r"token_embd\.weight is missing"),
        ({"output.weight": np.zeros((2, 2), np.float32)}, r"output\.weight belongs to no"),
        (
            {"blk.0.attn_q_norm.weight": np.zeros(15, np.float32)},
            r"attn_q_norm\.weight is \[15\], but its metadata makes it \[16\]",
        ),
        ({"output_norm.weight": np.zeros(64, np.int8)}, r"output_norm\.weight is stored as I8"),
    ],
    ids=["missing", "no embedding", "unexpected", "misshapen", "integers"],
)
def test_tensors_that_are_not_the_models_are_named(tmp_path, tensors, words):
    file = rewrite(write(tmp_path, tiny()), tensors=tensors)

    with pytest.raises(UserError, match=words):
        read(file)


def test_a_file_cut_short_anywhere_is_one_sentence(tmp_path):
    file = write(tmp_path, tiny())
    whole = file.read_bytes()
    cuts = np.linspace(0, len(whole) - 1, 60).astype(int).tolist() + list(range(0, 12_000, 131))

    for cut in cuts:
        file.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"model\.gguf (is|: )") as mistake:
            read(file)
        assert "\n" not in str(mistake.value)


def test_any_damaged_byte_of_the_header_is_one_sentence_or_harmless(tmp_path):
    file = write(tmp_path, tiny())
    whole = file.read_bytes()
    start = min(int(t.data_offset) for t in gguf.GGUFReader(file).tensors)
    rng = np.random.default_rng(0)

    refused = 0
    for position in rng.integers(0, start, 400).tolist():
        flipped = bytearray(whole)
        flipped[position] ^= 1 << int(rng.integers(8))
        file.write_bytes(flipped)
        try:
            read(file)
        except UserError:
            refused += 1
    assert refused > 40


def test_another_file_is_no_gguf(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not one of them")

    with pytest.raises(UserError, match="is no GGUF file"):
        read(tmp_path / "model.gguf")
