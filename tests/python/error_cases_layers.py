"""The part of error_cases.py about layers, modules, losses and operations: (function, argument, call that raises)."""

from __future__ import annotations

from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from flash_attn import bert_padding
from flash_attn.layers import rotary
from flash_attn.layers.patch_embed import PatchEmbed
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.modules import attention, block, mha
from flash_attn.modules.flash_attention import FlashAttention
from flash_attn.ops import fused_dense
from flash_attn.ops.layer_norm import dropout_add_layer_norm_parallel_residual
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.layer_norm import layer_norm_fn
from flash_attn.utils import distributed
from flash_attn.utils.generation import InferenceParams

B, S, H, D, E = 2, 7, 4, 16, 64


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def _rotary():
    shapes = {"x": (B, S, H, D), "cos": (S, 8), "sin": (S, 8)}
    for argument, changes in (
        ("x", dict(x=(B, S, D))),
        ("x", dict(x=torch.zeros(B, S, H, D, dtype=torch.int64))),
        ("cos", dict(cos=(S, 8), sin=(S, 7))),
        ("cos", dict(cos=(S, D), sin=(S, D))),
        ("cos", dict(cos=(S - 1, 8), sin=(S - 1, 8))),
        ("cu_seqlens", dict(x=(5, H, D), cu_seqlens=int32(0, 5))),
        ("cu_seqlens", dict(x=(5, H, D), cu_seqlens=torch.tensor([0.0, 5.0]), max_seqlen=5)),
        ("seqlen_offsets", dict(seqlen_offsets=1)),
        ("seqlen_offsets", dict(seqlen_offsets=int32(0, 0, 0))),
        ("seqlen_offsets", dict(seqlen_offsets=torch.zeros(B))),
    ):
        given = {n: torch.zeros(a) if isinstance(a, tuple) else a for n, a in {**shapes, **changes}.items()}
        yield "apply_rotary_emb", argument, partial(rotary.apply_rotary_emb, **given)
    wide, cos = torch.zeros(S, D), torch.zeros(S, 8)
    yield "apply_rotary_emb_torch", "cos", lambda: rotary.apply_rotary_emb_torch(torch.zeros(B, S, H, D), wide, wide)
    for shape, heads in (((B, S, 2, H, D), None), ((B, S, D), None), ((B, S, 8, D), None), ((B, S, 8, D), 3)):
        call = partial(rotary.apply_rotary_emb_qkv_, torch.zeros(shape), cos, cos, num_heads_q=heads)
        yield "apply_rotary_emb_qkv_", "num_heads_q" if heads else "qkv", call
    yield "apply_rotary_emb_kv_", "kv", lambda: rotary.apply_rotary_emb_kv_(torch.zeros(B, S, 3, H, D), cos, cos)
    qkv = torch.zeros(B, S, 3, H, D)
    yield "RotaryEmbedding", "seqlen_offset", lambda: rotary.RotaryEmbedding(D)(qkv, seqlen_offset=-1)
    yield "RotaryEmbedding", "seqlen_offset", lambda: rotary.RotaryEmbedding(D)(qkv, seqlen_offset=int32(0, 1))


def _rotary_operators():
    """What apply_rotary does not ask again in Python."""
    good = dict(x=torch.zeros(B, S, H, D), cos=torch.zeros(S, 8), sin=torch.zeros(S, 8), offset=0, offsets=None)
    good.update(cu_seqlens=None, interleaved=False, conjugate=False, max_seqlen=None)
    packed = dict(x=torch.zeros(S, H, D), max_seqlen=S)
    for argument, changes in (
        ("x", dict(cu_seqlens=int32(0, S), max_seqlen=S)),
        ("x", dict(x=torch.zeros(B, S, H, D).int())),
        ("cos", dict(cos=torch.zeros(S, 7))),
        ("cos", dict(cos=torch.zeros(S, 8).int())),
        ("cos", dict(cos=torch.zeros(S, D), sin=torch.zeros(S, D))),
        ("offset", dict(offset=-1)),
        ("offset", dict(offset=1)),
        ("offsets", dict(offsets=torch.zeros(B))),
        ("offsets", dict(offsets=torch.zeros(B, 1).int())),
        ("cu_seqlens", dict(packed, cu_seqlens=int32(0))),
        ("max_seqlen", dict(packed, cu_seqlens=int32(0, S), max_seqlen=-1)),
        ("max_seqlen", dict(packed, cu_seqlens=int32(0, S), max_seqlen=None)),
    ):
        yield "torch.ops.flash_attn.rotate", argument, partial(torch.ops.flash_attn.rotate, **{**good, **changes})


