"""config.json, written and read: what each reader understands, and what other programs add."""

import json
from pathlib import Path

import pytest
from small_models import tiny

from openelm_jax.errors import UserError
from openelm_jax.model.scaling import layer_shapes
from openelm_jax.weights.huggingface_config import (
    config_from_fields,
    differing_readers,
    fields_of_config,
)

FIXTURE = Path(__file__).parent / "data" / "tiny-openelm"


@pytest.mark.parametrize(
    "changes",
    [
        {"qkv_multipliers": 0.5, "ffn_multipliers": 4.0},
        {"ffn_multipliers": (0.5, 1.25, 3.0)},
        {"num_layers": 2, "ffn_multipliers": (0.5, 4.0)},
        {"num_layers": 16},
        {"rope_base": 500000.0, "context_length": 4096},
        {"num_gqa_groups": 1},
    ],
    ids=str,
)
def test_a_configuration_comes_back_from_config_json(changes):
    config = tiny(**changes)

    fields = json.loads(json.dumps(fields_of_config(config, "float32")))

    assert config_from_fields(fields, "config.json") == config
    assert len(fields["ffn_multipliers"]) == config.num_layers


@pytest.mark.parametrize("ffn_multipliers", [2.0, [0.5, 4.0], [0.5, 2.0, 1.0]])
def test_a_number_a_pair_or_one_a_layer_are_accepted(ffn_multipliers):
    fields = fields_of_config(tiny(), "float32") | {"ffn_multipliers": ffn_multipliers}

    widths = [s.ffn_dim for s in layer_shapes(config_from_fields(fields, "config.json"))]

    expected = {2.0: [128, 128, 128], (0.5, 4.0): [32, 144, 256], (0.5, 2.0, 1.0): [32, 128, 64]}
    key = ffn_multipliers if isinstance(ffn_multipliers, float) else tuple(ffn_multipliers)
    assert widths == expected[key]


def test_silu_is_swish():
    fields = fields_of_config(tiny(), "float32") | {"activation_fn_name": "silu"}
    assert config_from_fields(fields, "config.json") == tiny()


def test_fields_that_change_no_logit_are_passed_over():
    fields = fields_of_config(tiny(), "float32") | {
        "_name_or_path": "apple/OpenELM-270M",
        "auto_map": {"AutoConfig": "configuration_openelm.OpenELMConfig"},
        "dtype": "bfloat16",
        "num_hidden_layers": 3,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "temperature": 0.6,
        "tie_word_embeddings": True,
    }
    assert config_from_fields(fields, "config.json") == tiny()


@pytest.mark.parametrize("only_what_differs", [True, False])
def test_the_config_json_that_transformers_writes_is_accepted(tmp_path, only_what_differs):
    """Its own class saves the fixture's fields with the bookkeeping of its version."""
    transformers = pytest.importorskip("transformers")

    class OpenELMConfig(transformers.PretrainedConfig):
        model_type = "openelm"

    fields = json.loads((FIXTURE / "config.json").read_text())
    file = tmp_path / "config.json"
    OpenELMConfig(**fields).to_json_file(file, use_diff=only_what_differs)
    written = json.loads(file.read_text())

    assert written["transformers_version"] == transformers.__version__
    expected = config_from_fields(fields, "the fixture")
    assert config_from_fields(written, "config.json") == expected


def test_a_list_of_every_layer_is_written_as_the_pair_it_comes_from():
    """The only list of query multipliers that Apple's configuration class takes is a pair."""
    listed = tiny(qkv_multipliers=(0.5, 0.75, 1.0))
    assert fields_of_config(listed, "float32")["qkv_multipliers"] == (0.5, 1.0)
    assert differing_readers(listed) == []
    same = tiny(qkv_multipliers=(0.7, 0.7, 0.7))
    assert fields_of_config(same, "float32")["qkv_multipliers"] == 0.7
    assert differing_readers(same) == []
    one = tiny(num_layers=1, qkv_multipliers=(0.5,))
    assert fields_of_config(one, "float32")["qkv_multipliers"] == 0.5


def test_a_list_that_comes_from_no_pair_is_written_with_a_warning():
    config = tiny(qkv_multipliers=(0.5, 1.0, 0.75))
    assert fields_of_config(config, "float32")["qkv_multipliers"] == (0.5, 1.0, 0.75)
    (warning,) = differing_readers(config)
    assert warning == (
        "Apple's Hugging Face code takes one number or a (first, last) pair as qkv_multipliers, "
        "not a list of 3."
    )


@pytest.mark.parametrize("name", ["num_gqa_groups", "share_input_output_layers", "vocab_size"])
def test_a_field_without_a_default_is_asked_for(name):
    fields = fields_of_config(tiny(), "float32")
    del fields[name]
    with pytest.raises(UserError, match=f"config.json: the field {name} is missing"):
        config_from_fields(fields, "config.json")
