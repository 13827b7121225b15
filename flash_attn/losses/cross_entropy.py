"""Cross entropy as a module, with upstream's name."""

from __future__ import annotations

import torch.nn as nn

from flash_attn.ops.triton.cross_entropy import cross_entropy_loss


class CrossEntropyLoss(nn.Module):
    """`flash_attn.ops.triton.cross_entropy.cross_entropy_loss`, reduced over rows.

    reduction: "mean" over rows that are not ignored, "sum", or "none".
    return_z_loss: also return the z loss, reduced in the same way, without gradient.
    """

    def __init__(
        self,
        ignore_index=-100,
        reduction="mean",
        label_smoothing=0.0,
        logit_scale=1.0,
        lse_square_scale=0.0,
        inplace_backward=False,
        process_group=None,
        return_z_loss=False,
    ):
        super().__init__()
        if reduction not in ("mean", "none", "sum"):
            raise NotImplementedError(f"reduction is {reduction!r}; it must be 'mean', 'none' or 'sum'.")
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.inplace_backward = inplace_backward
        self.process_group = process_group
        self.return_z_loss = return_z_loss

    def forward(self, input, target, precomputed_lse=None):
        """input (T,V), target (T) -> loss, or (loss, z loss)."""
        losses = cross_entropy_loss(
            input,
            target,
            precomputed_lse,
            self.label_smoothing,
            self.logit_scale,
            self.lse_square_scale,
            self.ignore_index,
            self.inplace_backward,
            self.process_group,
        )
        if self.reduction != "none":
            losses = [loss.sum() for loss in losses]
        if self.reduction == "mean":
            counted = (target != self.ignore_index).sum()
            losses = [loss / counted for loss in losses]
        return (losses[0], losses[1]) if self.return_z_loss else losses[0]
