"""Small inputs for every public function, where the numbers do not matter."""

import torch

from flash_attn import flash_attn_interface as interface


def randn(*shape, dtype=torch.float32, seed=0, requires_grad=False):
    generator = torch.Generator().manual_seed(seed + len(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(requires_grad)


def dense(requires_grad=False):
    """q (2,5,4,8), k (2,9,2,8), v (2,9,2,8)."""
    return [randn(2, n, h, 8, seed=i, requires_grad=requires_grad) for i, (n, h) in enumerate([(5, 4), (9, 2), (9, 2)])]


def varlen():
    """q (5,4,8), k (9,2,8), v (9,2,8), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k."""
    cu_seqlens = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 5], [0, 2, 9])]
    return [x[0] for x in dense()] + cu_seqlens + [3, 7]


def calls():
    """Every public function once: (function, arguments, shape of out, shape of softmax_lse)."""
    q, k, v = dense()
    packed_q, packed_k, packed_v, cu_q, cu_k, max_q, max_k = varlen()
    kv, packed_kv = torch.stack([k, v], dim=2), torch.stack([packed_k, packed_v], dim=1)
    qkv, packed_qkv = torch.stack([q, q, q], dim=2), torch.stack([packed_q, packed_q, packed_q], dim=1)
    lengths = (cu_q, cu_k, max_q, max_k)
    dense_shapes, varlen_shapes = ((2, 5, 4, 8), (2, 4, 5)), ((5, 4, 8), (4, 5))
    return {
        "Func": (interface.flash_attn_func, (q, k, v), *dense_shapes),
        "KVPackedFunc": (interface.flash_attn_kvpacked_func, (q, kv), *dense_shapes),
        "QKVPackedFunc": (interface.flash_attn_qkvpacked_func, (qkv,), *dense_shapes),
        "VarlenFunc": (interface.flash_attn_varlen_func, (packed_q, packed_k, packed_v, *lengths), *varlen_shapes),
        "VarlenKVPackedFunc": (
            interface.flash_attn_varlen_kvpacked_func,
            (packed_q, packed_kv, *lengths),
            *varlen_shapes,
        ),
        "VarlenQKVPackedFunc": (interface.flash_attn_varlen_qkvpacked_func, (packed_qkv, cu_q, max_q), *varlen_shapes),
    }
