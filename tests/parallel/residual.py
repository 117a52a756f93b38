"""A model with residual experts, as DeepSpeed-MoE has them: each token sees an MLP and its best expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.families import Family
from slipstream.spec import BlockSpec, MoE, Norm, Role
from slipstream.weights.recipe import Stack, Take

WIDTH, FFN, EXPERTS = 32, 48, 5


class Mixture(nn.Module):
    """Source of the formula: Rajbhandari et al. 2022 (arXiv 2201.05596), section 4.1."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.first = nn.Parameter(torch.randn(EXPERTS, FFN, WIDTH) / WIDTH**0.5)
        self.first_bias = nn.Parameter(torch.randn(EXPERTS, FFN) / 9)
        self.second = nn.Parameter(torch.randn(EXPERTS, WIDTH, FFN) / FFN**0.5)
        self.second_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 9)
        self.up, self.down = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)
        self.coefficient = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        weight, expert = self.gate(x).softmax(-1).max(-1)
        inner = torch.einsum("bsc,bsfc->bsf", x, self.first[expert]) + self.first_bias[expert]
        said = torch.einsum("bsf,bscf->bsc", nn.functional.gelu(inner), self.second[expert])
        said = (said + self.second_bias[expert]) * weight[..., None]
        both = self.coefficient(x).softmax(-1)
        return said * both[..., :1] + self.down(nn.functional.gelu(self.up(x))) * both[..., 1:]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_a, self.ln_b = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mixture = Mixture()

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln_a(x)
        q, k, v = (part(h).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.mixture(self.ln_b(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def spec(config: Any, index: int) -> BlockSpec:
    moe = MoE(EXPERTS, 1, shared=FFN, residual=True)
    return BlockSpec(
        WIDTH, 4, 4, 8, FFN, Norm("layer", 1e-5), activation="gelu", gated=False, scale=8**-0.5, moe=moe
    )


FAMILY = Family(
    name="residual",
    layers=("Layer",),
    spec=spec,
    recipes={
        Role.ATTN_NORM: Take("ln_a"),
        Role.QKV: Stack(("q", "k", "v")),
        Role.ATTN_OUT: Take("o"),
        Role.MLP_NORM: Take("ln_b"),
        Role.ROUTER: Take("mixture.gate"),
        Role.EXPERTS_IN: Take("mixture.first"),
        Role.EXPERTS_OUT: Take("mixture.second"),
        Role.SHARED_IN: Take("mixture.up"),
        Role.SHARED_OUT: Take("mixture.down"),
        Role.SHARED_GATE: Take("mixture.coefficient"),
    },
    tiny=(),
)