def _attention_modules():
    x = torch.zeros(5, 3, H, D)
    packed = attention.FlashSelfAttention()
    yield "FlashSelfAttention", "cu_seqlens", lambda: packed(x, cu_seqlens=torch.tensor([0, 5]), max_seqlen=5)
    yield "FlashSelfAttention", "max_seqlen", lambda: packed(x, cu_seqlens=int32(0, 5))
    q, kv = torch.zeros(B, S, H, D), torch.zeros(B + 1, S, 2, H, D)
    yield "CrossAttention", "kv", lambda: attention.CrossAttention()(q, kv)
    for mask in (torch.ones(B, S), torch.ones(B, S + 1, dtype=torch.bool)):
        yield "FlashAttention", "mask", partial(FlashAttention(), q, q, q, mask=mask)


def _mha():
    MHA = mha.MHA
    for argument, options in (
        ("num_heads_kv", dict(num_heads=H, num_heads_kv=3)),
        ("num_heads", dict(num_heads=5)),
        ("use_alibi", dict(num_heads=H, use_alibi=True)),
        ("window_size", dict(num_heads=H, window_size=(2, 0))),
        ("rotary_emb_dim", dict(num_heads=H, cross_attn=True, rotary_emb_dim=4)),
    ):
        yield "MHA", argument, partial(MHA, E, **options)
    yield "ParallelMHA", "num_heads", lambda: mha.ParallelMHA(E, 5, None)
    yield "ParallelMHA", "num_heads_kv", lambda: mha.ParallelMHA(E, H, None, num_heads_kv=3)
    x, cu = torch.randn(B, S, E), int32(0, S)
    mask = torch.ones(B, S, dtype=torch.bool)
    flash = partial(MHA, E, H, use_flash_attn=True)
    for argument, module, options in (
        ("cu_seqlens", MHA(E, H), dict(cu_seqlens=cu, max_seqlen=S)),
        ("max_seqlen", flash(), dict(cu_seqlens=cu)),
        ("cu_seqlens", flash(rotary_emb_dim=4), dict(cu_seqlens=cu, max_seqlen=S)),
        ("key_padding_mask", flash(), dict(key_padding_mask=mask)),
        ("x_kv", flash(), dict(x_kv=x)),
        ("layer_idx", flash(), dict(inference_params=InferenceParams(S, B))),
        ("inference_params", flash(layer_idx=0), dict(inference_params=InferenceParams(S - 1, B))),
        ("inference_params", flash(layer_idx=0, dwconv=True), dict(inference_params=InferenceParams(S, B))),
        ("inference_params", flash(layer_idx=0), dict(inference_params=InferenceParams(S + 5, B, seqlen_offset=1))),
        ("inference_params", MHA(E, H, layer_idx=0), dict(inference_params=_ragged_generation())),
    ):
        yield "MHA", argument, partial(module, x, **options)


