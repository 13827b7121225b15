"""The modules around attention: upstream's names, parameters and defaults; importable alone, without Triton or a GPU.

The table is read from upstream's source distribution by tools/fetch_upstream_signatures.py, as in test_signatures.py.
"""

import ast
import importlib
import importlib.util
import inspect
import json
import os
import pathlib
import pkgutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flash_attn

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = json.loads((ROOT / "tests" / "data" / "upstream_layer_signatures.json").read_text(encoding="utf-8"))
# Helpers of upstream's kernels and of its own tests.
OMITTED = {
    "ops.layer_norm": {"maybe_align"},
    "ops.triton.layer_norm": {
        "layer_norm_ref",
        "maybe_contiguous",
        "maybe_contiguous_lastdim",
        "rms_norm_ref",
        "triton_autotune_configs",
    },
}
FUNCTION_CLASSES = {
    "layers.rotary": ["ApplyRotaryEmb", "ApplyRotaryEmbQKV_", "ApplyRotaryEmbKV_"],
    "ops.activations": ["GeLUFunction", "FastGeLUFunction", "SwiGLUFunction"],
    "ops.triton.cross_entropy": ["CrossEntropyLoss"],
    "utils.distributed": ["AllGatherFunc", "ReduceScatterFunc", "AllReduceFunc"],
}
OTHER_NAMES = {
    "layers.rotary": ["apply_rotary_emb_func", "_apply_rotary_emb_qkv"],
    "modules.mha": ["_update_kv_cache", "RotaryEmbedding", "ColumnParallelLinear", "RowParallelLinear"],
    "modules.mlp": ["FusedMLP", "ParallelFusedMLP"],
    "ops.activations": ["bias_gelu_impl", "fast_gelu_impl", "swiglu", "swiglu_fwd", "swiglu_bwd"],
    "utils.distributed": ["all_gather", "reduce_scatter", "all_reduce"],
    "utils.generation": ["InferenceParams"],
}
MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(flash_attn.__path__, "flash_attn.")
    if info.name.split(".")[1] in ("layers", "losses", "modules", "ops", "utils")
)

pytestmark = pytest.mark.second_torch


def test_the_table_is_upstreams():
    path = os.environ.get("FLASH_ATTN_UPSTREAM_SDIST")
    if not path:
        pytest.skip("FLASH_ATTN_UPSTREAM_SDIST names no source distribution to compare the table with")
    spec = importlib.util.spec_from_file_location("fetch_tool", ROOT / "tools" / "fetch_upstream_signatures.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.read_layer_signatures(path) == TABLE


def written(parameter):
    """A parameter as the table writes it, with the default's value in place of its source."""
    if parameter.kind == parameter.VAR_KEYWORD:
        return ["**" + parameter.name]
    assert parameter.kind == parameter.POSITIONAL_OR_KEYWORD, parameter
    return [parameter.name, *([] if parameter.default is parameter.empty else [parameter.default])]


def value(source):
    """What a default's source means where upstream wrote it."""
    known = {"nn.LayerNorm": nn.LayerNorm, "nn.Dropout": nn.Dropout, "F.gelu": F.gelu, "F.sigmoid": F.sigmoid}
    return known[source] if source in known else ast.literal_eval(source)


@pytest.mark.parametrize("module", sorted(TABLE))
def test_signatures(module):
    ours = importlib.import_module(f"flash_attn.{module}")
    rows = {name: row for name, row in TABLE[module].items() if name not in OMITTED.get(module, ())}
    assert rows
    for name, row in rows.items():
        owner, _, method = name.partition(".")
        function = getattr(ours, owner)
        signature = inspect.signature(getattr(function, method) if method else function)
        got = [written(p) for p in signature.parameters.values()][1 if method else 0 :]
        assert got == [[parameter, *map(value, default)] for parameter, *default in row], name
        types = [[type(d) for d in p[1:]] for p in got]
        assert types == [[type(value(d)) for d in p[1:]] for p in row], name


def test_what_is_omitted_is_in_the_table_and_not_here():
    for module, names in OMITTED.items():
        ours = importlib.import_module(f"flash_attn.{module}")
        assert names <= set(TABLE[module]) and not [name for name in names if hasattr(ours, name)]


@pytest.mark.parametrize("module", sorted({**FUNCTION_CLASSES, **OTHER_NAMES}))
def test_other_names(module):
    ours = importlib.import_module(f"flash_attn.{module}")
    for name in FUNCTION_CLASSES.get(module, []):
        assert issubclass(getattr(ours, name), torch.autograd.Function)
    for name in OTHER_NAMES.get(module, []):
        assert hasattr(ours, name)


def test_every_module_of_upstreams_is_there():
    assert {f"flash_attn.{module}" for module in TABLE} <= set(MODULES)


def test_every_module_can_come_first_and_warns_of_nothing():
    """With nothing called triton to import. Each module in a process of its own, which has torch already."""
    code = f"""
import os, sys, traceback, warnings
import torch
warnings.simplefilter("error")
for name in ("triton", "fused_dense_lib", "dropout_layer_norm", "torchvision"):
    sys.modules[name] = None
for module in {MODULES}:
    child = os.fork()
    if child == 0:
        try:
            __import__(module)
        except BaseException:
            print("first:", module, flush=True)
            traceback.print_exc()
        os._exit(0)
    os.waitpid(child, 0)
"""
    path = os.pathsep.join([str(pathlib.Path(flash_attn.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
