"""The README.md beside exported weights: what they are, whence, and what they are not for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from openelm_jax.config import ModelConfig
from openelm_jax.model.scaling import layer_parameter_count, layer_shapes, parameter_count
from openelm_jax.weights.run_record import RunRecord
from openelm_jax.weights.stored import StoredWeights

USE = {
    "hf": "It loads in mlx-lm as it is. For transformers it needs the model's code: "
    "`AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)` if `modeling_openelm.py` "
    "lies here, else export it again with `--with-code`.",
    "mlx": '`python -m mlx_lm generate --model DIR --prompt "..."`',
    "gguf": '`llama-completion -m DIR/model.gguf -p "..." -no-cnv`',
    "corenet": "`model.pt` is what CoreNet loads, with the block of `model.yaml` in its own YAML.",
    "orbax": "`python -m openelm_jax.generate --from DIR`; every command takes DIR.",
}
LIBRARY = {"hf": "transformers", "mlx": "mlx", "gguf": "gguf"}


def write_model_card(
    directory: Path, stored: StoredWeights, *, target: str, written_as: str
) -> None:
    """Write the card of weights that were written for `target`, stored as `written_as` says."""
    lines = _lines(stored, target, written_as)
    (directory / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lines(stored: StoredWeights, target: str, written_as: str) -> Iterator[str]:
    config, record = stored.config, stored.record
    name = record.experiment.name if record else stored.name
    yield "---"
    if target in LIBRARY:
        yield f"library_name: {LIBRARY[target]}"
    yield from ("pipeline_tag: text-generation", "tags:", "- openelm", "---", "")
    yield from (f"# {name}", "")
    yield from (
        f"An OpenELM decoder of {parameter_count(config):,} parameters, written by openelm_jax "
        f"from `{stored.source}`.",
        "",
        USE[target],
        "",
    )
    yield from _sizes(config, written_as)
    yield from _training(record)
    yield from _limits()


def _sizes(config: ModelConfig, written_as: str) -> Iterator[str]:
    yield from ("## Sizes", "", "| | |", "| --- | --- |")
    for what, value in {
        "parameters": f"{parameter_count(config):,}",
        "layers": config.num_layers,
        "width": f"{config.model_dim:,}",
        "head dimension": config.head_dim,
        "vocabulary": f"{config.vocab_size:,} rows, "
        + ("shared with the output" if config.tie_embeddings else "and as many of the output"),
        "context": f"{config.context_length:,} tokens",
        "stored as": written_as,
    }.items():
        yield f"| {what} | {value} |"
    yield ""
    yield "| layer | query heads | key and value heads | feed-forward | parameters |"
    yield "| --- | --- | --- | --- | --- |"
    for i, shape in enumerate(layer_shapes(config)):
        parameters = layer_parameter_count(config, shape)
        yield (
            f"| {i} | {shape.num_query_heads} | {shape.num_kv_heads} | {shape.ffn_dim:,} | "
            f"{parameters:,} |"
        )
    yield ""


def _training(record: RunRecord | None) -> Iterator[str]:
    yield from ("## Training", "")
    if record is None:
        yield from ("These weights came without the record of a run: see where they are from.", "")
        return
    experiment, training = record.experiment, record.experiment.training
    optimizer = experiment.optimizer
    tokens = record.step * training.global_batch_size * experiment.model.context_length
    yield (
        f"{record.step:,} of {training.steps:,} updates with {training.global_batch_size:,} rows "
        f"of {experiment.model.context_length:,} tokens each, {tokens:,} tokens in all, "
        f"computed in {training.dtype}. AdamW (b1 {optimizer.b1}, b2 {optimizer.b2}, weight decay "
        f"{optimizer.weight_decay}), gradients clipped at {optimizer.clip_norm}, a learning "
        f"rate of {optimizer.peak_lr} after {optimizer.warmup_steps:,} updates, then a cosine; "
        f"z-loss {training.z_loss}; seed {training.seed}."
    )
    if record.averaged:
        steps = ", ".join(f"{step:,}" for step in record.averaged)
        yield from ("", f"These are the mean of the weights after {steps} updates.")
    yield from ("", "What was read:", "", *(f"- {line}" for line in record.data), "")
    yield from ("## Evaluation", "")
    if record.validation is None:
        yield "No loss on held-out text is recorded for these weights."
    else:
        nats, bits = record.validation
        yield "| held-out text | nats a token | bits a byte |"
        yield "| --- | --- | --- |"
        yield f"| at step {record.step:,} | {nats:.4f} | {bits:.4f} |"
    yield ""


def _limits() -> Iterator[str]:
    yield from (
        "## Intended use and limits",
        "",
        "For research on language models, and as a start for further training. Like any model "
        "trained on public text, it can produce what is false, harmful, biased or objectionable "
        "in answer to a prompt, and comes without any guarantee of safety: test it thoroughly for "
        "your use, and filter what it is given and what it gives.",
        "",
        "## Licence",
        "",
        "Not stated here: whoever publishes these weights states it, minding the licences of the "
        "texts and of the tokenizer.",
    )
