"""Work that divides badly against the same where it divides well, and what precedes attention over a cache."""

from __future__ import annotations

from functools import partial

import torch
from problems import DTYPES, SEED
from reference import deviation, exact_dtype, exact_head
from rows import Calls, Row

import flash_attn
from flash_attn.layers.rotary import apply_rotary_emb

D = 64
GROUP = 4  # query heads of a key head


def random_tensors(dtype, *shapes, gradients=False):
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(shape, generator=generator).to(DTYPES[dtype]).requires_grad_(gradients) for shape in shapes]


def backward_of(attention, tensors, dout):
    out = attention(*tensors)
    return lambda: torch.autograd.grad(out, tensors, dout, retain_graph=True)


def explained(function, *args, **kwargs):
    explanation = flash_attn.explain(function, *args, **kwargs)
    explanation = explanation.backward or explanation
    return {"kernel": explanation.kernel, "instruction_set": explanation.instruction_set}


def causal_backward(dtype, Hk, S):
    """Gradients of one causal sequence with Hk key heads."""
    q, k, v = random_tensors(dtype, (1, S, Hk * GROUP, D), *[(1, S, Hk, D)] * 2, gradients=True)
    (dout,) = random_tensors(dtype, q.shape)
    attention = partial(flash_attn.flash_attn_func, causal=True)
    call = backward_of(attention, (q, k, v), dout)

    def check():
        exact = exact_dtype(dtype)
        one = [x.detach()[0, :, -1].to(exact) for x in (q, k, v, dout)]
        return deviation([call()[0][0, :, -1]], exact_head(*one, causal=True)[:1])

    return Calls(call, check=check, **explained(flash_attn.flash_attn_func, q, k, v, causal=True))


def heads_calls(dtype, Hk, S):
    """Causal gradients with one key head more than the threads have in turn, next to one head fewer."""
    calls = causal_backward(dtype, Hk, S)
    calls.peer = causal_backward(dtype, Hk - 1, S).ours
    return calls


def lengths_calls(dtype, lengths, Hk):
    """Causal gradients of a packed batch, next to those of its sequences one by one."""
    shapes = [(sum(lengths), heads, D) for heads in (Hk * GROUP, Hk, Hk)]
    tensors = random_tensors(dtype, *shapes, gradients=True)
    (dout,) = random_tensors(dtype, shapes[0])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    ends = (cu_seqlens, cu_seqlens, max(lengths), max(lengths))
    call = backward_of(lambda q, k, v: flash_attn.flash_attn_varlen_func(q, k, v, *ends, causal=True), tensors, dout)
    singles = []
    for *one, its_dout in zip(*(x.detach().split(lengths) for x in (*tensors, dout))):
        one = [x[None].requires_grad_() for x in one]
        attention = partial(flash_attn.flash_attn_func, causal=True)
        singles.append(backward_of(attention, one, its_dout[None]))

    def one_by_one():
        return [torch.cat(parts, 1)[0] for parts in zip(*(single() for single in singles))]

    def peer():
        for single in singles:
            single()

    return Calls(
        call,
        peer,
        check=lambda: deviation(call(), one_by_one()),
        **explained(flash_attn.flash_attn_varlen_func, *tensors, *ends, causal=True),
    )


def cache_calls(dtype, capacity, keys, Sq, arguments):
    """flash_attn_with_kvcache of sequences that fill a part of the cache, next to attention over their keys alone.

    arguments: "" or what is done first: "append" Sq new keys, and "rotate" them and the queries.
    """
    B, H = 8, 8
    q, k_cache, v_cache, k, v = random_tensors(dtype, (B, Sq, H, D), *[(B, capacity, H, D)] * 2, *[(B, Sq, H, D)] * 2)
    before = keys - Sq if arguments else keys
    given = {"cache_seqlens": torch.full((B,), before, dtype=torch.int32), "causal": True}
    if arguments:
        given.update(k=k, v=v)
    if arguments == "rotate":
        cos, sin = random_tensors(dtype, *[(capacity, D // 2)] * 2)
        given.update(rotary_cos=cos, rotary_sin=sin)

    def call():
        return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **given)

    def check():
        out = call()[-1, :, -1]
        asked = apply_rotary_emb(q, cos, sin, True, seqlen_offsets=before) if arguments == "rotate" else q
        one = [x[-1, :, -1].to(exact_dtype(dtype)) for x in (asked, k_cache[:, :keys], v_cache[:, :keys])]
        return deviation([out], exact_head(*one, causal=True))

    there = [x[:, :keys] for x in (k_cache, v_cache)]
    return Calls(
        call,
        lambda: flash_attn.flash_attn_func(q, *there, causal=True),
        check=check,
        **explained(flash_attn.flash_attn_with_kvcache, q, k_cache, v_cache, **given),
    )


def rotate_in_torch(x, c, s, interleaved=False):
    """Rotary embedding of x (..., D) by c and s, which have D / 2 features."""
    if not interleaved:
        a, b = x.chunk(2, -1)
        return torch.cat([a * c - b * s, a * s + b * c], -1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)


def rotary_calls(dtype, S, interleaved):
    """Rotary embedding of (1, S, 8, D), next to the same in torch's operations."""
    x, cos, sin = random_tensors(dtype, (1, S, 8, D), *[(S, D // 2)] * 2)
    in_torch = partial(rotate_in_torch, x, cos[None, :, None], sin[None, :, None], interleaved)

    def call():
        return apply_rotary_emb(x, cos, sin, interleaved)

    return Calls(call, in_torch, check=lambda: deviation([call()], [in_torch()]))


def row(name, dtype, build, quantity, peer, **more):
    """A row for the record, without a bound."""
    return Row("uneven", f"uneven {dtype} {name}", dtype, build, quantity=quantity, peer=peer, **more)


def uneven_rows(options):
    rows, S = [], options.S // 2
    batches = {
        f"{S * 27 // 64}-1": ([S * 27 // 64, 1], 8),
        f"{S // 2}-20x{S // 32} Hk1": ([S // 2] + [S // 32] * 20, 1),
    }
    for dtype in options.dtypes:
        Hk = torch.get_num_threads() + 1
        build = partial(heads_calls, dtype, Hk, S)
        setting = {"B": 1, "S": S, "H": Hk * GROUP, "Hk": Hk, "D": D}
        scale = Hk / (Hk - 1)
        rows.append(row(f"Hk{Hk} backward", dtype, build, "rate", f"Hk={Hk - 1}", scale=scale, setting=setting))
        for name, batch in batches.items():
            rows.append(
                row(f"lengths-{name} backward", dtype, partial(lengths_calls, dtype, *batch), "cost", "one by one")
            )
        for Sq, arguments in ((1, ""), (16, "append"), (16, "rotate")):
            name = f"cache Sq{Sq} {arguments}".rstrip()
            build = partial(cache_calls, dtype, 2 * options.S, options.S // 4, Sq, arguments)
            rows.append(row(name, dtype, build, "cost", "the keys alone"))
        for interleaved in (False, True):
            name = "rotary interleaved" if interleaved else "rotary"
            rows.append(row(name, dtype, partial(rotary_calls, dtype, S, interleaved), "ratio", "torch"))
    return rows
