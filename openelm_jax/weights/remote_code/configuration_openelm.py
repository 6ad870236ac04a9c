"""OpenELM's configuration for transformers: the fields of Apple's config.json."""

from __future__ import annotations

from transformers import PretrainedConfig


def expand(multipliers: float | list[float], num_layers: int) -> list[float]:
    """Return a multiplier for each layer from one number, a (first, last) pair, or all of them.

    What lies on the line of a pair is rounded to two decimals, and nothing else is.
    """
    if not isinstance(multipliers, list | tuple):
        return [float(multipliers)] * num_layers
    is_one_repeated = len(set(multipliers)) == 1  # of two layers, not a pair to be rounded
    if len(multipliers) == num_layers and (num_layers != 2 or is_one_repeated):
        return [float(multiplier) for multiplier in multipliers]
    if len(multipliers) != 2:
        raise ValueError(f"{len(multipliers)} multipliers for {num_layers} layers: give 1, 2, all")
    first, last = multipliers
    step = (last - first) / max(num_layers - 1, 1)
    line = [first + i * step for i in range(num_layers)]
    if num_layers > 1:
        line[-1] = last
    return [round(point, 2) for point in line]


def make_divisible(value: float, divisor: int) -> int:
    """Return the multiple of `divisor` nearest to `value`, but not less than 0.9 of it."""
    nearest = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return nearest + divisor if nearest < 0.9 * value else nearest


class OpenELMConfig(PretrainedConfig):
    """A decoder whose layers have their own numbers of heads and widths of feed-forward."""

    model_type = "openelm"
    # What generic tools ask for, and what it is called here.
    attribute_map = {  # noqa: RUF012
        "hidden_size": "model_dim",
        "num_hidden_layers": "num_transformer_layers",
        "max_position_embeddings": "max_context_length",
    }

    def __init__(
        self,
        vocab_size: int = 32000,
        max_context_length: int = 2048,
        num_transformer_layers: int = 12,
        model_dim: int = 2048,
        head_dim: int = 128,
        qkv_multipliers: float | list[float] = 1.0,
        num_query_heads: list[int] | None = None,
        num_kv_heads: list[int] | None = None,
        num_gqa_groups: int = 1,
        ffn_multipliers: float | list[float] = 4.0,
        ffn_with_glu: bool = True,
        ffn_dim_divisor: int = 256,
        activation_fn_name: str = "swish",
        normalization_layer_name: str = "rms_norm",
        normalize_qk_projections: bool = False,
        share_input_output_layers: bool = False,
        rope_freq_constant: float = 10000,
        rope_max_length: int = 4096,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        bos_token_id: int | None = 1,
        eos_token_id: int | None = 2,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.max_context_length = max_context_length
        self.num_transformer_layers = num_transformer_layers
        self.model_dim = model_dim
        self.head_dim = head_dim
        self.num_gqa_groups = num_gqa_groups
        self.qkv_multipliers = qkv_multipliers
        query_heads = [
            make_divisible(model_dim * multiplier, head_dim * num_gqa_groups) // head_dim
            for multiplier in expand(qkv_multipliers, num_transformer_layers)
        ]
        kv_heads = [heads // num_gqa_groups for heads in query_heads]
        self.num_query_heads = _given_or(num_query_heads, query_heads, "num_query_heads")
        self.num_kv_heads = _given_or(num_kv_heads, kv_heads, "num_kv_heads")
        self.ffn_multipliers = expand(ffn_multipliers, num_transformer_layers)
        self.ffn_with_glu = ffn_with_glu
        self.ffn_dim_divisor = ffn_dim_divisor
        self.activation_fn_name = activation_fn_name
        self.normalization_layer_name = normalization_layer_name
        self.normalize_qk_projections = normalize_qk_projections
        self.share_input_output_layers = share_input_output_layers
        self.rope_freq_constant = rope_freq_constant
        self.rope_max_length = rope_max_length
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        kwargs |= {
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "tie_word_embeddings": share_input_output_layers,
        }
        super().__init__(**kwargs)
        if normalization_layer_name != "rms_norm":
            raise ValueError(
                f"normalization_layer_name is {normalization_layer_name}, not rms_norm."
            )

    @property
    def ffn_dims(self) -> list[int]:
        """The width of each layer's feed-forward."""
        return [
            make_divisible(multiplier * self.model_dim, self.ffn_dim_divisor)
            for multiplier in self.ffn_multipliers
        ]

    @property
    def num_attention_heads(self) -> int:
        """Those of the widest layer, for tools that know one number."""
        return max(self.num_query_heads)

    @property
    def num_key_value_heads(self) -> int:
        """Those of the widest layer."""
        return max(self.num_kv_heads)


def _given_or(given: list[int] | None, computed: list[int], name: str) -> list[int]:
    if given is not None and list(given) != computed:
        raise ValueError(f"{name} is {given}, but the multipliers make it {computed}.")
    return computed
