"""Attention as a module on separate queries, keys and values with a boolean mask, as guides for AMD GPUs write it."""

from __future__ import annotations

import torch
import torch.nn as nn

from flash_attn._attention import flash_attn_func


class FlashAttention(nn.Module):
    """softmax(q k^T / sqrt(D)) v through `flash_attn_func`.

    dropout: probability with which softmax weights are dropped, in training only.
    causal: query i sees key j iff j <= i + Sk - Sq, aligned to the bottom right corner.
    """

    def __init__(self, dropout=0.0, causal=False):
        super().__init__()
        self.dropout = dropout
        self.causal = causal

    def extra_repr(self):
        return f"dropout={self.dropout}, causal={self.causal}"

    def forward(self, q, k, v, mask=None):
        """q (B,Sq,H,D), k (B,Sk,Hk,D), v (B,Sk,Hk,Dv) -> (B,Sq,H,Dv); dtypes as in `flash_attn_func`, fp32 too.

        mask: bool, True = keep: (B,Sk), (B,Sq,Sk), or (B,1,Sq,Sk) or (B,H,Sq,Sk). It is joined with causal. Rows that
            see no key give 0.
        """
        check_mask(mask, q, k)
        return flash_attn_func(q, k, v, self.dropout_now(), causal=self.causal, attn_mask=mask)

    def dropout_now(self):
        return self.dropout if self.training else 0.0


def check_mask(mask, q, k):
    """Raises unless mask is None or bool of a shape that `FlashAttention.forward` takes."""
    if mask is None:
        return
    assert mask.dtype == torch.bool, f"mask is {mask.dtype}; it must be bool, True where a key is kept."
    (B, Sq, H), Sk = q.shape[:3], k.shape[1]
    accepted = [(B, Sk), (B, Sq, Sk), (B, 1, Sq, Sk), (B, H, Sq, Sk)]
    assert tuple(mask.shape) in accepted, (
        f"mask has shape {tuple(mask.shape)}; it must be one of {', '.join(map(str, accepted))}: (B,Sk), (B,Sq,Sk), "
        "(B,1,Sq,Sk) or (B,H,Sq,Sk)."
    )
