"""Upstream's extension module by its top-level name; the file itself lies in flash_attn/lib, one per torch version.

After `import flash_attn_2_cuda` the name is the pybind11 module: fwd, varlen_fwd, bwd, varlen_bwd, fwd_kvcache.
"""

import sys

from flash_attn import _native

sys.modules[__name__] = _native.load()
