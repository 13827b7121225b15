"""Client libraries against flash_attn on the CPU. Nothing is downloaded: models have random weights.

`make test-clients` installs the clients (requirements.txt) into .venv-clients and runs this folder there.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

# The tests' own modules, and the plain attention that tests/python compares with.
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    """torch's generator at a known point; restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def record(monkeypatch):
    """record(namespace, name, calls): from then on the calls of namespace.name are appended to that list, as (name,
    arguments by parameter name). The function is called unchanged and keeps its signature."""

    def start(namespace, name, calls):
        function = getattr(namespace, name)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def recorded(*args, **kwargs):
            calls.append((function.__name__, dict(signature.bind(*args, **kwargs).arguments)))
            return function(*args, **kwargs)

        monkeypatch.setattr(namespace, name, recorded)

    return start


@pytest.fixture
def transformers_calls(record):
    """Enables flash_attn in transformers; the calls of its three functions, recorded."""
    from transformers import modeling_flash_attention_utils as utils

    import flash_attn
    from flash_attn.integrations import transformers as integration

    integration.enable()
    utils.lazy_import_flash_attention("flash_attention_2")
    assert utils._flash_fn is flash_attn.flash_attn_func
    assert utils._flash_varlen_fn is flash_attn.flash_attn_varlen_func
    assert inspect.unwrap(utils._flash_with_kvcache_fn) is flash_attn.flash_attn_with_kvcache
    calls = []
    for name in ("_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn"):
        record(utils, name, calls)
    yield calls
    integration.disable()
