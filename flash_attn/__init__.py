"""FlashAttention for AMD GPUs and the CPU, with the names and signatures of the `flash-attn` distribution.

Tensors on the CPU run the CPU backend. `flash_attn.explain` says what a call would run, `python -m flash_attn` what
this installation can do.
"""

# ruff: noqa: F401
import sys
from pkgutil import extend_path

# Another distribution may add modules, such as flash_attn.cute, to this package.
__path__ = extend_path(__path__, __name__)

# The version of the interface: clients compare it with the upstream release whose signatures these are.
__version__ = "2.8.3"
# The version of this implementation.
__backend_version__ = "0.1.0"


def _is_environment_report() -> bool:
    """Whether Python is importing this package to run `python -m flash_attn` (Python >= 3.10 tells)."""
    arguments = getattr(sys, "orig_argv", [])
    return sys.argv[:1] == ["-m"] and ("-m", "flash_attn") in zip(arguments, arguments[1:])


try:
    from flash_attn import _native

    _native.require_torch()
    from flash_attn._explain import explain
    from flash_attn.flash_attn_interface import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    )
    from flash_attn.modules.flash_attention import FlashAttention
except ImportError:
    # The report exists to say what is wrong with an installation, so it must not fail with it.
    if not _is_environment_report():
        raise
