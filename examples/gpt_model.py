"""A small decoder-only transformer (GPT) over bytes, with the attention function as a parameter.

Letters: B batch, S sequence length, H heads, D head dimension, C = H * D model width.
Positions enter through ALiBi alone: head h lowers the score of a key by slope[h] for each byte that it lies back.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256


def flash_attention(q, k, v, slopes):
    """softmax(Q K^T / sqrt(D) + ALiBi) V, causal, by this package. q, k, v, result (B, S, H, D); slopes (H,) fp32."""
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)


def plain_attention(q, k, v, slopes):
    """The same by its definition, keeping the (B, H, S, S) matrix of probabilities for the backward pass."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, S, D)
    position = torch.arange(q.shape[2], device=q.device)
    distance = position[:, None] - position  # (S, S), negative in the future
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -math.inf)  # (H, S, S)
    scores = (q @ k.transpose(-2, -1)).float() * q.shape[-1] ** -0.5 + bias
    return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2)


@lru_cache(maxsize=1)
def alibi_mask(S, slopes, dtype, device):
    """What SDPA adds to the scores: ALiBi, and -inf in the future; (1, H, S, S) in q's dtype. slopes: a tuple."""
    position = torch.arange(S, device=device)
    distance = position[:, None] - position
    bias = -torch.tensor(slopes, device=device)[:, None, None] * distance
    return bias.masked_fill(distance < 0, -math.inf).to(dtype)[None]


def sdpa_attention(q, k, v, slopes):
    """The same by torch's scaled_dot_product_attention, which takes ALiBi as a matrix; it is built once."""
    mask = alibi_mask(q.shape[1], tuple(slopes.tolist()), q.dtype, q.device)
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask).transpose(1, 2)


ATTENTION = {"flash": flash_attention, "plain": plain_attention, "sdpa": sdpa_attention}


class SelfAttention(nn.Module):
    def __init__(self, width, heads, attention):
        super().__init__()
        self.heads = heads
        self.attention = ATTENTION[attention]
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.register_buffer("slopes", torch.tensor([2.0 ** (-8 * h / heads) for h in range(heads)]))

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).unbind(2)  # each (B, S, H, D)
        return self.out(self.attention(q, k, v, self.slopes).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, attention):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, attention)
        up, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes (B, S) to logits (B, S, 256). The output layer shares its weights with the embedding."""

    def __init__(self, layers, width, heads, attention):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attention) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for weight in (p for p in self.parameters() if p.dim() == 2):
            # GPT-2's 0.02 suits its width of 768 and more; here it costs 0.2 nats after 600 steps.
            nn.init.normal_(weight, std=width**-0.5)
        for block in self.blocks:
            # The residual stream sums 2 * layers branches; this keeps its variance from growing with depth.
            for branch in (block.attention.out, block.mlp[-1]):
                nn.init.normal_(branch.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens):
        return F.linear(self.norm(self.blocks(self.embedding(tokens))), self.embedding.weight)


@torch.no_grad()
def generate(model, prompt, length, seq_len, seed, temperature=0.8):
    """Sample `length` bytes after `prompt` (bytes); the model sees the last seq_len of them at each step."""
    generator = torch.Generator().manual_seed(seed)
    device = model.embedding.weight.device
    text = list(prompt)
    for _ in range(length):
        logits = model(torch.tensor([text[-seq_len:]], device=device))[0, -1].float().cpu()
        text.append(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).item())
    return bytes(text)
