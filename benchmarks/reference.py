"""Attention of one head by its definition, with gradients by autograd: what every row is checked against."""

from __future__ import annotations

import math

import torch

# Largest deviation of the checked head, relative to the largest entry of the exact result. A few roundings of the
# output's dtype; a wrong mask, scale or tail is off by far more.
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 4e-3}
QUERIES = 1024  # at a time, so that a long sequence needs no matrix of all its scores


def hidden(rows, Sk, last, causal=False, window_size=(-1, -1)):
    """Which keys (rows, Sk) these query positions do not see; the query `last` is aligned with the last key."""
    distance = torch.arange(Sk) - (rows[:, None] + Sk - 1 - last)  # key position minus query position
    left, right = window_size[0], 0 if causal else window_size[1]
    mask = torch.zeros(distance.shape, dtype=torch.bool)
    if left >= 0:
        mask |= distance < -left
    if right >= 0:
        mask |= distance > right
    return mask


def attention_of(q, k, v, rows, last, features):
    """Output (rows, Dv) of the queries q (rows, D) at positions `rows`; k (Sk, D), v (Sk, Dv).

    features: causal, window_size, softcap as in flash_attn_func, and one head's alibi_slopes (), attn_bias (Sq, Sk),
    attn_mask (Sk), learnable_sink (), and dropout_p with kept (Sq, Sk).
    """
    Sk = len(k)
    scores = q @ k.T / math.sqrt(q.shape[-1])
    if "softcap" in features:
        scores = features["softcap"] * torch.tanh(scores / features["softcap"])
    if "alibi_slopes" in features:
        position = rows[:, None] + Sk - 1 - last
        scores = scores - features["alibi_slopes"].to(scores) * (position - torch.arange(Sk)).abs().to(scores)
    if "attn_bias" in features:
        scores = scores + features["attn_bias"][rows].to(scores)
    masks = {name: features[name] for name in ("causal", "window_size") if name in features}
    mask = hidden(rows, Sk, last, **masks)
    if "attn_mask" in features:
        mask |= ~features["attn_mask"]
    scores = scores.masked_fill(mask.to(scores.device), -math.inf)
    if "learnable_sink" in features:
        sink = features["learnable_sink"].to(scores).expand(len(rows), 1)
        probabilities = torch.cat([scores, sink], dim=1).softmax(-1)[:, :-1]
    else:
        probabilities = scores.softmax(-1)
    if "dropout_p" in features:
        probabilities = probabilities * features["kept"][rows].to(scores) / (1 - features["dropout_p"])
    return probabilities @ v


def exact_head(q, k, v, dout=None, **features):
    """[out] of one head, or [dq, dk, dv] where dout (Sq, Dv) is given. q (Sq, D), k (Sk, D), v (Sk, Dv)."""
    last = len(q) - 1
    blocks = torch.arange(len(q)).split(QUERIES)
    if dout is None:
        return [torch.cat([attention_of(q[rows], k, v, rows, last, features) for rows in blocks])]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in blocks:
        inputs = [x.detach().requires_grad_() for x in (q[rows], k, v)]
        out = attention_of(*inputs, rows, last, features)
        gradients = torch.autograd.grad(out, inputs, dout[rows])
        dq[rows] = gradients[0]
        dk += gradients[1]
        dv += gradients[2]
    return [dq, dk, dv]


def deviation(results, expected):
    """Largest deviation of any result from the expected one, relative to the largest entry of the latter."""
    pairs = [(result.to(exact), exact) for result, exact in zip(results, expected)]
    return max(((result - exact).abs().max() / exact.abs().max()).item() for result, exact in pairs)


def exact_dtype(dtype):
    """One precision above the one tested."""
    return torch.float64 if dtype == "fp32" else torch.float32
