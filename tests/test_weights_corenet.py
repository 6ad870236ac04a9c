"""CoreNet's files: every bit in and out, found by their YAML, and no code run."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from corenet_files import corenet_names, named_by_fsdp, save_training_checkpoint
from small_models import random_params, tiny

from openelm_jax import export
from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import load_experiment
from openelm_jax.model.scaling import layer_shapes
from openelm_jax.weights import corenet, corenet_training
from openelm_jax.weights.corenet_yaml import MODELS, corenet_name
from openelm_jax.weights.load import open_weights
from openelm_jax.weights.names import to_reference
from openelm_jax.weights.stored import in_memory, read_params

torch = pytest.importorskip("torch")
yaml = pytest.importorskip("yaml")

# The block of Apple's openelm_270M.yaml; other blocks stand around it there.
APPLES = """\
_anchor_vocab_size: &_anchor_vocab_size 32128
optim:
  adamw: {beta1: 0.9, eps: 1.e-8}
model:
  activation_checkpointing: false
  language_modeling:
    name: "general_gpt"
    general_gpt:
      model_name: "NAME"
      vocab_size: *_anchor_vocab_size
      max_context_length: 2048
      padding_index: 32000
"""
SMALLEST = ModelConfig(**MODELS["gpt-test"], vocab_size=48)


def tensors(config: ModelConfig, params: dict) -> dict:
    """Return PyTorch's state dict of a model, as CoreNet names it."""
    return {
        name: torch.tensor(np.array(array))
        for name, array in to_reference(config, in_memory(config, params).read, "corenet")
    }


@pytest.fixture
def written(tmp_path):
    """Return write(weights, yaml text): a file of weights with a YAML beside it."""

    def write(weights: dict, text: str = APPLES.replace("NAME", "gpt-test")) -> Path:
        file = tmp_path / "checkpoint_epoch_0_iter_9.pt"
        torch.save(weights, file)
        if text:
            (tmp_path / "openelm.yaml").write_text(text)
        return file

    return write


def read(file: Path, exp: str | None = None) -> tuple[ModelConfig, dict]:
    with open_weights(file, exp=exp) as stored:
        return stored.config, read_params(stored, dtype=None)


def bits(params):
    return jax.tree.map(lambda x: (str(x.dtype), x.shape, x.tobytes()), params)


# --- in and out --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(SMALLEST, id="CoreNet's"),
        pytest.param(tiny(), id="another"),
        pytest.param(tiny(tie_embeddings=False, normalization="layer_norm"), id="untied, biases"),
        pytest.param(tiny(ffn_with_glu=False, activation="gelu"), id="gelu without a gate"),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_every_bit_comes_back_in_its_type(tmp_path, config, dtype):
    params = jax.tree.map(lambda x: x.astype(dtype), random_params(config))

    corenet.write_corenet(tmp_path, in_memory(config, params))

    config_read, params_read = read(tmp_path / "model.pt")
    assert config_read == config
    assert bits(params_read) == bits(params)


def test_what_is_written_is_pytorch_s_state_dict_of_corenets_names(tmp_path):
    config = tiny(num_layers=2)
    params = random_params(config)

    corenet.write_corenet(tmp_path, in_memory(config, params), dtype="bfloat16")

    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(weights) == corenet_names(num_layers=2)
    qkv = torch.tensor(params["layers_1"]["attention"]["qkv"].T.copy()).to(torch.bfloat16)
    assert torch.equal(weights["layers.1.attn.qkv_proj.weight"], qkv)
    assert weights["layers.1.attn.qkv_proj.weight"].is_contiguous()


def test_apples_models_have_the_names_that_corenet_builds():
    names = {
        "270m": "OpenELM-270M",
        "450m": "OpenELM-450M",
        "1_1b": "OpenELM-1_1B",
        "3b": "OpenELM-3B",
    }
    for experiment, name in names.items():
        config = load_experiment(experiment).model
        assert corenet_name(config) == name
        assert layer_shapes(ModelConfig(**MODELS[name])) == layer_shapes(config)
    assert corenet_name(tiny()) is None


