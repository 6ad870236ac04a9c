"""OpenELM for transformers: layers of their own widths, grouped queries, QK-norm, SwiGLU.

Legend: B batch, T time, S keys' length, D model, N query heads, K kv heads, G queries of a kv head,
H head dim, F ffn, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .configuration_openelm import OpenELMConfig

RMS_EPS = 1e-6
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swish": functional.silu,
    "silu": functional.silu,
    "gelu": functional.gelu,
}
# What transformers calls the cache in what it passes and takes: one name was followed by another.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class OpenELMRMSNorm(nn.Module):
    """Statistics in float32, cast back, then scaled."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # rms_norm squares in float32 whatever it is given; autocast may return more than that.
        return functional.rms_norm(x, x.shape[-1:], eps=RMS_EPS).type_as(x) * self.weight


class ResidualLinear(nn.Linear):
    """What is added to the residual stream: drawn narrower the more layers add to it."""

    def __init__(self, width: int, config: OpenELMConfig):
        super().__init__(width, config.model_dim, bias=False)
        self.init_std = (config.model_dim * 2 * config.num_transformer_layers) ** -0.5


class OpenELMAttention(nn.Module):
    def __init__(self, config: OpenELMConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        num_query_heads, num_kv_heads = config.num_query_heads[layer], config.num_kv_heads[layer]
        self.num_heads = (num_query_heads, num_kv_heads, num_kv_heads)
        self.qkv_proj = nn.Linear(
            config.model_dim, sum(self.num_heads) * config.head_dim, bias=False
        )
        self.out_proj = ResidualLinear(num_query_heads * config.head_dim, config)
        self.has_norms = config.normalize_qk_projections
        if self.has_norms:
            self.q_norm = OpenELMRMSNorm(config.head_dim)
            self.k_norm = OpenELMRMSNorm(config.head_dim)

    def forward(self, x_BTD, turns, mask_B1TS, cache):
        heads = self.qkv_proj(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q_BNTH, k_BKTH, v_BKTH = heads.split(self.num_heads, dim=1)
        if self.has_norms:
            q_BNTH, k_BKTH = self.q_norm(q_BNTH), self.k_norm(k_BKTH)
        q_BNTH, k_BKTH = (rotate(x, *turns).to(v_BKTH.dtype) for x in (q_BNTH, k_BKTH))
        k_BKSH, v_BKSH = k_BKTH, v_BKTH
        if cache is not None:
            k_BKSH, v_BKSH = cache.update(k_BKTH, v_BKTH, self.layer)
        mixed_BNTH = attend(q_BNTH, k_BKSH, v_BKSH, mask_B1TS)
        return self.out_proj(mixed_BNTH.transpose(1, 2).flatten(2))


class OpenELMFeedForward(nn.Module):
    """proj_2(activation(gate) * up), gate and up fused in that order in proj_1."""

    def __init__(self, config: OpenELMConfig, layer: int):
        super().__init__()
        width = config.ffn_dims[layer]
        self.has_gate = config.ffn_with_glu
        self.activation = ACTIVATIONS[config.activation_fn_name]
        self.proj_1 = nn.Linear(config.model_dim, (1 + self.has_gate) * width, bias=False)
        self.proj_2 = ResidualLinear(width, config)

    def forward(self, x_BTD):
        wide = self.proj_1(x_BTD)
        if not self.has_gate:
            return self.proj_2(self.activation(wide))
        gate_BTF, up_BTF = wide.chunk(2, dim=-1)
        return self.proj_2(self.activation(gate_BTF) * up_BTF)


class OpenELMDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: OpenELMConfig, layer: int):
        super().__init__()
        self.attn = OpenELMAttention(config, layer)
        self.ffn = OpenELMFeedForward(config, layer)
        self.ffn_norm = OpenELMRMSNorm(config.model_dim)
        self.attn_norm = OpenELMRMSNorm(config.model_dim)

    def forward(self, x_BTD, turns, mask_B1TS, cache=None):
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), turns, mask_B1TS, cache)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class OpenELMPreTrainedModel(PreTrainedModel):
    config_class = OpenELMConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["OpenELMDecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _can_compile_fullgraph = True

    def _init_weights(self, module: nn.Module) -> None:
        """Draw as OpenELM is drawn. For code beside weights, only a weight's owner is asked."""
        if isinstance(module, ResidualLinear):
            nn.init.normal_(module.weight, std=module.init_std)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, OpenELMRMSNorm):
            nn.init.ones_(module.weight)


