"""A small GPT over bytes: enough of a real model (tied embedding, dropout, two kinds of parameters) to train on a CPU.

In: token ids, (batch, context + 1) int64. Out: the mean next-byte cross entropy, a scalar. No state but parameters, and
the running statistics of the optional BatchNorm, which each rank keeps for itself.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class GPTConfig:
    num_tokens: int = 256
    context: int = 128
    num_layers: int = 4
    num_heads: int = 4
    width: int = 160
    dropout: float = 0.1
    batch_norm: bool = False  # normalise the embedding over the batch: buffers that differ from rank to rank


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads, self.dropout = config.num_heads, config.dropout
        self.norm_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return F.dropout(self.project(mixed.transpose(1, 2).reshape(x.shape)), self.dropout, self.training)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.num_tokens, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.batch_norm = nn.BatchNorm1d(config.width) if config.batch_norm else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.num_tokens, bias=False)
        self.head.weight = self.token.weight
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1], device=tokens.device))
        if self.batch_norm is not None:
            x = self.batch_norm(x.flatten(0, 1)).view_as(x)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
