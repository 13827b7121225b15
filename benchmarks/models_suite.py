"""Attention as layers of well-known models call it, against torch: what a user of one of them can expect."""

from __future__ import annotations

from functools import partial

from drawn_suite import Drawn, drawn_calls
from problems import DIRECTIONS
from report import panels_by_direction
from rows import Row

WHOLE = 2048  # Lengths below are of a run with this S.

# B, Sq, Sk, H, Hk, D, causal: as the models' papers and published configurations have them, without a bias where one is
# learned (Swin). Batches are what a machine without an accelerator might be asked for.
MODELS = {
    "BERT-base": (8, 128, 128, 12, 12, 64, False),
    "BERT-base-512": (1, 512, 512, 12, 12, 64, False),
    "MiniLM": (32, 128, 128, 12, 12, 32, False),
    "ViT-B/16": (8, 197, 197, 12, 12, 64, False),
    "SigLIP-so400m": (1, 729, 729, 16, 16, 72, False),
    "CLIP-text": (8, 77, 77, 12, 12, 64, True),
    "Swin-T-windows": (64, 49, 49, 3, 3, 32, False),
    "SegFormer-B0": (1, 16384, 256, 1, 1, 32, False),
    "DETR-cross": (2, 100, 950, 8, 8, 32, False),
    "Whisper-encoder": (1, 1500, 1500, 20, 20, 64, False),
    "Whisper-cross": (1, 1, 1500, 20, 20, 64, False),
    "SD-1.5-self": (1, 4096, 4096, 8, 8, 40, False),
    "SD-1.5-cross": (2, 4096, 77, 8, 8, 40, False),
    "SDXL-cross": (2, 4096, 77, 10, 10, 64, False),
    "IP-Adapter": (2, 4096, 4, 10, 10, 64, False),
    "DiT-XL/2": (4, 256, 256, 16, 16, 72, False),
    "GPT-2": (1, 1024, 1024, 12, 12, 64, True),
    "Llama-3-8B": (1, 512, 512, 32, 8, 128, True),
    "Qwen2.5-0.5B": (1, 1024, 1024, 14, 2, 64, True),
    "Gemma-3-1B": (1, 1024, 1024, 4, 1, 256, True),
}


def models_rows(options):
    """For the record, without a bound; of models that are asked to be small, a part of each length."""

    def scaled(length):
        return max(2, length * options.S // WHOLE) if length > 1 else length

    rows = []
    for name, (B, Sq, Sk, H, Hk, D, causal) in MODELS.items():
        for dtype in options.suite_dtypes:
            for direction in DIRECTIONS:
                problem = Drawn(dtype, direction, B, scaled(Sq), scaled(Sk), H, Hk, D, causal)
                rows.append(
                    Row(
                        "models",
                        f"models {dtype} {name} {direction}",
                        dtype,
                        partial(drawn_calls, problem),
                        work=problem.flop(),
                        setting=problem.recorded(),
                    )
                )
    return rows


def plot(rows, against, path):
    """A bar for each row's ratio, one panel per direction."""
    names = list(dict.fromkeys(row.name.split()[2] for row in rows))
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    height = 0.8 / len(dtypes)
    with panels_by_direction(rows, 1.5 + 0.4 * len(names), path) as panels:
        for axes, of_direction in panels:
            for nth, dtype in enumerate(dtypes):
                bars = [row for row in of_direction if row.dtype == dtype]
                at = [names.index(row.name.split()[2]) + (nth - (len(dtypes) - 1) / 2) * height for row in bars]
                axes.barh(at, [row.ratio for row in bars], height, label=dtype)
            axes.axvline(1, color="black", linewidth=0.8)
            axes.set(xlabel=f"{against}'s time over ours", xscale="log")
        panels[0][0].set_yticks(range(len(names)), names)
        panels[0][0].invert_yaxis()
