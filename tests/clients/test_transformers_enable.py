"""flash_attn.integrations.transformers: what enable() changes, that it can be undone, and how it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers
from tiny_models import MODELS, tokens
from transformers import modeling_flash_attention_utils as utils

import flash_attn
from flash_attn.integrations import transformers as integration

LLAMA = MODELS[0]


@pytest.fixture(autouse=True)
def disabled_afterwards():
    yield
    integration.disable()


def build():
    return LLAMA.build("flash_attention_2")


def state():
    entry = utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    return utils.is_flash_attn_2_available, entry, dict(entry)


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers refuses only where there is no GPU")
def test_without_it_transformers_refuses():
    with pytest.raises((ImportError, ValueError)):
        build()


def test_disable_restores_everything():
    before = state()
    integration.disable()
    assert state() == before
    integration.enable()
    assert state() != before
    build()
    integration.disable()
    assert state() == before and state()[1] is before[1]
    test_without_it_transformers_refuses()


def test_the_cpu_joins_the_devices():
    devices = state()[1]["supported_devices"]
    integration.enable()
    available, entry, _ = state()
    assert available() and entry["general_availability_check"]()
    assert entry["supported_devices"][:-1] == devices
    usable, name = entry["supported_devices"][-1]
    assert usable() and name == "cpu"


def test_enabling_twice_is_enabling_once():
    before = state()
    integration.enable()
    once = state()
    integration.enable()
    assert state() == once
    integration.disable()
    assert state() == before


def test_models_made_while_enabled_go_on():
    integration.enable()
    model, ids = build(), tokens(1, 8)
    with torch.no_grad():
        wanted = model(ids).logits
        integration.disable()
        assert torch.equal(model(ids).logits, wanted)


def test_importing_changes_nothing():
    """Neither importing the package nor the integration imports transformers; enabling needs no order of imports."""
    code = """
import sys
import flash_attn, flash_attn.integrations.transformers as integration
assert "transformers" not in sys.modules
from transformers import modeling_flash_attention_utils as utils
before = utils.is_flash_attn_2_available, utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
import flash_attn.integrations.transformers
assert before == (utils.is_flash_attn_2_available, utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2])
integration.enable()
assert utils.is_flash_attn_2_available() and utils.is_flash_attn_available(kernels_fallback_ok=True)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def without_checks(utils):
    entry = dict(utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2])
    del entry["general_availability_check"]
    return {2: entry}


def with_list_of_names(utils):
    return {2: {**utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], "supported_devices": ["cuda"]}}


def with_names_alone(utils):
    return {2: {**utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2], "supported_devices": (("cuda",),)}}


def returning(*functions):
    return lambda utils: lambda name: functions


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("is_flash_attn_2_available", None, "no function is_flash_attn_2_available"),
        ("_lazy_imports", None, "no function _lazy_imports"),
        ("FLASH_ATTENTION_COMPATIBILITY_MATRIX", None, "with an entry 2"),
        ("FLASH_ATTENTION_COMPATIBILITY_MATRIX", lambda utils: {3: {}}, "with an entry 2"),
        ("FLASH_ATTENTION_COMPATIBILITY_MATRIX", without_checks, "no function general_availability_check"),
        ("FLASH_ATTENTION_COMPATIBILITY_MATRIX", with_list_of_names, "no tuple supported_devices"),
        ("FLASH_ATTENTION_COMPATIBILITY_MATRIX", with_names_alone, "no tuple supported_devices of pairs"),
        ("_lazy_imports", returning(flash_attn.flash_attn_func, torch.add), "does not return flash_attn's functions"),
        ("_lazy_imports", returning(torch.add, flash_attn.flash_attn_varlen_func), "does not return flash_attn's"),
        ("_lazy_imports", lambda utils: lambda: None, "raised TypeError"),
    ],
)
def test_other_internals_are_refused_and_left_alone(monkeypatch, name, value, words):
    if value is None:
        monkeypatch.delattr(utils, name)
    else:
        monkeypatch.setattr(utils, name, value(utils))
    before = {key: getattr(utils, key, None) for key in ("is_flash_attn_2_available", "_lazy_imports")}
    matrix = dict(getattr(utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {}))
    with pytest.raises(RuntimeError, match=words) as caught:
        integration.enable()
    text = str(caught.value)
    assert transformers.__version__ in text and "5.24" in text and "sdpa" in text and "Nothing was changed" in text
    assert before == {key: getattr(utils, key, None) for key in before}
    assert matrix == dict(getattr(utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {}))


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="transformers"):
        integration.enable()


def test_functions_are_flash_attns():
    integration.enable()
    build()
    (dense, varlen, kvcache, pad, unpad), _ = utils.lazy_import_flash_attention("flash_attention_2")
    assert dense is flash_attn.flash_attn_func and varlen is flash_attn.flash_attn_varlen_func
    assert getattr(kvcache, "__wrapped__", kvcache) is flash_attn.flash_attn_with_kvcache
    assert pad is flash_attn.bert_padding.pad_input and unpad is flash_attn.bert_padding.unpad_input
