"""Bad input: the right exception, a message that helps, and nothing written.

The list is generated (bad_inputs.py): one case per function, argument and violation.
"""

from __future__ import annotations

import re

import bad_inputs
import pytest
import torch
from bad_inputs import CALLED
from functions import FUNCTIONS, good_arguments, tensors_of, whole_storage

import flash_attn
from flash_attn import flash_attn_interface as interface

CASES = bad_inputs.all_bad()


def snapshot(values):
    """What the storages behind the tensors hold."""
    return {name: whole_storage(x).clone() for name, x in tensors_of(values).items()}


@pytest.mark.second_torch
@pytest.mark.parametrize(
    "function, bad",
    [pytest.param(f, bad, id=f"{f.name}-{bad.argument}-{bad.violation}".replace(" ", "_")) for f, bad in CASES],
)
def test_bad_input(function, bad):
    values = good_arguments(function)
    values.update(bad.change(values))
    before = snapshot(values)
    with pytest.raises(bad.error) as caught:
        function.call(values)
    message = str(caught.value)
    for pattern in (CALLED.get(bad.argument, rf"\b{bad.argument}\b"), *bad.says):
        assert re.search(pattern, message), f"no {pattern!r} in: {message}"
    after = snapshot(values)
    for name, bytes_before in before.items():
        a, b = (x.contiguous().view(torch.uint8) if x.dtype != torch.bool else x for x in (bytes_before, after[name]))
        assert torch.equal(a, b), f"{name} was written"


def test_list_is_complete():
    """Every function and every argument that can be wrong occurs; ids are unique."""
    assert len({(f.name, bad.argument, bad.violation) for f, bad in CASES}) == len(CASES)
    flags = {"deterministic", "return_attn_probs", "zero_tensors"}  # every value means something
    for function in FUNCTIONS:
        violated = {bad.argument for f, bad in CASES if f is function}
        derived = {"cu_seqlens_k", "max_seqlen_k"} if "qkv" in function.takes else set()
        assert set(function.takes) - flags - derived <= violated, function.name


@pytest.mark.second_torch
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.name)
def test_good_arguments_are_good(function):
    """The base that each violation changes raises nothing."""
    function.call(good_arguments(function))


@pytest.mark.parametrize("window", [(-1,), (1, 2, 3), (), 5], ids=str)
def test_window_size_needs_two_items(window):
    q = torch.zeros(1, 4, 2, 16)
    with pytest.raises(ValueError, match=r"window_size.*two items") as caught:
        flash_attn.flash_attn_func(q, q, q, window_size=window)
    assert repr(window) in str(caught.value)


def test_head_dim_of_block_size():
    assert interface._get_block_size_n(torch.device("cpu"), 576, True, False) >= 1
    with pytest.raises(AssertionError, match="577.*576"):
        interface._get_block_size_n(torch.device("cpu"), 577, False, False)


@pytest.mark.second_torch
def test_sparse_tensors_are_refused():
    q = torch.zeros(1, 4, 2, 16)
    with pytest.raises((RuntimeError, NotImplementedError), match="(?i)q .*sparse"):
        flash_attn.flash_attn_func(q.to_sparse(), q, q)
