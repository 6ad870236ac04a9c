"""OpenELM in plain PyTorch: what our training is compared with, and our logits are tested against.

Modules have the names of Apple's `.pt` files, so `weights/names.py` says which of our parameters
each of their tensors is. Torch is imported where the model is made, as every optional package is.

Legend: B batch, T time, D model, N query heads, K kv heads, H head dim, h half of it, F ffn,
V vocab.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from openelm_jax.config import ModelConfig
from openelm_jax.errors import UserError
from openelm_jax.model.scaling import LayerShape, layer_shapes
from openelm_jax.weights.names import Params, to_reference
from openelm_jax.weights.stored import in_memory

if TYPE_CHECKING:
    import torch

RMS_EPS = 1e-6


def torch_decoder(config: ModelConfig) -> torch.nn.Module:
    """Return a module from int64 tokens [B, T] to logits [B, T, V], its weights drawn by torch.

    Raises UserError for a model that is no OpenELM: layer norms, or a feed-forward without SwiGLU.
    """
    import torch
    from torch import nn
    from torch.nn import functional

    if (
        config.normalization != "rms_norm"
        or not config.ffn_with_glu
        or config.activation != "swish"
    ):
        raise UserError(
            "model: the PyTorch model is OpenELM's, with model.normalization rms_norm, "
            "model.ffn_with_glu True and model.activation swish; take an experiment that has these."
        )
    head_dim = config.head_dim

    class RMSNorm(nn.Module):
        """Statistics in float32, cast back, then scaled."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (
                functional.rms_norm(x.float(), x.shape[-1:], eps=RMS_EPS).type_as(x) * self.weight
            )

    class Attention(nn.Module):
        def __init__(self, shape: LayerShape) -> None:
            super().__init__()
            self.num_heads = (shape.num_query_heads, shape.num_kv_heads, shape.num_kv_heads)
            self.qkv_proj = nn.Linear(
                config.model_dim, shape.query_dim + 2 * shape.kv_dim, bias=False
            )
            self.out_proj = nn.Linear(shape.query_dim, config.model_dim, bias=False)
            if config.normalize_qk_projections:
                self.q_norm, self.k_norm = RMSNorm(head_dim), RMSNorm(head_dim)

        def forward(self, x_BTD: torch.Tensor, cos_Th, sin_Th) -> torch.Tensor:
            heads = self.qkv_proj(x_BTD).unflatten(-1, (-1, head_dim)).transpose(1, 2)
            q_BNTH, k_BKTH, v_BKTH = heads.split(self.num_heads, dim=1)
            if config.normalize_qk_projections:
                q_BNTH, k_BKTH = self.q_norm(q_BNTH), self.k_norm(k_BKTH)
            mixed_BNTH = functional.scaled_dot_product_attention(
                rotate(q_BNTH, cos_Th, sin_Th).to(v_BKTH.dtype),
                rotate(k_BKTH, cos_Th, sin_Th).to(v_BKTH.dtype),
                v_BKTH,
                is_causal=True,
                enable_gqa=config.num_gqa_groups > 1,
            )
            return self.out_proj(mixed_BNTH.transpose(1, 2).flatten(2))

    class FeedForward(nn.Module):
        def __init__(self, shape: LayerShape) -> None:
            super().__init__()
            self.proj_1 = nn.Linear(config.model_dim, 2 * shape.ffn_dim, bias=False)
            self.proj_2 = nn.Linear(shape.ffn_dim, config.model_dim, bias=False)

        def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
            gate_BTF, up_BTF = self.proj_1(x_BTD).chunk(2, dim=-1)
            return self.proj_2(functional.silu(gate_BTF) * up_BTF)

    class Layer(nn.Module):
        def __init__(self, shape: LayerShape) -> None:
            super().__init__()
            self.attn, self.ffn = Attention(shape), FeedForward(shape)
            self.attn_norm, self.ffn_norm = RMSNorm(config.model_dim), RMSNorm(config.model_dim)

        def forward(self, x_BTD: torch.Tensor, cos_Th, sin_Th) -> torch.Tensor:
            x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), cos_Th, sin_Th)
            return x_BTD + self.ffn(self.ffn_norm(x_BTD))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token_embeddings = nn.Embedding(config.vocab_size, config.model_dim)
            self.layers = nn.ModuleList(Layer(shape) for shape in layer_shapes(config))
            self.norm = RMSNorm(config.model_dim)
            if not config.tie_embeddings:
                self.classifier = nn.Linear(config.model_dim, config.vocab_size, bias=False)

        def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
            x_BTD = self.token_embeddings(tokens_BT)
            cos_Th, sin_Th = turns(tokens_BT.shape[1])
            for layer in self.layers:
                x_BTD = layer(x_BTD, cos_Th, sin_Th)
            head = self.token_embeddings if config.tie_embeddings else self.classifier
            return functional.linear(self.norm(x_BTD), head.weight)

    def turns(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        half = head_dim // 2
        frequency_h = config.rope_base ** (-torch.arange(half, dtype=torch.float32) / half)
        angle_Th = torch.arange(num_tokens)[:, None] * frequency_h
        return angle_Th.cos(), angle_Th.sin()

    def rotate(x, cos_Th, sin_Th) -> torch.Tensor:
        first, second = x.float().chunk(2, dim=-1)
        turned = [first * cos_Th - second * sin_Th, second * cos_Th + first * sin_Th]
        return torch.cat(turned, dim=-1)

    return Decoder()


def load_params(decoder: torch.nn.Module, config: ModelConfig, params: Params) -> None:
    """Give a decoder of `torch_decoder(config)` our parameters."""
    import torch

    left = dict(decoder.named_parameters())
    with torch.no_grad():
        for name, array in to_reference(
            config, in_memory(config, params).read, "corenet"
        ):  # one copy at a time
            left.pop(name).copy_(torch.from_numpy(np.array(array)))
    assert not left, f"not ours: {', '.join(left)}"
