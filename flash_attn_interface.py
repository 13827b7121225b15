"""FlashAttention-3's functions by upstream's top-level module name. Documentation: each function, and docs/fa3.md."""

# ruff: noqa: F401
from flash_attn._fa3 import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from flash_attn._fa3_combine import flash_attn_combine
from flash_attn._fa3_kvcache import flash_attn_with_kvcache, get_scheduler_metadata

__version__ = "3.0.0"
