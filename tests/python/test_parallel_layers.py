"""Layers split over two processes give what the whole layers give, gradients included; see parallel_worker.py."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

import flash_attn
from flash_attn.utils.distributed import get_dim_for_local_rank

WORLD_SIZE = 2
HERE = pathlib.Path(__file__).resolve().parent
SOURCE = pathlib.Path(flash_attn.__file__).resolve().parents[1]
NAMES = ["ParallelMLP", "ParallelGatedMlp", "ParallelFusedMLP", "ParallelMHA 4", "ParallelMHA 2", "FusedDense"]
NAMES += ["cross entropy", "synchronized weight", "summed gradient", "own"]

gloo = pytest.mark.requires_torch(2, 4, "gloo gathers into one tensor since torch 2")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every rank saved: name -> (wanted, got)."""
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(HERE / "parallel_worker.py"), str(folder), str(rank), str(WORLD_SIZE)],
            env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * WORLD_SIZE, "\n".join(errors)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD_SIZE)]


@gloo
@pytest.mark.parametrize("name", NAMES)
def test_split_layers_equal_whole_ones(results, name):
    for rank, saved in enumerate(results):
        chosen = {key: pair for key, pair in saved.items() if key.startswith(name)}
        assert chosen
        for key, (wanted, got) in chosen.items():
            torch.testing.assert_close(got, wanted, msg=lambda text, key=key, rank=rank: f"rank {rank}, {key}: {text}")


@gloo
def test_nothing_was_left_out(results):
    for saved in results:
        assert not [key for key in saved if not key.startswith(tuple(NAMES))]
    # The first rank alone has biases of layers that sum over ranks.
    assert "ParallelMLP whole rows dfc2.bias" in results[0] and "ParallelMLP whole rows dfc2.bias" not in results[1]


@pytest.mark.second_torch
@pytest.mark.parametrize(
    "dim, world_size, unit, shares", [(12, 4, 1, [3, 3, 3, 3]), (10, 4, 1, [3, 3, 2, 2]), (40, 3, 8, [16, 16, 8])]
)
def test_shares_of_ranks(dim, world_size, unit, shares):
    assert [get_dim_for_local_rank(dim, world_size, rank, unit) for rank in range(world_size)] == shares
