"""`python -m flash_attn verify`: what attention runs on here, and whether its results are right, one line per fact.

Forward and backward are compared with attention by its definition in fp64; the error may be 2 times (gradients: 3
times) that of the same definition in the tensors' own dtype. Without a GPU the CPU backend is verified, and a line
says so. The exit status is 0 when every line is good.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor

import flash_attn
from flash_attn import _native, _raw
from flash_attn.testing import simulated

ROUNDING = 1e-5  # allowed beside the multiples of the same-precision error
GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Line:
    """One verified fact."""

    what: str
    text: str
    good: bool = True

    def __str__(self) -> str:
        return f"{self.what:<16}{'' if self.good else 'FAILED: '}{self.text}"


@dataclass(frozen=True)
class Place:
    """Where attention runs: `kind` is "cpu", "gpu" or "simulated"; `note` says why it is not a GPU."""

    kind: str
    device: str  # torch's name of it
    name: str
    architecture: str
    note: str = ""

    def scope(self) -> ContextManager[None]:
        """Within it, calls on tensors of `device` run there."""
        return simulated(self.architecture) if self.kind == "simulated" else contextlib.nullcontext()


def _gpu() -> Place:
    index = torch.cuda.current_device()
    return Place("gpu", "cuda", torch.cuda.get_device_name(index), _native.load()._gpus()[index]["target"])


def _cpu(note: str) -> Place:
    q = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16)
    return Place("cpu", "cpu", "CPU", flash_attn.explain(q, q, q).instruction_set, note)


def find_place(simulate: Optional[str] = None) -> Place:
    """The simulated GPU `simulate`, such as "gfx942"; else the GPU of this machine; else the CPU, with the reason."""
    if simulate:
        return Place("simulated", "cpu", f"simulated {simulate}", simulate, "no GPU is used: its code is simulated")
    if torch.cuda.is_available():
        return _gpu()
    build = "ROCm" if torch.version.hip else "CUDA" if torch.version.cuda else "CPU"
    return _cpu(f"no GPU: torch {torch.__version__}, a {build} build, finds none")


def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v under a causal mask; q (B,S,H,D), k and v (B,S,Hk,D) -> (B,S,H,D)."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


def example(place: Place) -> List[Tensor]:
    """q (1,S,2,64), k and v (1,S,1,64), bf16, the same on every machine; S is small where it is simulated."""
    generator = torch.Generator().manual_seed(0)
    S = 70 if place.kind == "simulated" else 300
    shapes = [(1, S, heads, 64) for heads in (2, 1, 1)]
    return [torch.randn(shape, generator=generator).to(place.device, torch.bfloat16) for shape in shapes]


def _results(attention: Callable[..., Tensor], inputs: List[Tensor], dtype: torch.dtype) -> Tuple[Tensor, ...]:
    """out and the gradients of its weighted sum, in fp64 on the CPU."""
    leaves = [x.to(dtype).detach().requires_grad_() for x in inputs]
    out = attention(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view(out.shape).to(dtype)
    return tuple(x.double().cpu() for x in (out.detach(), *torch.autograd.grad(out, leaves, weights)))


def _compared(what: str, names, ours, exact, plain, factor: int) -> Line:
    errors = [
        (name, (a - b).abs().max().item(), (c - b).abs().max().item())
        for name, a, b, c in zip(names, ours, exact, plain)
    ]
    # Not >: a NaN must fail.
    good = all(error <= factor * reference + ROUNDING for _, error, reference in errors)
    text = ", ".join(f"{name} {error:.1e} (plain torch {reference:.1e})" for name, error, reference in errors)
    return Line(what, f"largest error {text}", good)


def check_results(place: Place, attention: Callable[..., Tensor]) -> Iterator[Line]:
    """Forward and backward of attention(q, k, v, causal=True) against the definition."""
    inputs = example(place)
    with place.scope():
        ours = _results(lambda *x: attention(*x, causal=True), inputs, torch.bfloat16)
    exact, plain = (_results(definition, inputs, dtype) for dtype in (torch.float64, torch.bfloat16))
    yield _compared("forward", ("out",), ours[:1], exact[:1], plain[:1], 2)
    yield _compared("backward", GRADIENTS, ours[1:], exact[1:], plain[1:], 3)


def _symbols(place: Place) -> Line:
    inputs = [x.requires_grad_() for x in example(place)]
    with place.scope():
        explanation = flash_attn.explain(*inputs, causal=True)
    return Line("backend symbol", f"{explanation.kernel}, {explanation.backward.kernel}")


def _code(place: Place) -> Iterator[Line]:
    """SHA-256 of the machine code: the GPU's code objects, or the core library where there is no GPU."""
    module = _native.load()
    if place.kind == "cpu":
        path = _native.core_library(module.__file__)
        with open(path, "rb") as file:
            yield Line("core library", f"sha256 {hashlib.sha256(file.read()).hexdigest()} {path}")
        return
    if place.kind == "gpu" and _raw.USE_TRITON_ROCM:
        yield Line("code object", "none of this package's: Triton compiles its kernels as they are called")
        return
    for name in sorted({x["name"] for x in module._code_objects()}):
        code = module._code_object(place.architecture, name)
        yield Line("code object", f"sha256 {hashlib.sha256(code).hexdigest()} {name}, {len(code)} bytes")


def _torch_build() -> str:
    version = torch.version.hip and f"ROCm {torch.version.hip}" or torch.version.cuda and f"CUDA {torch.version.cuda}"
    return f"{torch.__version__} ({version or 'CPU build'})"


def lines(simulate: Optional[str] = None) -> Iterator[Line]:
    """Every line, as soon as it is known. What raises becomes the last one."""
    try:
        yield Line("torch", _torch_build())
        yield Line("flash_attn", f"{flash_attn.__version__} (backend {flash_attn.__backend_version__})")
        place = find_place(simulate)
        yield Line("device", place.name + (f" ({place.note})" if place.note else ""))
        yield Line("architecture", place.architecture)
        yield _symbols(place)
        yield from _code(place)
        yield from check_results(place, flash_attn.flash_attn_func)
    except (RuntimeError, OSError, NotImplementedError) as error:
        yield Line("problem", " ".join(str(error).split()), False)


def show(found: Iterator[Line], as_json: bool = False) -> int:
    """Prints the lines as they come and then the verdict; returns the exit status."""
    all_lines = []
    for line in found:
        all_lines.append(line)
        if not as_json:
            print(line, flush=True)
    good = all(line.good for line in all_lines)
    facts: Dict[str, Any] = {"good": good, "lines": [asdict(line) for line in all_lines]}
    print(json.dumps(facts, indent=2) if as_json else Line("verdict", "all good" if good else "see above", good))
    return 0 if good else 1


def main(arguments: Optional[List[str]] = None, prog: str = "python -m flash_attn verify") -> int:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__.partition(": ")[2], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulate", metavar="TARGET", help="run that AMD GPU's code in the simulator, such as gfx942")
    parser.add_argument("--json", action="store_true", help="print one JSON object: good, lines")
    options = parser.parse_args(arguments)
    return show(lines(options.simulate), options.json)


if __name__ == "__main__":
    sys.exit(main())
