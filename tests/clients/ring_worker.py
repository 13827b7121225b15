"""One rank of test_ring_flash_attn.py: python ring_worker.py FOLDER RANK WORLD_SIZE.

Every scenario has the same whole q, k, v and dout on all ranks, gives each rank its part of the sequence to
ring-flash-attn, and saves this rank's part of what one process computes, in fp32 and in bf16, next to what the ring
computed in bf16. (In fp32 ring-flash-attn's own sums go wrong: its copy of the first block's gradient, made with
.to(torch.float32), is then no copy.)
"""

import functools
import gc
import inspect
import sys
import types

import torch
import torch.distributed as dist
import torch.distributed.nn  # before any process group: examples/gpt_training.py says why

# ring-flash-attn 0.1.8 always imports its adapter for transformers, which needs a name that transformers 5 no longer
# has. Its attention functions, which are the subject here, do not use the adapter.
sys.modules["ring_flash_attn.adapters"] = types.ModuleType("ring_flash_attn.adapters")
sys.modules["ring_flash_attn.adapters"].substitute_hf_flash_attn = None
sys.modules["ring_flash_attn.adapters"].update_ring_flash_attn_params = None

import ring_flash_attn as ring  # noqa: E402
from ring_flash_attn import utils as ring_utils  # noqa: E402

import flash_attn  # noqa: E402
from flash_attn import flash_attn_interface as interface  # noqa: E402

B, S, H, Hk, D = 2, 48, 4, 2, 16
VARLEN = ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward")
LENGTHS = (32, 8, 24)  # multiples of 2 x world size; zigzag halves each rank's part


def contiguous(x, dim, rank, world_size):
    return x.chunk(world_size, dim)[rank]


def zigzag(x, dim, rank, world_size):
    """Of 2 W blocks, number r from the front and number r from the back, so that causal work is equal."""
    blocks = x.chunk(2 * world_size, dim)
    return torch.cat([blocks[rank], blocks[2 * world_size - 1 - rank]], dim)


def stripe(x, dim, rank, world_size):
    """Every W-th token, beginning with number r."""
    return x.unflatten(dim, (-1, world_size)).select(dim + 1, rank)


def per_sequence(split):
    """Splits each sequence of a packed batch rather than the row as a whole."""
    return lambda x, dim, rank, world_size: torch.cat([split(s, dim, rank, world_size) for s in x.split(LENGTHS, dim)])


def count_calls(calls):
    """Counts, by name, the raw functions' calls in every module of ring-flash-attn that imported them.

    ring-flash-attn rebuilds the arguments from the function's own signature, so each counter is a function with that.
    """
    for module in [m for name, m in sys.modules.items() if name.startswith("ring_flash_attn.")]:
        for name in ("_flash_attn_forward", "_flash_attn_backward", *VARLEN):
            function = getattr(module, name, None)
            if function is not None:
                assert function is getattr(interface, name)
                setattr(module, name, counter(function, calls))
    default_arguments = ring_utils._get_default_args
    ring_utils._get_default_args = lambda function: default_arguments(inspect.unwrap(function))


def counter(function, calls):
    calls[function.__name__] = 0

    @functools.wraps(function)
    def counted(*args, **kwargs):
        calls[function.__name__] += 1
        return function(*args, **kwargs)

    return counted


def run(function, tensors, dout):
    out = function(*tensors)
    return [out, *torch.autograd.grad(out, tensors, dout)]


def compare(save, name, split, whole, parts, shape):
    """whole(q, k, v): one process. parts(q, k, v): the ring's function on this rank's parts."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(5)
    heads = (H, Hk, Hk, H)
    q, k, v, dout = (torch.randn(*shape, n, D, generator=generator) for n in heads)
    dim = len(shape) - 1
    bf16 = [x.bfloat16() for x in (q, k, v, dout)]
    exact, one = (run(whole, [x.requires_grad_() for x in w[:3]], w[3]) for w in ([x.float() for x in bf16], bf16))
    local = [split(x.detach(), dim, rank, world_size).contiguous() for x in bf16]
    got = run(parts, [x.requires_grad_() for x in local[:3]], local[3])
    for label, a, b, c in zip(("out", "dq", "dk", "dv"), exact, one, got):
        save(f"{name} {label}", split(a, dim, rank, world_size), split(b, dim, rank, world_size), c)


def dense(save):
    for name, split, function, masks in (
        ("ring", contiguous, ring.ring_flash_attn_func, (False, True)),
        ("zigzag", zigzag, ring.zigzag_ring_flash_attn_func, (True,)),
        ("stripe", stripe, ring.stripe_flash_attn_func, (True,)),
    ):
        for causal in masks:

            def whole(q, k, v, causal=causal):
                return flash_attn.flash_attn_func(q, k, v, causal=causal)

            def parts(q, k, v, causal=causal, function=function):
                return function(q, k, v, causal=causal)

            compare(save, f"{name} {'causal' if causal else 'full'}", split, whole, parts, (B, S))


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def varlen(save):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cu, longest = bounds(LENGTHS), max(LENGTHS)
    local = (cu // world_size, longest // world_size)

    def whole(q, k, v):
        return flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True)

    for name, split, function in (
        ("ring varlen", contiguous, ring.ring_flash_attn_varlen_func),
        ("zigzag varlen", zigzag, ring.zigzag_ring_flash_attn_varlen_func),
    ):

        def parts(q, k, v, function=function):
            return function(q, k, v, *local, causal=True)

        compare(save, name, per_sequence(split), whole, parts, (sum(LENGTHS),))

    cu_q, cu_k, max_q, max_k, local_k = ring.llama3_flash_attn_prepare_cu_seqlens(cu, True, rank, world_size)

    def gathered(q, k, v):
        options = dict(heads_k_stride=1, local_k_slice=local_k, causal=True)
        return ring.llama3_flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, **options)

    compare(save, "llama3 varlen", contiguous, whole, gathered, (sum(LENGTHS),))


def main(folder, rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    results, calls = {}, {}
    count_calls(calls)

    def save(name, *tensors):
        results[name] = [x.detach().clone() for x in tensors]

    for scenario in (dense, varlen):
        scenario(save)
    torch.save({"results": results, "calls": calls}, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()
    gc.collect()  # what still holds the group keeps its threads


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