def test_the_yaml_has_the_block_of_corenets_own(tmp_path):
    corenet.write_corenet(tmp_path, in_memory(SMALLEST, random_params(SMALLEST)))

    assert yaml.safe_load((tmp_path / "model.yaml").read_text()) == {
        "model": {
            "language_modeling": {
                "name": "general_gpt",
                "general_gpt": {
                    "model_name": "gpt-test",
                    "vocab_size": 48,
                    "max_context_length": 2048,
                    "padding_index": None,
                },
            }
        }
    }


def test_export_says_when_corenet_has_no_such_model(tmp_path, capsys):
    for name, config in (("known", SMALLEST), ("unknown", tiny())):
        corenet.write_corenet(
            _new(tmp_path / "given" / name), in_memory(config, random_params(config))
        )
        capsys.readouterr()
        export.main(f"--from {tmp_path}/given/{name} --to corenet --out {tmp_path}/{name}".split())
        said = capsys.readouterr().err
        assert ("CoreNet cannot build this model" in said) == (name == "unknown")
        assert ("this program alone, which reads it back" in said) == (name == "unknown")
        first, again = (tmp_path / where / name / "model.yaml" for where in ("given", ""))
        assert first.read_bytes() == again.read_bytes()


def test_what_float16_cannot_hold_is_said_with_its_size(tmp_path, capsys):
    params = random_params(SMALLEST)
    params["final_norm"]["scale"][3] = 7e4

    corenet.write_corenet(tmp_path, in_memory(SMALLEST, params), dtype="float16")

    assert "norm.weight reaches 70000, which float16 cannot hold" in capsys.readouterr().err


def _new(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


# --- which model -------------------------------------------------------------------------------


def test_the_rows_of_the_vocabulary_are_the_file_s(written):
    """Whatever the YAML says: files are passed on with the unused rows cut off."""
    params = random_params(SMALLEST)

    config, params_read = read(written(tensors(SMALLEST, params)))

    assert config == SMALLEST  # 48 rows; the YAML says 32128
    assert bits(params_read) == bits(params)


def test_the_yaml_of_the_same_name_is_taken_among_several(written, tmp_path):
    file = written(tensors(SMALLEST, random_params(SMALLEST)))
    (tmp_path / "openelm.yaml").rename(file.with_suffix(".yaml"))
    (tmp_path / "another.yaml").write_text("model: {}")

    assert read(file)[0] == SMALLEST


@pytest.mark.parametrize("text", ["", "optim: {name: adamw}"])
def test_without_a_model_in_the_yaml_an_experiment_says_it(written, tmp_path, text):
    config = dataclasses.replace(load_experiment("tiny").model, num_layers=2, vocab_size=48)
    (tmp_path / "mine.py").write_text(
        "import dataclasses\nfrom openelm_jax.experiment_file import load_experiment\n"
        "def experiment():\n    tiny = load_experiment('tiny')\n"
        "    model = dataclasses.replace(tiny.model, num_layers=2)\n"
        "    return dataclasses.replace(tiny, model=model)\n"
    )
    file = written(tensors(config, random_params(config)), text)

    assert read(file, exp=str(tmp_path / "mine.py"))[0] == config
    with pytest.raises(UserError, match=r"does not say which model .* with --exp"):
        read(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            APPLES.replace("NAME", "OpenELM-9B"),
            "model_name is 'OpenELM-9B'; known are OpenELM-270M",
        ),
        ("model: [", "openelm.yaml is no YAML"),
        (APPLES.replace("2048", "0").replace("NAME", "gpt-test"), "context_length"),
        (APPLES.replace('"NAME"', "[x]"), r"model_name is \['x'\]; known are OpenELM-270M"),
        ("openelm_jax: {model_type: llama}", "model_type is 'llama'"),
        ("model: !!python/object/apply:os.system ['true']", "is no YAML"),
    ],
)
def test_a_yaml_that_describes_no_model_is_refused(written, text, message):
    with pytest.raises(UserError, match=message) as refusal:
        read(written({}, text))
    assert "openelm.yaml" in str(refusal.value)


# --- bad files ---------------------------------------------------------------------------------


class Trap:
    def __reduce__(self):
        return os.mkdir, ("sprung",)


