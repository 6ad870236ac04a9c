"""Our own weights directory, the card beside every export, and the Hub's cache as a source."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from huggingface_directories import write_huggingface
from small_models import random_params, tiny

from openelm_jax import export
from openelm_jax.config import (
    CheckpointConfig,
    Experiment,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from openelm_jax.errors import UserError
from openelm_jax.experiment_file import to_json
from openelm_jax.generation.text_loss import text_loss
from openelm_jax.model.decoder import Decoder
from openelm_jax.model.scaling import parameter_count
from openelm_jax.tokenizer import train_tokenizer
from openelm_jax.training.checkpoint import Checkpointer
from openelm_jax.weights.load import load_weights, open_weights
from openelm_jax.weights.orbax import write_weights_directory
from openelm_jax.weights.stored import in_memory, read_params

LINES = [f"the {a} and the {b} are {a}{b}" for a in "abcdefgh" for b in "ijklmnop"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(LINES, 300, tmp_path_factory.mktemp("tokenizer") / "t.model")


def bits(params):
    return jax.tree.map(lambda x: (str(x.dtype), x.shape, x.tobytes()), params)


# --- our own directory -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_every_bit_comes_back_in_its_type(tmp_path, tokenizer, dtype):
    config = tiny(vocab_size=320, tie_embeddings=False)
    params = jax.tree.map(lambda x: x.astype(dtype), random_params(config))
    write_weights_directory(tmp_path, in_memory(config, params, tokenizer))

    with open_weights(tmp_path) as stored:
        assert stored.config == config
        assert stored.tokenizer.sha256 == tokenizer.sha256
        assert bits(read_params(stored, dtype=None)) == bits(params)


def test_a_flipped_bit_is_named(tmp_path):
    write_weights_directory(tmp_path, in_memory(tiny(), random_params(tiny())))
    largest = max((tmp_path / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)

    with pytest.raises(UserError, match=f"{largest.name} is damaged"):
        load_weights(tmp_path)


@pytest.mark.parametrize(
    ("to", "needs"),
    [
        ("hf --dtype float32", "safetensors"),
        ("mlx --dtype float32", "safetensors"),
        ("gguf --outtype f32", "gguf"),
        ("corenet", "torch"),
    ],
)
def test_there_and_back_every_bit_is_kept(tmp_path, tokenizer, to, needs):
    """Parameters, configuration and tokenizer, through the file of every other program."""
    pytest.importorskip(needs)
    config = tiny(vocab_size=300)
    params = random_params(config)
    (tmp_path / "first").mkdir()
    write_weights_directory(tmp_path / "first", in_memory(config, params, tokenizer))

    export.main(f"--from {tmp_path}/first --to {to} --out {tmp_path}/there".split())
    export.main(f"--from {tmp_path}/there --to orbax --out {tmp_path}/back".split())

    with open_weights(tmp_path / "back") as back:
        assert back.config == config
        assert bits(read_params(back, dtype=None)) == bits(params)
        assert back.tokenizer.encode("the a and the i").tolist() == (
            tokenizer.encode("the a and the i").tolist()
        )


@pytest.mark.parametrize("to", ["hf", "mlx", "gguf", "corenet --dtype bfloat16"])
def test_bfloat16_comes_back_to_the_same_bits(tmp_path, tokenizer, to):
    pytest.importorskip({"gguf": "gguf", "corenet --dtype bfloat16": "torch"}.get(to, "numpy"))
    config = tiny(vocab_size=300)
    params = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), random_params(config))
    (tmp_path / "first").mkdir()
    write_weights_directory(tmp_path / "first", in_memory(config, params, tokenizer))

    export.main(f"--from {tmp_path}/first --to {to} --out {tmp_path}/there".split())

    read = load_weights(tmp_path / "there").params
    assert bits(read) == bits(jax.tree.map(lambda x: x.astype(np.float32), params))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # tensorstore's
@pytest.mark.parametrize("to", ["hf", "gguf", "corenet", "orbax"])
def test_a_disk_that_takes_no_more_is_one_sentence_and_leaves_nothing(tmp_path, tokenizer, to):
    pytest.importorskip({"gguf": "gguf", "corenet": "torch"}.get(to, "numpy"))
    config = tiny(vocab_size=300)
    write_huggingface(tmp_path / "hf", config, random_params(config), tokenizer=tokenizer)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        with pytest.raises(UserError, match=r"out was not written \("):
            export.main(f"--from {tmp_path}/hf --to {to} --out {tmp_path}/out".split())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


# --- the card ----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, tokenizer):
    experiment = Experiment(
        name="small",
        model=ModelConfig(num_layers=2, model_dim=64, head_dim=16, vocab_size=320),
        optimizer=OptimizerConfig(peak_lr=1e-3),
        training=TrainingConfig(steps=400, global_batch_size=4),
    )
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "experiment.json").write_text(to_json(experiment))
    (directory / "tokenizer.model").write_bytes(tokenizer.model_bytes)
    checkpointer = Checkpointer(directory, CheckpointConfig())
    params = random_params(experiment.model)
    checkpointer.save(20, params=params, optimizer={"step": np.array(20)}, data={})
    checkpointer.close()
    figures = {"step": 20, "validation/loss": 3.25, "validation/bits_per_byte": 1.125}
    lines = [
        '{"step": 20, "validation/loss": 3.2',  # the machine failed in the middle of a line
        '{"step": 20, "validation/loss": 3.25}',
        json.dumps(figures),
    ]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def test_the_card_says_what_the_weights_are_and_how_they_were_trained(run, tmp_path, capsys):
    export.main(f"--from {run} --to hf --out {tmp_path}/out".split())

    card = (tmp_path / "out" / "README.md").read_text()
    config = ModelConfig(num_layers=2, model_dim=64, head_dim=16, vocab_size=300)
    assert f"{parameter_count(config):,} parameters" in card
    assert "| 1 | 4 | 1 | 256 |" in card  # layer, heads, feed-forward
    assert "20 of 400 updates" in card
    assert "| at step 20 | 3.2500 | 1.1250 |" in card
    assert "\n- not recorded for this step\n" in card  # the test's run has no data
    assert "whoever publishes these weights states it" in card
    assert f"{run}@20 written to" in capsys.readouterr().err


def test_the_record_of_a_run_goes_through_our_own_directory(run, tmp_path):
    export.main(f"--from {run} --to orbax --out {tmp_path}/ours".split())
    export.main(f"--from {run} --to hf --out {tmp_path}/at_once".split())
    export.main(f"--from {tmp_path}/ours --to hf --out {tmp_path}/later".split())

    at_once, later = ((tmp_path / name / "README.md").read_text() for name in ("at_once", "later"))
    assert later == at_once.replace(f"{run}@20", f"{tmp_path}/ours")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("{}", "is damaged; restore it, or delete it to go on"),
        ('{"experiment": {}, "step": 1, "data": [], "validation": null}', "name is missing"),
        ('{"validation": [1, 2, 3]}', "is damaged"),
    ],
)
def test_a_damaged_record_of_a_run_is_named(tmp_path, content, message):
    write_weights_directory(tmp_path, in_memory(tiny(), random_params(tiny())))
    (tmp_path / "run.json").write_text(content)

    with pytest.raises(UserError, match=rf"run\.json.*{message}"):
        load_weights(tmp_path)

    (tmp_path / "run.json").unlink()
    assert load_weights(tmp_path).config == tiny()


def test_weights_without_a_run_say_so(tmp_path):
    write_huggingface(tmp_path / "hf", tiny(), random_params(tiny()))
    export.main(f"--from {tmp_path}/hf --to orbax --out {tmp_path}/out".split())

    assert "without the record of a run" in (tmp_path / "out" / "README.md").read_text()


# --- the command -------------------------------------------------------------------------------


def test_the_loss_before_and_after_is_said_on_request(tmp_path, tokenizer, capsys):
    config = tiny(vocab_size=300)
    write_huggingface(tmp_path / "hf", config, random_params(config), tokenizer=tokenizer)
    (tmp_path / "text.txt").write_text("the a and the i are ai. " * 40)

    export.main(
        f"--from {tmp_path}/hf --to hf --out {tmp_path}/out --dtype float32 "
        f"--compare-on {tmp_path}/text.txt".split()
    )

    assert "as written (+0.0000)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "has_tokenizer", "message"),
    [
        (b"\xff\xfe\x00", True, r"text.txt: .*; give a text file in UTF-8"),
        (b"", True, "text.txt holds no text"),
        (b"the a and the i", False, "has no tokenizer to read"),
    ],
)
def test_a_text_that_cannot_be_compared_on_is_refused_before_anything_is_written(
    tmp_path, tokenizer, text, has_tokenizer, message
):
    config = tiny(vocab_size=300)
    given = tokenizer if has_tokenizer else None
    write_huggingface(tmp_path / "hf", config, random_params(config), tokenizer=given)
    (tmp_path / "text.txt").write_bytes(text)

    with pytest.raises(UserError, match=message):
        export.main(
            f"--from {tmp_path}/hf --to hf --out {tmp_path}/out "
            f"--compare-on {tmp_path}/text.txt".split()
        )

    assert not (tmp_path / "out").exists()


def test_losses_in_float32_are_that_on_every_device(monkeypatch):
    """On GPUs and TPUs float32 products are rounded unless they are asked not to be."""
    precisions = []
    apply = Decoder.apply

    def spy(*arguments, **named):
        precisions.append(jax.config.jax_default_matmul_precision)
        return apply(*arguments, **named)

    monkeypatch.setattr(Decoder, "apply", spy)
    config = tiny(vocab_size=41)  # no other test's, or what is compiled would be used again
    loss = text_loss(in_memory(config, random_params(config)), np.arange(9, dtype=np.int32))

    assert set(precisions) == {"highest"}
    assert 0 < loss < 100


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--to gguf --dtype float32", "hf and mlx and corenet; --to gguf takes --outtype"),
        ("--to hf --quantize 4", "--quantize is for --to mlx"),
        ("--to mlx --group-size 32", "give both"),
        ("--to orbax --with-code", "--with-code is for --to hf"),
    ],
)
def test_flags_that_say_nothing_together_are_refused(capsys, flags, message):
    with pytest.raises(SystemExit):
        export.main(f"--from somewhere --out elsewhere {flags}".split())
    assert message in capsys.readouterr().err


# --- the Hub -----------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache that holds one repository, and no way to the Hub."""
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    cache, commit = tmp_path / "hub", "0123456789abcdef0123456789abcdef01234567"
    repository = cache / "models--apple--OpenELM-270M"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    write_huggingface(repository / "snapshots" / commit, tiny(), random_params(tiny()))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("revision", ["", "@main", "@0123456789abcdef0123456789abcdef01234567"])
