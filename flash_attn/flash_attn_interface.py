"""Every name that upstream's module of this name has and its clients import. Documentation: see each function."""

# ruff: noqa: F401
from flash_attn._attention import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn._function_classes import (
    FlashAttnFunc,
    FlashAttnKVPackedFunc,
    FlashAttnQKVPackedFunc,
    FlashAttnVarlenFunc,
    FlashAttnVarlenKVPackedFunc,
    FlashAttnVarlenQKVPackedFunc,
)
from flash_attn._kvcache import flash_attn_with_kvcache
from flash_attn._raw import (
    USE_TRITON_ROCM,
    _flash_attn_backward,
    _flash_attn_backward_fake,
    _flash_attn_forward,
    _flash_attn_forward_fake,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_backward_fake,
    _flash_attn_varlen_forward,
    _flash_attn_varlen_forward_fake,
    _get_block_size_n,
    _torch_custom_op_wrapper,
    _torch_register_fake_wrapper,
    _wrapped_flash_attn_backward,
    _wrapped_flash_attn_forward,
    _wrapped_flash_attn_varlen_backward,
    _wrapped_flash_attn_varlen_forward,
    flash_attn_gpu,
    maybe_contiguous,
    round_multiple,
)