def test_a_pickle_that_wants_to_run_code_is_refused(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = tensors(SMALLEST, random_params(SMALLEST))

    with pytest.raises(UserError, match=r"is refused: it asks for (posix|nt)\.mkdir") as refusal:
        read(written(weights | {"more": Trap()}))

    assert len(str(refusal.value).splitlines()) == 1
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.99])
def test_a_file_cut_short_is_named(written, kept):
    file = written(tensors(SMALLEST, random_params(SMALLEST)))
    content = file.read_bytes()
    file.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])

    with pytest.raises(UserError, match=rf"{file.name} is damaged, cut short"):
        read(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.weight": None}, "1 missing .norm.weight."),
        ({"classifier.weight": torch.zeros(2)}, "1 unexpected .classifier.weight."),
        ({"norm.weight": torch.zeros(3)}, r"norm.weight is \[3\], .* makes it \[128\]"),
        ({"norm.weight": torch.zeros(128).double()}, "norm.weight is stored as float64; known are"),
        ({"norm.weight": 3}, "is no model's state dict, for norm.weight is no tensor"),
        ({0: torch.zeros(2)}, "is no model's state dict, for 0 is no name of a tensor"),
        ({"norm.weight": torch.ones(128).to_sparse()}, "for norm.weight is sparse or without val"),
        ({"norm.weight": torch.ones(128, device="meta")}, "for norm.weight is sparse or without"),
        (
            {"token_embeddings.weight": torch.tensor(1.0)},
            r"token_embeddings.weight is \[\], .* makes it \[32128, 128\]",
        ),
        ({"model_state_dict": [1]}, "is no model's state dict, for it is a list"),
        ({"model_state_dict": torch.ones(1)}, "is no model's state dict, for it is a Tensor"),
    ],
)
def test_what_is_not_the_model_is_named(written, change, message):
    weights = tensors(SMALLEST, random_params(SMALLEST)) | change
    weights = {name: value for name, value in weights.items() if value is not None}

    with pytest.raises(UserError, match=message):
        read(written(weights))


def test_a_list_of_tensors_is_no_model(written):
    with pytest.raises(UserError, match="holds a list"):
        read(written([torch.zeros(3)]))


# --- training checkpoints ----------------------------------------------------------------------

NAMES = corenet_names(num_layers=1)


def moments() -> tuple[dict, list[str]]:
    """Return AdamW's state as PyTorch numbers it, each moment filled with a value of its own, and
    the names in the order of the numbers."""
    shapes = {
        name: tensor.shape for name, tensor in tensors(SMALLEST, random_params(SMALLEST)).items()
    }
    order = [n for n in NAMES if len(shapes[n]) == 2] + [n for n in NAMES if len(shapes[n]) == 1]
    states = {
        number: {
            "step": torch.tensor(7.0),
            "exp_avg": torch.full(shapes[name], float(NAMES.index(name))),
            "exp_avg_sq": torch.full(shapes[name], NAMES.index(name) + 0.5),
        }
        for number, name in enumerate(order)
    }
    num_matrices = sum(len(shape) == 2 for shape in shapes.values())
    numbers = list(states)
    return {
        "state": states,
        "param_groups": [
            {"params": numbers[:num_matrices], "weight_decay": 0.1, "amsgrad": False},
            {"params": numbers[num_matrices:], "weight_decay": 0.0, "amsgrad": False},
        ],
    }, order


@pytest.fixture
def checkpoint(tmp_path):
    def write(optimizer: dict, iterations: int = 7) -> Path:
        file = tmp_path / "training_checkpoint_epoch_0_iter_7.pt"
        weights = tensors(SMALLEST, random_params(SMALLEST))
        save_training_checkpoint(file, weights, optimizer, iterations)
        (tmp_path / "openelm.yaml").write_text(APPLES.replace("NAME", "gpt-test"))
        return file

    return write


def test_a_training_checkpoint_is_a_source_of_weights(checkpoint):
    optimizer, _ = moments()

    assert bits(read(checkpoint(optimizer))[1]) == bits(random_params(SMALLEST))


@pytest.mark.parametrize("names", [False, True])
def test_moments_come_by_our_paths_in_our_shapes(checkpoint, names):
    optimizer, order = moments()
    file = checkpoint(named_by_fsdp(optimizer, order) if names else optimizer)

    assert corenet_training.is_training_checkpoint(file)
    training = corenet_training.open_corenet_training(file)

    assert bits(training.params) == bits(random_params(SMALLEST))
    assert (training.step, training.updates) == (7, 7)
    for moment, shift in ((training.first_moment, 0.0), (training.second_moment, 0.5)):
        stored = in_memory(SMALLEST, moment)
        for name, array in to_reference(SMALLEST, stored.read, "corenet"):
            assert array.dtype == np.float32
            assert (array == NAMES.index(name) + shift).all(), name


