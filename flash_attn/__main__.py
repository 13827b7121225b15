"""`python -m flash_attn`: what this installation is, runs on and lacks. `--json` prints the same for programs.

`python -m flash_attn verify` checks results too; `verify --help` explains it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections import Counter
from typing import Any, Dict, List

import flash_attn
from flash_attn import _backend_choice, _native

MISSING = {
    "on GPUs": "attn_bias, attn_mask, key bounds, learnable_sink, fp64, D above 256 raise",
    "fp8": "raises RuntimeError; in the module flash_attn_interface fp8 q and descales raise NotImplementedError",
}
ENVIRONMENT = (
    "FLASH_ATTN_CPU_ISA",
    "FLASH_ATTN_HIP_LIBRARY",
    "FLASH_ATTN_CUDA_LIBRARY",
    _backend_choice.VARIABLE,
    "FLASH_ATTENTION_TRITON_AMD_AUTOTUNE",
    "TRITON_INTERPRET",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)


def _file(path: str) -> Dict[str, Any]:
    return {"path": path, "bytes": os.path.getsize(path) if os.path.exists(path) else None}


def _cpu_backend() -> Dict[str, Any]:
    """Instruction sets that this build has for this machine, best first, and what each dtype's forward runs."""
    import torch

    def chosen(dtype):
        q = torch.empty(1, 1, 1, 64, dtype=dtype)
        return flash_attn.explain(q, q, q).instruction_set

    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    return {
        "available": _native.load()._cpu_isas(),
        "chosen": {str(dtype).replace("torch.", ""): chosen(dtype) for dtype in dtypes},
        "threads": torch.get_num_threads(),
    }


def _gpu_backend() -> Dict[str, Any]:
    """GPU code in this build, or why there is none; GPUs of this machine, or why none can be used."""
    module = _native.load()
    facts = {
        "code_objects": module._code_objects(),
        "missing": module._missing_code_objects(),
        "gpus": [],
        "problem": "",
    }
    try:
        facts["gpus"] = module._gpus()
    except RuntimeError as error:
        facts["problem"] = str(error)
    return facts


def _triton_backend() -> Dict[str, Any]:
    """The Triton that is installed, if any, and whether it computes in this process."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        version = None
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    return {"version": version, "selected": _backend_choice.triton_requested(), "interpreter": interpreted}


def _torch_version():
    try:
        import torch
    except ImportError:
        return None
    return torch.__version__


def _binding(module) -> Dict[str, Any]:
    return {**_file(module.__file__), "built_for_torch": module._built_for_torch}


def report() -> Dict[str, Any]:
    """Everything that is printed, as one dictionary. `problem` is empty in an installation that works, else it says in
    one sentence why attention cannot be called in this environment."""
    facts = {
        "flash_attn": {"version": flash_attn.__version__, "backend_version": flash_attn.__backend_version__},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch": {"running": _torch_version(), "built_for": _native.available_bindings()},
        "core_library": _file(_native.core_library()),
        "binding": None,
        "backends": {},
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        "missing": MISSING,
        "problem": "",
    }
    try:
        _native.require_torch()
        from flash_attn import flash_attn_interface  # noqa: F401  raises what `import flash_attn` raises elsewhere

        module = _native.load()
        facts["core_library"] = _file(_native.core_library(module.__file__))
        facts["binding"] = _binding(module)
        facts["backends"]["cpu"] = _cpu_backend()
        facts["backends"]["gpu"] = _gpu_backend()
        facts["backends"]["triton"] = _triton_backend()
    except (ImportError, RuntimeError) as error:
        facts["problem"] = str(error)
    return facts


def _cpu_text(cpu: Dict[str, Any]) -> List[str]:
    chosen = ", ".join(f"{dtype} {isa}" for dtype, isa in cpu["chosen"].items())
    return [
        f"backend cpu     {cpu['threads']} threads; this machine runs {', '.join(cpu['available'])}",
        f"                chosen: {chosen}",
    ]


def _gpu_text(gpu: Dict[str, Any]) -> List[str]:
    sizes = Counter()
    for code in gpu["code_objects"]:
        sizes[code["target"]] += code["stored_bytes"]
    code = ", ".join(f"{target} ({size / 1e6:.2f} MB)" for target, size in sizes.items())
    lines = [f"backend gpu     code for {code}" if code else f"backend gpu     no GPU code: {gpu['missing']}"]
    lines += [f"                GPU {n}: {g['target']}, {g['runtime']}" for n, g in enumerate(gpu["gpus"])]
    if not gpu["gpus"]:
        # What was tried, a line each, is for --json.
        why = gpu["problem"].partition("; tried:")[0].replace("flash_attn: ", "") or "the runtime finds none"
        lines.append(f"                no GPU: {why}")
    return lines


def _triton_text(triton: Dict[str, Any]) -> str:
    if not triton["selected"]:
        return f"backend triton  not selected ({_backend_choice.VARIABLE}=TRUE does)"
    cpu = "CPU tensors run in its interpreter" if triton["interpreter"] else "CPU tensors keep the CPU backend"
    return f"backend triton  selected for GPUs, Triton {triton['version'] or 'of unknown version'}; {cpu}"


def _text(facts: Dict[str, Any]) -> str:
    def size(file):
        missing = file["bytes"] is None
        return f"{file['path']} ({'not there' if missing else '{:.2f} MB'.format(file['bytes'] / 1e6)})"

    versions = facts["flash_attn"]
    lines = [
        f"flash_attn      {versions['version']} (interface), {versions['backend_version']} (this implementation)",
        f"python          {facts['python']} on {facts['machine']}",
        f"torch           {facts['torch']['running'] or 'not installed'}",
        f"built for       {_native.built_for() or 'no torch at all'}",
        f"core library    {size(facts['core_library'])}",
    ]
    if facts["binding"]:
        lines.append(f"binding         {size(facts['binding'])}, from torch {facts['binding']['built_for_torch']}")
    if "cpu" in facts["backends"]:
        lines += _cpu_text(facts["backends"]["cpu"])
    if "gpu" in facts["backends"]:
        lines += _gpu_text(facts["backends"]["gpu"])
    if "triton" in facts["backends"]:
        lines.append(_triton_text(facts["backends"]["triton"]))
    lines += [f"environment     {name}={value}" for name, value in facts["environment"].items()]
    lines += [f"not there yet   {what}: {how}" for what, how in facts["missing"].items()]
    lines.append(f"problem         {facts['problem'] or 'none'}")
    return "\n".join(lines)


def _verify(arguments: List[str]) -> int:
    problem = report()["problem"]
    if problem:
        print(f"problem         {problem}")
        return 1
    from flash_attn import verify

    return verify.main(arguments)


def main(arguments=None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["verify"]:
        return _verify(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m flash_attn", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    options = parser.parse_args(arguments)
    facts = report()
    print(json.dumps(facts, indent=2) if options.json else _text(facts))
    return 1 if facts["problem"] else 0


if __name__ == "__main__":
    sys.exit(main())
