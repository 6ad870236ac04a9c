"""GGUF, written and read: every bit, what it says of the model, refusals.

What is written is read back with the package `gguf`; `parity/test_against_llama_cpp.py` runs it.
"""

import io
import json
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import sentencepiece
import small_models
from corpora import documents, tokenizer
from gguf_files import PIECES, fields_of, gguf, read, write
from small_models import random_params

from openelm_jax import export
from openelm_jax.errors import UserError
from openelm_jax.weights.gguf_file import write_gguf
from openelm_jax.weights.huggingface import open_huggingface
from openelm_jax.weights.load import open_weights
from openelm_jax.weights.names import named_weights
from openelm_jax.weights.stored import StoredWeights, in_memory, read_params

FIXTURE = Path(__file__).parent / "data" / "tiny-openelm"

tiny = partial(small_models.tiny, vocab_size=PIECES)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


# --- what is written ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """The fixture with a tokenizer of as many pieces as it has rows, by the verb."""
    folder = tmp_path_factory.mktemp("exported")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents(200)), model_writer=model, model_type="bpe",
        vocab_size=512, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=3,
    )  # fmt: skip
    (folder / "512.model").write_bytes(model.getvalue())
    export.main(
        f"--from {FIXTURE} --tokenizer {folder}/512.model --to gguf --outtype f32 "
        f"--out {folder}/out".split()
    )
    return folder / "out" / "model.gguf"


def test_metadata_has_each_layers_widths(exported):
    of_apple = json.loads((FIXTURE / "config.json").read_text())
    tensors = safetensors.numpy.load_file(FIXTURE / "model.safetensors")
    fields = fields_of(exported)

    assert fields["general.architecture"] == "openelm"
    assert fields["openelm.block_count"] == 4
    assert fields["openelm.attention.head_count"] == of_apple["num_query_heads"]
    assert fields["openelm.attention.head_count_kv"] == of_apple["num_kv_heads"]
    assert fields["openelm.feed_forward_length"] == [
        tensors[f"transformer.layers.{i}.ffn.proj_2.weight"].shape[1] for i in range(4)
    ]
    assert fields["openelm.context_length"] == of_apple["max_context_length"]
    assert fields["openelm.embedding_length"] == of_apple["model_dim"]
    assert fields["openelm.rope.freq_base"] == of_apple["rope_freq_constant"]
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        assert fields[f"openelm.{key}"] == of_apple["head_dim"]
    assert fields["openelm.attention.layer_norm_rms_epsilon"] == np.float32(1e-6)
    assert fields["general.name"] == "tiny-openelm"
    assert fields["general.file_type"] == gguf.LlamaFileType.ALL_F32


def test_metadata_has_the_tokenizer_and_one_bos(exported):
    pieces = sentencepiece.SentencePieceProcessor(
        model_file=str(exported.parent.parent / "512.model")
    )
    fields = fields_of(exported)

    assert fields["tokenizer.ggml.model"] == "llama"
    assert fields["tokenizer.ggml.tokens"] == [pieces.id_to_piece(i) for i in range(512)]
    assert fields["tokenizer.ggml.scores"] == [pieces.get_score(i) for i in range(512)]
    kinds = {2: [0], 3: [1, 2], 6: list(range(3, 259)), 1: list(range(259, 512))}
    assert fields["tokenizer.ggml.token_type"] == [
        next(kind for kind, ids in kinds.items() if i in ids) for i in range(512)
    ]
    ids = {name: fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "unknown")}
    assert ids == {"bos": 1, "eos": 2, "unknown": 0}
    assert fields["tokenizer.ggml.add_bos_token"] is True
    assert fields["tokenizer.ggml.add_eos_token"] is False
    assert fields["tokenizer.ggml.add_space_prefix"] is True


def test_the_fixtures_tensors_are_there_with_gate_and_up_apart(exported):
    theirs = safetensors.numpy.load_file(FIXTURE / "model.safetensors")
    ours = {tensor.name: tensor.data for tensor in gguf.GGUFReader(exported).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.OPENELM, 4)

    assert len(ours) == 38
    for name, tensor in theirs.items():
        if name.endswith("proj_1.weight"):
            block = f"blk.{name.split('.')[2]}"
            halves = ours.pop(f"{block}.ffn_gate.weight"), ours.pop(f"{block}.ffn_up.weight")
            np.testing.assert_array_equal(np.concatenate(halves), tensor)
        else:
            mine = ours.pop(names.get_name(name, try_suffixes=(".weight",)))
            np.testing.assert_array_equal(mine, tensor)
    assert not ours


@pytest.mark.parametrize(
    ("outtype", "file_type"), [("f16", "F16"), ("bf16", "BF16"), ("q8_0", "Q8_0")]
)
def test_norms_stay_float32_and_the_rest_has_the_type_asked_for(tmp_path, outtype, file_type):
    file = write(tmp_path, tiny(ffn_dim_divisor=32), outtype=outtype)

    of_type = {
        kind: {t.name for t in gguf.GGUFReader(file).tensors if t.tensor_type.name == kind}
        for kind in ("F32", file_type)
    }
    assert all("norm" in name for name in of_type["F32"])
    assert not any("norm" in name for name in of_type[file_type])
    assert len(of_type["F32"]) + len(of_type[file_type]) == 3 * 9 + 2
    assert fields_of(file)["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{file_type}"]


def test_rows_that_are_no_whole_blocks_become_float16_and_are_named(tmp_path, capsys):
    config = tiny(ffn_multipliers=(0.5, 0.75, 1.0))  # 32, 48 and 64 wide
    file = write(tmp_path, config, outtype="q8_0")

    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(file).tensors}
    assert [name for name, kind in kinds.items() if kind == "F16"] == ["blk.1.ffn_down.weight"]
    assert "blk.1.ffn_down.weight is written as f16" in capsys.readouterr().err


