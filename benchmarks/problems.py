"""Attention calls of given shapes by this package and by torch, with random inputs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Optional

import torch
import torch.nn.functional as F
from reference import deviation, exact_dtype, exact_head, hidden
from rows import Calls

import flash_attn

try:
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:  # before torch 2.3; only a peer on a GPU needs them
    SDPBackend = sdpa_kernel = None

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DIRECTIONS = ("forward", "backward")
# Those of short calls, where building the graph counts: forward with inputs that require gradients, and both passes.
SHORT_DIRECTIONS = ("forward", "forward-with-graph", "forward+backward")
SEED = 0


def feature_arguments(name, problem):
    """Arguments of flash_attn_func that switch the score feature on; random ones from torch's generator."""
    B, H, S, dtype = problem.B, problem.H, problem.S, DTYPES[problem.dtype]
    if name == "padding-mask":
        mask = torch.ones(B, S, dtype=torch.bool)
        mask[:, S - max(1, S // 50) :] = False
        return {"attn_mask": mask}
    if name == "window":
        return {"window_size": (S * 3 // 4, S * 3 // 4)}
    return {
        "alibi": lambda: {"alibi_slopes": torch.rand(H)},
        "softcap": lambda: {"softcap": 30.0},
        "sink": lambda: {"learnable_sink": torch.randn(H)},
        "dropout": lambda: {"dropout_p": 0.1},
        "bias": lambda: {"attn_bias": torch.randn(B, H, S, S).to(dtype)},
    }[name]()


FEATURES = ("alibi", "softcap", "window", "padding-mask", "sink", "dropout", "bias")


@dataclass(frozen=True)
class Problem:
    """q (B, S, H, D), k (B, S, H, D), v (B, S, H, Dv), and arguments of flash_attn_func."""

    dtype: str
    direction: str
    S: int
    D: int
    B: int = 1
    H: int = 8
    Dv: Optional[int] = None
    device: str = "cpu"
    arguments: dict = field(default_factory=dict)
    feature: Optional[str] = None

    def flop(self, area=None):
        """FLOP of the products over `area` (query, key) pairs of a head; S^2 unless told, half of it with causal."""
        area = area if area is not None else self.S**2 / (2 if self.arguments.get("causal") else 1)
        D, Dv = self.D, self.Dv or self.D
        forward, backward = 2 * (D + Dv), 2 * (3 * D + 2 * Dv)
        sides = {"backward": backward, "forward+backward": forward + backward}
        return self.B * self.H * area * sides.get(self.direction, forward)

    def seen(self):
        """(query, key) pairs of a head that the masks leave."""
        rows = torch.arange(self.S)
        masks = {name: value for name, value in self.arguments.items() if name in ("causal", "window_size")}
        return int((~hidden(rows, self.S, self.S - 1, **masks)).sum())

    def tensors(self):
        """q, k, v, dout, the same each time."""
        generator = torch.Generator().manual_seed(SEED)
        head_dims = (self.D, self.D, self.Dv or self.D, self.Dv or self.D)
        shapes = [(self.B, self.S, self.H, D) for D in head_dims]
        dtype = DTYPES[self.dtype]
        return [torch.randn(shape, generator=generator).to(self.device, dtype, copy=True) for shape in shapes]

    def recorded(self):
        """The settings that JSON holds."""
        return {name: getattr(self, name) for name in ("direction", "B", "S", "H", "D")} | {"Dv": self.Dv or self.D}


def our_attention(q, k, v, **arguments):
    return flash_attn.flash_attn_func(q, k, v, **arguments)


def torch_attention(q, k, v, causal=False):
    """torch's own choice on the CPU, its FlashAttention-2 on a GPU."""
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def torch_math_attention(q, k, v, causal=False):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


PEERS = {"torch": torch_attention, "torch-math": torch_math_attention, "none": None}


def call_of(attention, direction, tensors, dout):
    """A function without arguments that does what is timed and returns out, or (dq, dk, dv)."""
    if direction == "forward":
        inputs = [x.detach() for x in tensors]
        return lambda: attention(*inputs)
    inputs = [x.detach().requires_grad_() for x in tensors]
    if direction == "forward-with-graph":
        return lambda: attention(*inputs)
    if direction == "forward+backward":
        return lambda: torch.autograd.grad(attention(*inputs), inputs, dout)
    out = attention(*inputs)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def one_head(results, select):
    """The results' checked head; `select` takes it out of a tensor."""
    results = [results] if isinstance(results, torch.Tensor) else results
    return [select(result).detach() for result in results]


def our_calls(problem):
    """Calls with ours, its check, and what runs it."""
    torch.manual_seed(SEED)
    arguments = dict(problem.arguments)
    if problem.feature:
        arguments.update(feature_arguments(problem.feature, problem))
    *tensors, dout = problem.tensors()

    def attention(q, k, v):
        return our_attention(q, k, v, **arguments)

    torch.manual_seed(SEED)  # a graph's dropout is that of the check
    call = call_of(attention, problem.direction, tensors, dout)

    def check():
        features = head_arguments(arguments)
        if "dropout_p" in arguments:
            torch.manual_seed(SEED)
            _, _, probabilities = our_attention(*tensors, **arguments, return_attn_probs=True)
            features["kept"] = ~probabilities[-1, -1].signbit()
            del probabilities
        torch.manual_seed(SEED)
        select = lambda x: x[-1, :, -1]  # noqa: E731
        return head_error(call(), select, tensors, dout, problem, features)

    recorded = [x.detach().requires_grad_(problem.direction != "forward") for x in tensors]
    explanation = flash_attn.explain(*recorded, **arguments)
    if problem.direction.endswith("backward"):
        explanation = explanation.backward
    calls = Calls(call, check=check, kernel=explanation.kernel, instruction_set=explanation.instruction_set)
    if "attn_bias" in arguments:
        calls.aside = plain_sum(arguments["attn_bias"])
    return calls


def head_arguments(arguments):
    """The arguments as the last head of the last sequence meets them."""
    take = {
        "alibi_slopes": lambda x: x[-1],
        "learnable_sink": lambda x: x[-1],
        "attn_mask": lambda x: x[-1],
        "attn_bias": lambda x: x[-1, -1],
    }
    return {name: take.get(name, lambda x: x)(value) for name, value in arguments.items()}


def head_error(results, select, tensors, dout, problem, features):
    """Error of the head that `select` takes out of results, q, k, v and dout."""
    exact = exact_dtype(problem.dtype)
    q, k, v, dout = (select(x).to(exact) for x in (*tensors, dout))
    backward = problem.direction.endswith("backward")
    expected = exact_head(q, k, v, dout if backward else None, **features)
    return deviation(one_head(results, select), expected)


def torch_call(problem, against="torch"):
    """The peer's call on the same numbers in its own layout, (B, H, S, D) contiguous."""
    *tensors, dout = (x.transpose(1, 2).contiguous() for x in problem.tensors())
    causal = problem.arguments.get("causal", False)
    return call_of(lambda q, k, v: PEERS[against](q, k, v, causal), problem.direction, tensors, dout)


def plain_sum(*tensors):
    """A function that reads all of the tensors once, at the speed of memory: torch's sum of their bits as fp32."""
    views = [x.view(torch.float32) for x in tensors]
    return lambda: [x.sum() for x in views]


def beside(problem, other):
    """Calls of the problem, next to those of another problem of ours."""
    calls = our_calls(problem)
    return replace(calls, peer=our_calls(other).ours)


def against_torch(problem, against="torch"):
    """Calls of the problem, next to torch's."""
    calls = our_calls(problem)
    return replace(calls, peer=torch_call(problem, against) if PEERS[against] else None)