def _ragged_generation():
    params = InferenceParams(S + 5, B, seqlen_offset=1, lengths_per_sample=int32(1, 1))
    params.key_value_memory_dict[0] = torch.zeros(B, S + 5, 2, H, E // H)
    return params


def _block():
    identity = partial(block.Block, E, mixer_cls=lambda dim: nn.Identity(), mlp_cls=nn.Identity)
    yield "Block", "drop_path1", lambda: block.StochasticDepth(1.5)
    yield "Block", "fused_dropout_add_ln", lambda: identity(norm_cls=nn.Identity, fused_dropout_add_ln=True)
    yield "Block", "residual_in_fp32", lambda: identity(prenorm=False, residual_in_fp32=True)
    x = torch.zeros(B, S, E)
    yield "Block", "residual", lambda: identity(prenorm=False)(x, x)
    parallel = partial(block.ParallelBlock, E, mixer_cls=lambda dim: nn.Identity(), mlp_cls=nn.Identity)
    differing = partial(parallel, resid_dropout1=0.1, resid_dropout2=0.2, fused_dropout_add_ln=True)
    yield "ParallelBlock", "resid_dropout2", differing


def _losses_and_operations():
    logits, labels = torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)
    yield "CrossEntropyLoss", "reduction", lambda: CrossEntropyLoss(reduction="most")
    for argument, given in (
        ("logits", (logits[None], labels)),
        ("logits", (logits.long(), labels)),
        ("labels", (logits, labels[:2])),
        ("labels", (logits, logits[:, 0])),
        ("precomputed_lse", (logits, labels, torch.zeros(2))),
        ("logit_scale", (logits, labels, None, 0.0, -1.0)),
    ):
        yield "cross_entropy_loss", argument, partial(cross_entropy_loss, *given)

    def second_derivative():
        leaf = torch.zeros(3, 5, requires_grad=True)
        losses, _ = cross_entropy_loss(leaf, labels)
        torch.autograd.grad(losses.sum(), leaf, create_graph=True)

    yield "cross_entropy_loss", "create_graph", second_derivative
    x, weight = torch.zeros(3, 8), torch.ones(8)
    for argument, options in (
        ("residual", dict(residual=x[:2])),
        ("rowscale", dict(rowscale=torch.ones(3), x1=x)),
        ("rowscale", dict(rowscale=torch.ones(2))),
        ("weight1, bias1", dict(weight1=weight[:1])),
        ("weight1, bias1", dict(bias1=weight)),
        ("out, residual_out", dict(out=x[:1])),
        ("out_dtype", dict(out=x, out_dtype=torch.float16)),
        ("dropout_p", dict(dropout_p=1.0)),
    ):
        yield "layer_norm_fn", argument, partial(layer_norm_fn, x, weight, None, **options)
    yield "unpad_input, pad_input, index_first_axis", "input", lambda: bert_padding.index_first_axis(labels, labels)
    parallel = partial(dropout_add_layer_norm_parallel_residual, x, x, None, weight, None, None, weight, 0.0, 1e-5)
    yield "dropout_add_layer_norm_parallel_residual", "bias1", parallel
    padded, mask = torch.zeros(2, 3, 8), torch.full((2, 3), 2)
    unpad = bert_padding.unpad_input
    yield "unpad_input, pad_input, index_first_axis", "attention_mask", lambda: unpad(padded, mask[:1])
    concatenated = bert_padding.unpad_input_for_concatenated_sequences
    yield "unpad_input, pad_input, index_first_axis", "attention_mask_in_length", lambda: concatenated(padded, mask)
    yield "PatchEmbed", "x", lambda: PatchEmbed(16, 8, embed_dim=8)(torch.zeros(1, 3, 16, 24))
    for argument, value in (("activation", "tanh"), ("checkpoint_lvl", 3), ("heuristic", 7)):
        yield "FusedMLP", argument, partial(fused_dense.FusedMLP, 8, **{argument: value})
    yield "ParallelFusedMLP", "process_group", lambda: fused_dense.ParallelFusedMLP(8)


def _parallel():
    """Sizes that two ranks cannot share, without starting two."""

    def of_two(call):
        with mock.patch.object(dist, "get_world_size", lambda group=None: 2):
            with mock.patch.object(dist, "get_rank", lambda group=None: 0):
                call()

    rows = torch.zeros(3, 8)
    yield "reduce_scatter", "input_", lambda: of_two(lambda: distributed.reduce_scatter_raw(rows, None))
    linear = fused_dense.ColumnParallelLinear
    yield "ColumnParallelLinear", "multiple_of", lambda: of_two(lambda: linear(8, 9, None, multiple_of=2))


def all_cases():
    groups = (_rotary, _rotary_operators, _attention_modules, _mha, _block, _losses_and_operations, _parallel)
    return [case for group in groups for case in group()]