def test_values_above_float16s_largest_are_named_and_bfloat16_has_them(tmp_path, capsys):
    config = tiny()
    params = random_params(config)
    params["layers_1"]["ffn"]["up"][3, -1] = -70000.0  # of the second half of the columns

    write(tmp_path / "f16", config, params, outtype="f16")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: blk.1.ffn_up.weight reaches 70000")
    write(tmp_path / "bf16", config, params, outtype="bf16")
    assert capsys.readouterr().err == ""


def test_a_tensor_at_a_time_is_in_memory(tmp_path):
    config = tiny(num_layers=12, model_dim=512, ffn_multipliers=2.0)
    largest = 512 * 2 * 1024 * 4
    shapes = {weight.path: weight.shape for weight in named_weights(config)}
    stored = StoredWeights(
        config=config,
        read=lambda path: np.ones(shapes[path], np.float32),
        source="ones",
        tokenizer=tokenizer(),
    )
    for outtype in ("f32", "q8_0"):
        tracemalloc.start()
        write_gguf(tmp_path, stored, outtype=outtype)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * largest, outtype
    assert (tmp_path / "model.gguf").stat().st_size > 6 * largest  # as q8_0, a quarter of it


# --- round trips -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(tiny(), id="as published"),
        pytest.param(tiny(rope_base=500000.0, context_length=4096), id="long"),
        pytest.param(tiny(qkv_multipliers=(0.5, 1.0, 0.75), ffn_multipliers=1.0), id="by layer"),
        pytest.param(
            tiny(num_layers=1, num_gqa_groups=1, ffn_multipliers=2.0), id="one layer, no groups"
        ),
        pytest.param(tiny(num_layers=2, head_dim=4, num_gqa_groups=4), id="narrow heads"),
    ],
)
def test_float32_comes_back_bit_for_bit(tmp_path, config):
    params = random_params(config)

    config_read, params_read, _ = read(write(tmp_path, config, params))

    assert config_read == config
    assert_same(params_read, params)


@pytest.mark.parametrize(("outtype", "dtype"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_halves_are_rounded_once_and_come_back_to_the_same_bits(tmp_path, outtype, dtype):
    config = tiny()
    params = random_params(config)
    rounded = jax.tree.map(lambda x: x.astype(dtype) if x.ndim > 1 else x, params)

    first = write(tmp_path / "first", config, params, outtype=outtype)
    _, params_read, _ = read(first)
    assert_same(params_read, rounded)

    second = write(tmp_path / "second", config, params_read, outtype=outtype)
    assert first.read_bytes() == second.read_bytes()


def test_q8_0_is_off_by_half_a_step_at_most(tmp_path):
    config = tiny(ffn_dim_divisor=32)
    params = random_params(config)

    _, params_read, _ = read(write(tmp_path, config, params, outtype="q8_0"))

    def compare(given, got):
        assert got.dtype == np.float32
        if given.ndim == 1:
            np.testing.assert_array_equal(got, given)
            return
        # Blocks of 32 lie along the inputs: rows of our kernels' transposes, and of the embedding.
        rows = (given, got) if given.shape[0] == PIECES else (given.T, got.T)
        given_blocks, got_blocks = (array.reshape(-1, 32) for array in rows)
        step = np.abs(given_blocks).max(axis=1, keepdims=True) / 127
        # The step itself is a float16: up to 2^-11 off, times 127.
        assert (np.abs(got_blocks - given_blocks) <= (0.5 + 127 / 2**11) * step).all()

    jax.tree.map(compare, params, params_read)


def test_rows_of_the_vocabulary_beyond_the_tokenizer_are_cut(tmp_path):
    config = tiny(vocab_size=PIECES + 4)
    params = random_params(config)

    config_read, params_read, tok = read(write(tmp_path, config, params))

    assert config_read.vocab_size == tok.vocab_size == PIECES
    np.testing.assert_array_equal(params_read["embedding"], params["embedding"][:PIECES])


def test_from_takes_the_directory_and_the_file(exported):
    with open_huggingface(FIXTURE) as stored:
        config, params = stored.config, read_params(stored)
    for where in (exported, exported.parent):
        with open_weights(where) as stored:
            assert stored.config == config
            assert stored.tokenizer.vocab_size == 512
            assert_same(read_params(stored), params)


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalize_qk_projections": False}, "normalize_qk_projections"),
        ({"tie_embeddings": False}, "tie_embeddings"),
        ({"activation": "gelu"}, "the activation gelu"),
        ({"ffn_with_glu": False}, "ffn_with_glu"),
        ({"normalization": "layer_norm"}, "layer_norm as its norm"),
    ],
)
def test_what_llama_cpp_cannot_run_is_not_written(tmp_path, changes, reason):
    config = tiny(**changes)

    with pytest.raises(UserError, match=r"llama\.cpp.*" + reason):
        write(tmp_path, config)
    assert not (tmp_path / "model.gguf").exists()


def test_without_a_tokenizer_nothing_is_written(tmp_path):
    with pytest.raises(UserError, match="--tokenizer FILE"):
        write_gguf(tmp_path, in_memory(tiny(), random_params(tiny())))


def test_the_extra_is_named_where_the_package_is_missing(tmp_path, monkeypatch):
    file = write(tmp_path, tiny())
    monkeypatch.setitem(sys.modules, "gguf", None)

    with pytest.raises(UserError, match=r"openelm_jax\[gguf\]"):
        write(tmp_path / "again", tiny())
    assert read(file)[0] == tiny()  # for reading floats it is not needed
