"""Tensors of many gigabytes in pages that nobody has touched, so that they cost what is read and written of them."""

from __future__ import annotations

import mmap

import torch

NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python's mmap names since 3.13
FAR = (
    2**32 + 24
)  # elements; what 32 bits leave of it is a stride inside the memory, so that an overflow reads wrong values


def reserved(shape, strides=None, dtype=torch.float32):
    """A tensor of zeros, of any size: one page is backed by memory when it is first touched."""
    shape = torch.Size(shape)
    if strides is None:
        strides = torch.empty(shape, device="meta").stride()
    numel = sum((n - 1) * stride for n, stride in zip(shape, strides)) + 1
    memory = mmap.mmap(
        -1, numel * torch.empty((), dtype=dtype).element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    )
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def spread(x, dim):
    """x with neighbours along `dim` FAR elements from each other."""
    strides = list(x.contiguous().stride())
    strides[dim] = FAR
    far = reserved(x.shape, strides, x.dtype)
    far.copy_(x)
    assert torch.equal(far, x)
    return far
