"""Cross entropy with label smoothing, z loss and classes split over ranks; differentiable, in plain torch.

z loss: PaLM (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311). Letters: T rows, V classes of this rank, W
ranks.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
import torch.distributed as dist


def _local_labels(labels, V, process_group):
    """(labels as columns of this rank, whether they are this rank's, number of all classes)."""
    if process_group is None:
        return labels, torch.ones_like(labels, dtype=torch.bool), V
    own = labels - V * dist.get_rank(process_group)
    return own, (own >= 0) & (own < V), V * dist.get_world_size(process_group)


def _log_sum_exp(lse, process_group):
    """Over the classes of all ranks, from that over this rank's: (T)."""
    if process_group is None:
        return lse
    highest = lse.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=process_group)
    total = torch.exp(lse - highest)
    dist.all_reduce(total, group=process_group)
    return highest + torch.log(total)


class CrossEntropyLoss(torch.autograd.Function):
    """`cross_entropy_loss`."""

    @staticmethod
    def forward(
        ctx,
        logits,
        labels,
        precomputed_lse=None,
        smoothing=0.0,
        logit_scale=1.0,
        lse_square_scale=0.0,
        ignore_index=-100,
        inplace_backward=False,
        process_group=None,
    ):
        _check(logits, labels, precomputed_lse, logit_scale)
        V = logits.shape[1]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
        ignored = labels == ignore_index
        columns, own, classes = _local_labels(labels.long(), V, process_group)
        own = own & ~ignored
        known = precomputed_lse is not None and logit_scale == 1.0 and smoothing == 0.0  # as upstream has it
        lse = _log_sum_exp(precomputed_lse.to(wide.dtype) if known else torch.logsumexp(wide, dim=-1), process_group)
        chosen = wide.gather(1, columns.where(own, torch.zeros_like(columns))[:, None])[:, 0]
        expected = (1 - smoothing) * torch.where(own, chosen, torch.zeros_like(chosen))
        if smoothing > 0:
            expected = expected + smoothing / classes * wide.sum(-1)
        if process_group is not None:
            dist.all_reduce(expected, group=process_group)
        z_losses = lse_square_scale * lse.square()
        losses = (lse - expected + z_losses).masked_fill(ignored, 0.0)
        z_losses = z_losses.masked_fill(ignored, 0.0)
        ctx.save_for_backward(logits, lse, columns, own, ignored)
        ctx.mark_non_differentiable(z_losses)
        ctx.smoothing, ctx.classes, ctx.inplace_backward = smoothing, classes, inplace_backward
        ctx.logit_scale, ctx.lse_square_scale = logit_scale, lse_square_scale
        return losses, z_losses

    @staticmethod
    def backward(ctx, grad_losses, grad_z_losses):
        if torch.is_grad_enabled():
            raise RuntimeError("cross_entropy_loss has no second derivative; call backward without create_graph.")
        logits, lse, columns, own, ignored = ctx.saved_tensors
        grad = torch.exp(logits.to(lse.dtype) * ctx.logit_scale - lse[:, None])
        grad *= (1 + 2 * ctx.lse_square_scale * lse)[:, None]
        if ctx.smoothing > 0:
            grad -= ctx.smoothing / ctx.classes
        columns = columns.where(own, torch.zeros_like(columns))[:, None]
        grad.scatter_add_(1, columns, ((ctx.smoothing - 1) * own.to(grad.dtype))[:, None])
        grad *= (grad_losses * ctx.logit_scale)[:, None]
        grad.masked_fill_(ignored[:, None], 0.0)
        grad = logits.copy_(grad) if ctx.inplace_backward else grad.to(logits.dtype)
        return (grad, *[None] * 8)


def _check(logits, labels, precomputed_lse, logit_scale):
    assert logits.dim() == 2, f"logits has shape {tuple(logits.shape)}; it must be (T,V)."
    assert logits.is_floating_point(), f"logits has dtype {logits.dtype}; it must be a floating one."
    assert not (labels.is_floating_point() or labels.is_complex()), (
        f"labels has dtype {labels.dtype}; it must be an integer one."
    )
    assert labels.shape == logits.shape[:1], f"labels has shape {tuple(labels.shape)}; it must be ({len(logits)},)."
    assert logit_scale > 0.0, f"logit_scale is {logit_scale}; it must be positive."
    assert precomputed_lse is None or precomputed_lse.shape == labels.shape, (
        f"precomputed_lse has shape {tuple(precomputed_lse.shape)}; it must be ({len(logits)},)."
    )


def cross_entropy_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    precomputed_lse: Optional[torch.Tensor] = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index=-100,
    inplace_backward: bool = False,
    process_group=None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Losses of rows of logits: with s = logit_scale * logits, lse = log(sum(exp(s))) and V classes in all,

        loss = lse - (1 - label_smoothing) s[label] - label_smoothing / V sum(s) + lse_square_scale lse^2.

    logits: (T,V), any floating dtype. Computed in fp32 (fp64 for fp64). The gradient flows to these.
    labels: (T) int. Rows labelled ignore_index have loss and gradient 0.
    precomputed_lse: (T), where the caller has it: logsumexp(logits) over this rank's V classes. With a logit_scale or
        label_smoothing, for which it is no help, it is computed all the same.
    inplace_backward: write the gradient into the memory of logits.
    process_group: V classes of V*W lie on each rank, in the order of ranks; labels count them all.

    Returns (losses (T), their last term (T)), fp32 (fp64 for fp64). The second carries no gradient.
    """
    return CrossEntropyLoss.apply(
        logits,
        labels,
        precomputed_lse,
        label_smoothing,
        logit_scale,
        lse_square_scale,
        ignore_index,
        inplace_backward,
        process_group,
    )