def test_one_group_is_in_the_order_of_the_model(checkpoint):
    """CoreNet without no_decay_bn_filter_bias."""
    optimizer, order = moments()
    numbered = {NAMES.index(name): optimizer["state"][i] for i, name in enumerate(order)}
    group = optimizer["param_groups"][0] | {"params": list(range(len(NAMES)))}

    training = corenet_training.open_corenet_training(
        checkpoint({"state": numbered, "param_groups": [group]})
    )

    for name, array in to_reference(
        SMALLEST, in_memory(SMALLEST, training.first_moment).read, "corenet"
    ):
        assert (array == NAMES.index(name)).all(), name


def test_a_resumed_run_has_had_fewer_updates_than_it_counts(checkpoint):
    """CoreNet goes on with the number after the next."""
    optimizer, _ = moments()

    training = corenet_training.open_corenet_training(checkpoint(optimizer, iterations=9))

    assert (training.step, training.updates) == (9, 7)


def without_moment(optimizer):
    del optimizer["state"][2]["exp_avg_sq"]


def without_state(optimizer):
    del optimizer["state"][2]


def with_a_list_for_state(optimizer):
    optimizer["state"][2] = [1]


def with_amsgrad(optimizer):
    optimizer["param_groups"][0]["amsgrad"] = True


def with_another_group(optimizer):
    optimizer["param_groups"][0]["params"].pop()


def without_groups(optimizer):
    del optimizer["param_groups"]


def with_no_group(optimizer):
    optimizer["param_groups"] = []


def without_states(optimizer):
    del optimizer["state"]


def with_a_group_of_no_list(optimizer):
    optimizer["param_groups"][0]["params"] = 3


def misshapen(optimizer):
    optimizer["state"][0]["exp_avg"] = torch.zeros(3, 4)


def with_a_number_for_moment(optimizer):
    optimizer["state"][0]["exp_avg"] = 3


def updated_less(optimizer):
    optimizer["state"][3]["step"] = torch.tensor(4.0)


def updated_in_words(optimizer):
    optimizer["state"][3]["step"] = "seven"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_moment, r"no moments of layers\.0\.attn\.out_proj\.weight, as AdamW"),
        (without_state, r"no moments of layers\.0\.attn\.out_proj\.weight, as AdamW"),
        (with_a_list_for_state, r"no moments of layers\.0\.attn\.out_proj\.weight, as AdamW"),
        (with_amsgrad, "ran with amsgrad"),
        (with_another_group, "has 4 and 5 parameters, .* 5 matrices and 5 vectors"),
        (without_groups, "its optim_state_dict is no state of a PyTorch optimiser"),
        (without_states, "its optim_state_dict is no state of a PyTorch optimiser"),
        (with_a_group_of_no_list, "its optim_state_dict is no state of a PyTorch optimiser"),
        (with_no_group, "its optimiser has no moments of token_embeddings.weight"),
        (misshapen, r"exp_avg: token_embeddings\.weight is \[3, 4\], .* \[48, 128\]"),
        (with_a_number_for_moment, r"exp_avg is no model's .* token_embeddings\.weight is no tens"),
        (updated_less, "some parameters have had 4 updates and others 7"),
        (updated_in_words, "an optimiser's step is 'seven', not a number from 0"),
    ],
)
def test_the_state_of_another_optimiser_is_refused(checkpoint, damage, message):
    optimizer, _ = moments()
    damage(optimizer)

    with pytest.raises(UserError, match=message):
        corenet_training.open_corenet_training(checkpoint(optimizer))


@pytest.mark.parametrize(
    ("optimizer", "iterations", "message"),
    [
        ([1], 7, "its optim_state_dict is no state of a PyTorch optimiser"),
        (None, -3, "iterations is '-3', not a number from 0"),
        (None, "x", "iterations is 'x', not a number from 0"),
    ],
)
def test_a_training_checkpoint_of_other_things_is_refused(
    checkpoint, optimizer, iterations, message
):
    file = checkpoint(optimizer or moments()[0], iterations)

    with pytest.raises(UserError, match=message):
        corenet_training.open_corenet_training(file)
