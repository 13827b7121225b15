"""Patch embedding of images as one matrix product, with upstream's name."""

from __future__ import annotations

import torch.nn as nn
from einops import rearrange
from torch.nn.modules.utils import _pair

from flash_attn.ops.fused_dense import FusedDense


class PatchEmbed(nn.Module):
    """Cuts images into patches and maps each to a vector: ViT (Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929).

    img_size, patch_size: int or (height, width), in pixels.
    norm_layer: made with embed_dim and applied to the vectors; None is no norm.
    flatten: patches in one dim, row by row; otherwise in a grid.
    fused_bias_fc: use `flash_attn.ops.fused_dense.FusedDense`, which computes the same.
    """

    def __init__(
        self,
        img_size=224,
        patch_size=16,
        in_chans=3,
        embed_dim=768,
        norm_layer=None,
        flatten=True,
        bias=True,
        fused_bias_fc=False,
    ):
        super().__init__()
        self.img_size = _pair(img_size)
        self.patch_size = _pair(patch_size)
        self.grid_size = tuple(size // patch for size, patch in zip(self.img_size, self.patch_size))
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.flatten = flatten
        linear = FusedDense if fused_bias_fc and bias else nn.Linear
        self.proj = linear(in_chans * self.patch_size[0] * self.patch_size[1], embed_dim, bias=bias)
        self.norm = norm_layer(embed_dim) if norm_layer else nn.Identity()

    def forward(self, x):
        """x (B,channels,height,width) -> (B,patches,embed_dim), or (B,rows,columns,embed_dim) without flatten."""
        height, width = self.img_size
        assert tuple(x.shape[2:]) == (height, width), (
            f"x has shape {tuple(x.shape)}; images must be {height} x {width} pixels, as img_size says."
        )
        p1, p2 = self.patch_size
        x = self.proj(rearrange(x, "b c (h p1) (w p2) -> b h w (c p1 p2)", p1=p1, p2=p2))
        return self.norm(x.flatten(1, 2) if self.flatten else x)
