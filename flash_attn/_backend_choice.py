"""The one environment variable that selects a backend: FLASH_ATTENTION_TRITON_AMD_ENABLE, upstream's name."""

from __future__ import annotations

import importlib.util
import os

VARIABLE = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
_TRUE = ("true", "1", "on", "yes")
_FALSE = ("false", "0", "off", "no", "")


def triton_requested() -> bool:
    """Whether the variable asks for the Triton backend; ImportError when it holds neither a yes nor a no."""
    value = os.environ.get(VARIABLE, "")
    if value.lower() not in _TRUE + _FALSE:
        raise ImportError(
            f"{VARIABLE} is {value!r}; accepted, in any case: {', '.join(_TRUE)} to select the Triton backend, "
            f"{', '.join(filter(None, _FALSE))} or unset for the native one."
        )
    return value.lower() in _TRUE


def use_triton() -> bool:
    """The value of USE_TRITON_ROCM; ImportError when the Triton backend is asked for and there is no Triton."""
    if not triton_requested():
        return False
    if importlib.util.find_spec("triton") is None:
        raise ImportError(
            f"{VARIABLE} is {os.environ[VARIABLE]!r}, but Triton is not installed: run `pip install triton` (a ROCm "
            "build of torch brings its own, pytorch-triton-rocm), or unset the variable to use the native backend."
        )
    return True