def test_the_hubs_cache_is_a_source(hub, revision):
    weights = load_weights(f"hf://apple/OpenELM-270M{revision}")

    assert weights.config == tiny()
    assert bits(weights.params) == bits(random_params(tiny()))


def test_what_is_exported_from_the_hub_has_its_name_there(hub, tmp_path, capsys):
    """And not that of its directory in the user's cache."""
    where = "hf://apple/OpenELM-270M@main"
    export.main(f"--from {where} --to hf --out {tmp_path}/out".split())

    card = (tmp_path / "out" / "README.md").read_text()
    assert "\n# OpenELM-270M\n" in card
    assert f"from `{where}`" in card
    assert str(tmp_path) not in card
    assert f"{where} written to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("hf://me/openelm-x@refs/pr/1", "openelm-x"),
        ("runs/tiny@500", "tiny@500"),
        ("runs/tiny, the mean of steps 1, 2", "tiny, the mean of steps 1, 2"),
        ("there/..", Path.cwd().name),
    ],
)
def test_the_name_of_weights_is_the_last_part_of_where_they_are(source, name):
    assert in_memory(tiny(), {}, source=source).name == name


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("hf://apple/OpenELM-9B", "hf://apple/OpenELM-9B: the Hub does not give it"),
        ("hf://apple", "the Hub's names are hf://OWNER/NAME"),
        ("hf://me/-x", "me/-x is no name that the Hub allows"),
        ("hf://me--x/a..b", "is no name that the Hub allows"),
        ("hf://me/x.git", "is no name that the Hub allows"),
    ],
)
def test_what_the_hub_does_not_have_is_one_sentence(hub, where, message):
    with pytest.raises(UserError, match=message):
        load_weights(where)


def test_what_is_fetched_is_no_code_and_no_pickle():
    from fnmatch import fnmatch

    from openelm_jax.weights.hub import FILES

    for file in ("modeling_openelm.py", "pytorch_model.bin", "checkpoint.pt"):
        assert not any(fnmatch(file, pattern) for pattern in FILES)
    for file in ("config.json", "model-00001-of-00002.safetensors", "tokenizer.model"):
        assert any(fnmatch(file, pattern) for pattern in FILES)
