"""The part of error_cases.py about the installation, the environment and client libraries: (function, argument, call
that raises)."""

from __future__ import annotations

import os
import sys
import tempfile
import types
from functools import partial
from pathlib import Path
from unittest import mock

from flash_attn import _backend_choice, _native, _raw, testing
from flash_attn.integrations import transformers as integration


def _no_torch():
    with mock.patch("importlib.util.find_spec", lambda name: None):
        _native.require_torch()


def _damaged_binding():
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        with mock.patch.object(_native, "binding_path", lambda version: file.name):
            _native.load.__wrapped__()


def _tree_in_front():
    """A source tree where nothing was built hides an installed package."""
    with tempfile.TemporaryDirectory() as folder:
        tree, site = Path(folder, "tree"), Path(folder, "site")
        tree.mkdir()
        (tree / "setup.py").touch()
        (site / "flash_attn" / "lib" / "torch-2.13").mkdir(parents=True)
        library = mock.patch.object(_native, "LIBRARY_DIR", str(tree / "flash_attn" / "lib"))
        with library, mock.patch.object(sys, "path", [str(site)]):
            _native.binding_path("2.13.0")


def _triton(value):
    """As on a machine without Triton."""
    with mock.patch.dict(os.environ, {_backend_choice.VARIABLE: value}), mock.patch.dict(sys.modules, triton=None):
        _backend_choice.use_triton()


def _no_simulator():
    with mock.patch.dict(os.environ, {testing.LIBRARY_VARIABLE: "nowhere.so"}):
        testing.simulator_library()


def _two_simulations():
    with testing._active, testing.simulated(library="any.so"):
        pass


def _other_transformers():
    package, utils = types.ModuleType("transformers"), types.ModuleType("modeling_flash_attention_utils")
    package.__version__, package.modeling_flash_attention_utils = "4.0.0", utils
    with mock.patch.dict(sys.modules, transformers=package):
        integration.enable()


def all_cases():
    return [
        ("import flash_attn", _backend_choice.VARIABLE, partial(_triton, "perhaps")),
        ("import flash_attn", _backend_choice.VARIABLE, partial(_triton, "true")),
        ("import flash_attn", "torch", _no_torch),
        ("import flash_attn", "torch", partial(_native.torch_release, "unknown")),
        ("import flash_attn", "torch", partial(_native.binding_path, "1.2.3")),
        ("import flash_attn", "torch", _damaged_binding),
        ("import flash_attn", "sys.path", _tree_in_front),
        ("force_cpu_instruction_set", "FLASH_ATTN_CPU_ISA", partial(_raw.flash_attn_gpu._force_cpu_isa, "sse9")),
        ("flash_attn.testing.simulated", "library", _no_simulator),
        ("flash_attn.testing.simulated", "", _two_simulations),
        ("flash_attn.integrations.transformers.enable", "", _other_transformers),
    ]
