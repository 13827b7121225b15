"""The module that guides for AMD GPUs tell people to write, on this package's kernels: same names, shapes and meaning.

Here causal is aligned to the top left corner, query i sees keys 0 to i, as in those guides; in `flash_attn` to the
bottom right. The two differ only when Sq and Sk do.
"""

from __future__ import annotations

import flash_attn  # before torch: it says what to do where there is none
from flash_attn import __version__  # noqa: F401

# isort: split
import torch

from flash_attn.modules.flash_attention import check_mask


def _row_ends(q, k):
    """key_end int32 (1,Sq) of top-left causal attention: row i ends behind key i."""
    return torch.arange(1, q.shape[1] + 1, dtype=torch.int32, device=q.device)[None]


class FlashAttention(flash_attn.FlashAttention):
    """`flash_attn.FlashAttention`, with causal aligned to the top left corner."""

    def forward(self, q, k, v, mask=None):
        """q (B,Sq,H,D), k (B,Sk,Hk,D), v (B,Sk,Hk,Dv), mask as in `flash_attn.FlashAttention` -> (B,Sq,H,Dv)."""
        if not self.causal or q.shape[1] == k.shape[1]:
            return super().forward(q, k, v, mask)
        check_mask(mask, q, k)
        return flash_attn.flash_attn_func(q, k, v, self.dropout_now(), attn_mask=mask, key_end=_row_ends(q, k))


def flash_attn_func(q, k, v, dropout_p=0.0, causal=False, return_attn_probs=False):
    """softmax(q k^T / sqrt(D)) v: q (B,Sq,H,D), k (B,Sk,Hk,D), v (B,Sk,Hk,Dv) -> (B,Sq,H,Dv).

    dropout_p: acts whenever it is not 0. causal: aligned to the top left corner.
    return_attn_probs: also return the softmax weights (B,H,Sq,Sk) in q's dtype, before dropout. They are computed in
        plain torch, which takes memory of that size; gradients flow through both results.
    """
    out = FlashAttention(dropout_p, causal)(q, k, v)
    return (out, _probabilities(q, k, causal)) if return_attn_probs else out


def _probabilities(q, k, causal):
    """softmax(q k^T / sqrt(D)), in fp32 (fp64 for fp64) until the end."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q.to(wide), k.to(wide)) * q.shape[-1] ** -0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(-1).to(q.dtype)


class FlashAttentionInterface:
    """`flash_attn_func` in the form of an autograd function's forward, whose ctx is not used."""

    @staticmethod
    def forward(ctx, q, k, v, dropout_p=0.0, causal=False):
        """See `flash_attn_func`."""
        return flash_attn_func(q, k, v, dropout_p=dropout_p, causal=causal)
