"""transformers on the CPU: lets `attn_implementation="flash_attention_2"` reach flash_attn there.

transformers refuses that name unless torch sees a GPU, before flash_attn is called. On a GPU, ROCm included, nothing is
needed. Written for transformers 5.23 and 5.24; docs/clients.md has an example.
"""

from __future__ import annotations

import flash_attn

# What enable() replaced, by name; None while it has replaced nothing.
_replaced = None


def enable() -> None:
    """Makes transformers accept "flash_attention_2" for models on the CPU, in this process, until `disable`.

    Call it before the first model is made; calling it again changes nothing. It replaces three things of
    `transformers.modeling_flash_attention_utils`: the check whether FlashAttention-2 is available, the same check in
    the compatibility matrix, and the matrix's list of devices, to which the CPU is added. transformers then warns once
    that a model is "not initialized on GPU", and of fp32 that only fp16 and bf16 are supported: on the CPU both work.

    Raises ImportError without transformers, and RuntimeError, having changed nothing, when this version of
    transformers is built otherwise inside.
    """
    global _replaced
    if _replaced is not None:
        return
    import transformers
    from transformers import modeling_flash_attention_utils as utils

    problem = _difference(utils)
    if problem is None:
        _replaced = _replace(utils)
        problem = _outcome(utils)
        if problem is not None:
            disable()
    if problem is not None:
        raise RuntimeError(
            f"transformers {transformers.__version__} is not built inside as 5.23 and 5.24 are, for which enable() was "
            f'written: {problem}. Nothing was changed; install transformers 5.24, or use attn_implementation="sdpa" on '
            f"the CPU."
        )


def disable() -> None:
    """Undoes `enable`: transformers refuses "flash_attention_2" without a GPU again. Does nothing without `enable`."""
    global _replaced
    if _replaced is None:
        return
    from transformers import modeling_flash_attention_utils as utils

    utils.is_flash_attn_2_available = _replaced["is_flash_attn_2_available"]
    utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2] = _replaced["matrix"]
    _replaced = None


def _yes(*args, **kwargs) -> bool:
    return True


def _difference(utils):
    """What `enable` relies on and the module does not have, in words; None when all is there."""
    if not callable(getattr(utils, "is_flash_attn_2_available", None)):
        return "modeling_flash_attention_utils has no function is_flash_attn_2_available"
    if not callable(getattr(utils, "_lazy_imports", None)):
        return "modeling_flash_attention_utils has no function _lazy_imports"
    matrix = getattr(utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", None)
    entry = matrix.get(2) if isinstance(matrix, dict) else None
    if not isinstance(entry, dict):
        return "modeling_flash_attention_utils has no FLASH_ATTENTION_COMPATIBILITY_MATRIX with an entry 2"
    if not callable(entry.get("general_availability_check")):
        return "FLASH_ATTENTION_COMPATIBILITY_MATRIX[2] has no function general_availability_check"
    devices = entry.get("supported_devices")
    if not isinstance(devices, tuple) or not all(isinstance(d, tuple) and len(d) == 2 for d in devices):
        return "FLASH_ATTENTION_COMPATIBILITY_MATRIX[2] has no tuple supported_devices of pairs (check, name)"
    return None


def _replace(utils):
    """Replaces the three things; returns what was there."""
    entry = utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    before = {"is_flash_attn_2_available": utils.is_flash_attn_2_available, "matrix": entry}
    utils.is_flash_attn_2_available = _yes
    utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2] = {
        **entry,
        "general_availability_check": _yes,
        "supported_devices": (*entry["supported_devices"], (_yes, "cpu")),
    }
    return before


def _outcome(utils):
    """Asks transformers for FlashAttention-2's functions: None when they are flash_attn's, else what came."""
    try:
        functions = utils._lazy_imports("flash_attention_2")
    except Exception as error:  # whatever another version raises is a reason to say no
        return f"_lazy_imports('flash_attention_2') raised {type(error).__name__} ({error})"
    if flash_attn.flash_attn_func not in functions or flash_attn.flash_attn_varlen_func not in functions:
        return "_lazy_imports('flash_attention_2') does not return flash_attn's functions"
    return None
