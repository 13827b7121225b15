"""What attention layers keep between the steps of generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from torch import Tensor


@dataclass
class InferenceParams:
    """State of one generation, shared by all layers.

    max_seqlen, max_batch_size: extents of the caches.
    seqlen_offset: tokens that the caches hold, the same for every sequence.
    batch_size_offset: first row of the caches that this batch uses.
    key_value_memory_dict: layer_idx -> cache (max_batch_size, max_seqlen, 2, Hk, D).
    lengths_per_sample: int32 (max_batch_size), tokens in each row of the caches, in place of seqlen_offset; a batch has
        those from batch_size_offset on.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict = field(default_factory=dict)
    lengths_per_sample: Optional[Tensor] = None

    def reset(self, max_seqlen, max_batch_size):
        """For a new generation of those extents; the caches stay."""
        self.max_seqlen = max_seqlen
        self.max_batch_size = max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()