class OpenELMModel(OpenELMPreTrainedModel):
    """Tokens to the normed last layer."""

    def __init__(self, config: OpenELMConfig):
        super().__init__(config)
        self.token_embeddings = nn.Embedding(config.vocab_size, config.model_dim)
        self.layers = nn.ModuleList(
            OpenELMDecoderLayer(config, layer) for layer in range(config.num_transformer_layers)
        )
        self.norm = OpenELMRMSNorm(config.model_dim)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self):
        return self.token_embeddings

    def set_input_embeddings(self, value):
        self.token_embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values=None,
        cache=None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, and not both.")
        x_BTD = self.token_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            use_cache = False  # a layer that is computed again would store its keys again
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if not use_cache:
            cache = None
        past = 0 if cache is None else cache.get_seq_length()
        slots_T = torch.arange(x_BTD.shape[1], device=x_BTD.device) + past
        mask_B1TS = visible(slots_T, attention_mask, cache)
        if position_ids is None:
            position_ids = slots_T[None]
        turns = angles(position_ids, self.config.head_dim, self.config.rope_freq_constant)
        states: tuple[torch.Tensor, ...] = (x_BTD,)
        for layer in self.layers:
            x_BTD = layer(x_BTD, turns, mask_B1TS, cache)
            states += (x_BTD,) if output_hidden_states else ()
        x_BTD = self.norm(x_BTD)
        return BaseModelOutputWithPast(
            last_hidden_state=x_BTD,
            hidden_states=(*states[:-1], x_BTD) if output_hidden_states else None,
            **{CACHE: cache},
        )


class OpenELMForCausalLM(OpenELMPreTrainedModel, GenerationMixin):
    """Tokens to logits of the next."""

    _tied_weights_keys = {"lm_head.weight": "transformer.token_embeddings.weight"}  # noqa: RUF012
    # Built and never called in untied files of other code.
    _keys_to_ignore_on_load_unexpected = [r"transformer\.classifier\.weight"]  # noqa: RUF012

    def __init__(self, config: OpenELMConfig):
        super().__init__(config)
        self.transformer = OpenELMModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.model_dim, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.transformer.token_embeddings

    def set_input_embeddings(self, value):
        self.transformer.token_embeddings = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values=None,
        cache=None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        outputs = self.transformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        x_BTD = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.lm_head(x_BTD[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits_BTV, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits_BTV,
            hidden_states=outputs.hidden_states,
            **{CACHE: outputs.get(CACHE)},
        )


def attend(q_BNTH, k_BKSH, v_BKSH, mask_B1TS):
    """Return what each query reads, causally without a mask: G queries share each key's head.

    A single query's group is laid out as G queries of one head. Several queries share heads in the
    kernel, but not with a mask: of CUDA's kernels only the one that keeps all weights can do both.
    """
    groups = q_BNTH.shape[1] // k_BKSH.shape[1]
    if q_BNTH.shape[2] == 1:
        q_BKGH = q_BNTH.reshape(*k_BKSH.shape[:2], groups, -1)
        mixed_BKGH = functional.scaled_dot_product_attention(
            q_BKGH, k_BKSH, v_BKSH, attn_mask=mask_B1TS
        )
        return mixed_BKGH.reshape(q_BNTH.shape)
    if mask_B1TS is not None:
        k_BNSH, v_BNSH = (x.repeat_interleave(groups, dim=1) for x in (k_BKSH, v_BKSH))
        return functional.scaled_dot_product_attention(q_BNTH, k_BNSH, v_BNSH, attn_mask=mask_B1TS)
    return functional.scaled_dot_product_attention(
        q_BNTH, k_BKSH, v_BKSH, is_causal=True, enable_gqa=groups > 1
    )


def visible(slots_T, attention_mask, cache):
    """Return which keys [B or 1, 1, T, S] each query sees, or None where that is plainly causal.

    A query always sees its own slot, so that a row of padding has no softmax over nothing.
    """
    if attention_mask is not None and attention_mask.ndim == 4:
        return attention_mask  # made by generate, for a cache of fixed length
    num_slots = len(slots_T)
    if cache is not None:
        fixed = getattr(cache.layers[0], "max_cache_len", None) if cache.layers else None
        num_slots = fixed or cache.get_seq_length() + len(slots_T)
    if num_slots == len(slots_T) and not has_padding(attention_mask):
        return None
    keys_S = torch.arange(num_slots, device=slots_T.device)
    mask_B1TS = (keys_S <= slots_T[:, None])[None, None]
    if attention_mask is not None:
        given_BS = attention_mask[:, :num_slots].bool()
        given_BS = functional.pad(given_BS, (0, num_slots - given_BS.shape[1]))
        mask_B1TS = mask_B1TS & given_BS[:, None, None, :]
        mask_B1TS = mask_B1TS | (keys_S == slots_T[:, None])[None, None]
    return mask_B1TS


def has_padding(attention_mask) -> bool:
    """Return whether a mask hides anything; while code is compiled, whether it might."""
    if attention_mask is None:
        return False
    return torch.compiler.is_compiling() or not attention_mask.all()


def angles(position_ids_BT, head_dim: int, base: float):
    """Return float32 cosine and sine [B, 1, T, H/2] of every pair's angle; there is no table."""
    half = torch.arange(head_dim // 2, dtype=torch.float32, device=position_ids_BT.device)
    frequency = base ** (-half / (head_dim // 2))
    angle_B1Th = position_ids_BT[:, None, :, None].float() * frequency
    return angle_B1Th.cos(), angle_B1Th.sin()


def rotate(x, cos, sin):
    """Return `x` turned, in float32: dimension i of a head and i + H/2 form a pair."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


__all__ = ["OpenELMForCausalLM", "OpenELMModel", "OpenELMPreTrainedModel"]
