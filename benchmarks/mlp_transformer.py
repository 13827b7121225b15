"""One side of benchmark_fa2_vs_fa3_mlp_transformer.py, in a process of its own: trains the model and writes metrics.

    python benchmarks/mlp_transformer.py CONFIG RESULT

CONFIG: the benchmark's config as a JSON object; RESULT: the file for the metrics as JSON, or {"problem": why not}.
The backend is the one that FLASH_ATTENTION_TRITON_AMD_ENABLE selects when flash_attn is imported.
Letters: B batch, S length, H heads, C = d_model.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import measuring
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Pre-norm causal attention and an MLP of four times the width."""

    def __init__(self, width, heads, attention):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def heads_of(self, x):
        """q, k, v (B,S,H,C/H) of x (B,S,C)."""
        return self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)

    def forward(self, x):
        x = x + self.out(self.attention(*self.heads_of(x), causal=True).flatten(2))
        return x + self.mlp(self.norm2(x))


def symbols(model, x):
    """The kernels of one layer's attention, forward and backward; RuntimeError if Triton is selected and not run."""
    import flash_attn
    from flash_attn.flash_attn_interface import USE_TRITON_ROCM

    explanation = flash_attn.explain(*model[0].heads_of(x), causal=True)
    if USE_TRITON_ROCM and explanation.backend != "triton":
        raise RuntimeError(f"{explanation.kernel} would run: {explanation.reasons[-1]}")
    return f"{explanation.kernel}, {explanation.backward.kernel}"


def run(config):
    """Metrics of `timed_steps` optimizer steps behind `warmup_steps`."""
    from flash_attn import flash_attn_func  # here, so that an ImportError is reported like any other problem

    device, dtype = measuring.best_device(), measuring.DTYPES[config["dtype"]]
    torch.manual_seed(0)
    width, heads, layers = (config[name] for name in ("d_model", "n_heads", "n_layers"))
    model = nn.Sequential(*(Block(width, heads, flash_attn_func) for _ in range(layers)))
    model = model.to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shape = (config["batch_size"], config["seq_len"], config["d_model"])
    x, target = (torch.randn(shape).to(device, dtype) for _ in range(2))
    backend_symbol = symbols(model, x)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(model(x).float(), target.float())
        loss.backward()
        optimizer.step()
        return loss.detach()

    progress = measuring.Progress(config["warmup_steps"] + config["timed_steps"], "step")
    for _ in range(config["warmup_steps"]):
        step()
        progress.step("warm-up")
    step_ms = []
    for _ in range(config["timed_steps"]):
        measuring.synchronize(device)
        begin = time.perf_counter()
        loss = step()
        measuring.synchronize(device)
        step_ms.append(1e3 * (time.perf_counter() - begin))
        progress.step("timed")
    progress.close()
    median = statistics.median(step_ms)
    return {
        "setting": measuring.setting(device),
        "backend_symbol": backend_symbol,
        "step_ms": step_ms,
        "median_step_ms": median,
        "steps_per_second": 1e3 / median,
        "tokens_per_second": 1e3 * config["batch_size"] * config["seq_len"] / median,
        "peak_memory_bytes": measuring.peak_memory(device),
        "loss": loss.item(),
    }


def main(config, result):
    try:
        metrics = run(json.loads(config))
    except (ImportError, RuntimeError, NotImplementedError) as error:
        metrics = {"problem": f"{type(error).__name__}: {error}"}
    Path(result).write_text(json.dumps(metrics))


if __name__ == "__main__":
    main(*sys.argv[1:])
