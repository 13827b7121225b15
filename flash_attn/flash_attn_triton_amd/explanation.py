"""What `flash_attn.explain` says of a call while the Triton backend is selected."""

from __future__ import annotations

from typing import Any, Callable, Dict, Sequence

import torch
from torch import Tensor

from flash_attn import _backend_choice, _native
from flash_attn.flash_attn_triton_amd import attention, interface_fa, raw, stored, tuning
from flash_attn.flash_attn_triton_amd.launch import recording
from flash_attn.flash_attn_triton_amd.problem import BEYOND_UPSTREAM, Problem, refuse_tables

_NAMES = {"attention_forward": "forward", "attend_stored": "stored", "query_gradients": "backward"}


def explain(*call) -> Dict[str, Any]:
    """Arguments and result as those of the native `_explain`: the call's, then whether it returns S_dmask, and
    whether its backward pass is meant."""
    if not raw.computes(call[0]):
        return _on_cpu(_native.load()._explain(*call))
    refuse_tables(dict(zip(BEYOND_UPSTREAM, call[14:19])))
    return _described(call, _run)


def explain_cache(*call) -> Dict[str, Any]:
    """Of flash_attn_with_kvcache; arguments are those of `fwd_kvcache`."""
    if not raw.computes(call[0]):
        return _on_cpu(_native.load()._explain_kvcache(*call))
    return _described(call, interface_fa.fwd_kvcache)


def _on_cpu(explained: Dict[str, Any]) -> Dict[str, Any]:
    why = f"{_backend_choice.VARIABLE} selects Triton for tensors on GPUs; on CPU tensors only with TRITON_INTERPRET=1"
    return {**explained, "reasons": [*explained["reasons"], why]}


def _meta(x: Tensor) -> Tensor:
    """Shape and strides alone: nothing is computed, no random number drawn."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _run(*call) -> None:
    q, k, v, cu_q, cu_k, max_q, max_k, *score = call[:13]
    slopes, (block_table, used, leftpad, return_softmax, backward) = call[13], call[19:]
    problem = Problem(q, k, v, *score, slopes, cu_q, cu_k, max_q, max_k, used, leftpad)
    if block_table is not None:
        stored.attend_pages(problem, block_table, None, 0, False)
        return
    out, lse, _, problem.rng_state = raw.run_forward(problem, None, return_softmax)
    if backward:
        attention.backward(problem, out, out, lse, (q, k, v))


def _described(call: Sequence, run: Callable) -> Dict[str, Any]:
    """What `run` would launch last, recorded with tensors that have no memory."""
    target, dtype = tuning.architecture(call[0].device), call[0].dtype
    with tuning.compiling_for(target), recording() as launches:
        run(*(_meta(x) if isinstance(x, Tensor) else x for x in call))
    last = [one for one in launches if one.kernel.__name__ in _NAMES][-1]
    name = _NAMES[last.kernel.__name__]
    shape = f"{last.arguments['BLOCK_M']} queries x {last.arguments['BLOCK_N']} keys"
    reasons = [
        f"{_backend_choice.VARIABLE} selects Triton",
        "TRITON_INTERPRET=1 runs the kernels in Triton's interpreter"
        if target == tuning.INTERPRETER
        else f"GPU {target}",
        f"tiles of the table for {target}; {tuning.VARIABLE}=TRUE measures instead",
    ]
    kind = str(dtype).replace("torch.", "").replace("bfloat", "bf").replace("float", "fp")
    return dict(
        backend="triton", kernel=f"triton.{name}.{kind}.{target}", instruction_set=target, tile=shape, reasons=reasons
    )
