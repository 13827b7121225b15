"""Names, order and defaults of every function equal those of the upstream release whose version this package carries.

The table in tests/data was read from upstream's source distribution by tools/fetch_upstream_signatures.py. Where the
environment variable FLASH_ATTN_UPSTREAM_SDIST names that distribution, the table is compared with it.
"""

import ast
import importlib
import importlib.util
import inspect
import json
import os
import pathlib

import pytest
import torch

import flash_attn

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = json.loads((ROOT / "tests" / "data" / "upstream_signatures.json").read_text(encoding="utf-8"))
MODULES = ("flash_attn_interface", "bert_padding")
RAW = ["_flash_attn_forward", "_flash_attn_varlen_forward", "_flash_attn_backward", "_flash_attn_varlen_backward"]

pytestmark = pytest.mark.second_torch


def fetch_tool():
    spec = importlib.util.spec_from_file_location("fetch_tool", ROOT / "tools" / "fetch_upstream_signatures.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_the_table_is_upstreams():
    path = os.environ.get("FLASH_ATTN_UPSTREAM_SDIST")
    if not path:
        pytest.skip("FLASH_ATTN_UPSTREAM_SDIST names no source distribution to compare the table with")
    assert fetch_tool().read_signatures(path) == TABLE


def differences(ours, theirs, may_append):
    """What a call written for `theirs`, a list of [name] or [name, source of the default], finds changed in `ours`."""
    parameters = list(ours.parameters.values())
    found = [f"{p.name} is {p.kind.description}" for p in parameters if p.kind != p.POSITIONAL_OR_KEYWORD]
    for position, (name, *default) in enumerate(theirs):
        if position >= len(parameters) or parameters[position].name != name:
            found.append(f"position {position} should be {name}")
            continue
        actual = parameters[position].default
        expected = ast.literal_eval(default[0]) if default else inspect.Parameter.empty
        if actual != expected or type(actual) is not type(expected):
            found.append(f"{name} should default to {expected!r}, not {actual!r}")
    for extra in parameters[len(theirs) :]:
        if not may_append:
            found.append(f"{extra.name} is not upstream's")
        elif extra.default is extra.empty:
            found.append(f"{extra.name} is appended without a default")
    return found


def table_rows(wanted):
    return [(module, name, row) for module in MODULES for name, row in TABLE[module].items() if wanted(name)]


def test_functions():
    rows = table_rows(lambda name: "." not in name)
    assert len(rows) >= 21
    wrong = {}
    for module, name, row in rows:
        function = getattr(importlib.import_module(f"flash_attn.{module}"), name)
        wrong[name] = differences(inspect.signature(function), row, may_append=not name.startswith("_"))
    assert not {name: found for name, found in wrong.items() if found}


def test_apply_of_the_autograd_classes():
    rows = table_rows(lambda name: name.startswith("FlashAttn"))
    assert len(rows) == 6
    for module, name, row in rows:
        owner, method = name.split(".")
        apply = getattr(getattr(importlib.import_module(f"flash_attn.{module}"), owner), method)
        assert [[parameter] for parameter in inspect.signature(apply).parameters] == row, name


def test_forward_of_the_padding_classes():
    rows = table_rows(lambda name: name.startswith("Index"))
    assert len(rows) == 3
    for module, name, row in rows:
        owner = getattr(importlib.import_module(f"flash_attn.{module}"), name.split(".")[0])
        assert issubclass(owner, torch.autograd.Function)
        assert [[parameter] for parameter in inspect.signature(owner.forward).parameters][1:] == row, name


def test_other_names():
    for module in MODULES:
        ours = importlib.import_module(f"flash_attn.{module}")
        assert len(TABLE["names"][module]) >= 3
        assert not [name for name in TABLE["names"][module] if not hasattr(ours, name)]


def test_exports():
    assert len(TABLE["exports"]) == 7
    for name in TABLE["exports"]:
        assert getattr(flash_attn, name) is getattr(flash_attn.flash_attn_interface, name)


def test_version():
    assert flash_attn.__version__ == TABLE["version"]


def test_operator_schemas_have_the_same_names():
    for name in RAW:
        schema = getattr(torch.ops.flash_attn, name).default._schema
        assert [argument.name for argument in schema.arguments] == [
            row[0] for row in TABLE["flash_attn_interface"][name]
        ]


@pytest.mark.parametrize("name", RAW)
def test_raw_functions_are_plain_functions(name):
    """Ring-attention libraries rebuild calls from getfullargspec, which sees through no wrapper."""
    function = getattr(flash_attn.flash_attn_interface, name)
    assert inspect.isfunction(function)
    row = TABLE["flash_attn_interface"][name]
    spec = inspect.getfullargspec(function)
    assert spec.args == [parameter for parameter, *_ in row]
    assert list(spec.defaults or ()) == [ast.literal_eval(default[0]) for _, *default in row if default]
    assert spec.varargs is None and spec.varkw is None and not spec.kwonlyargs


@pytest.mark.parametrize(
    "theirs, complaint",
    [
        ([["q"], ["k"], ["p", "0.0"]], None),
        ([["q"], ["k"]], "appended without"),
        ([["k"], ["q"], ["p", "0.0"]], "position 0"),
        ([["q"], ["k"], ["p", "0"]], "default"),
        ([["q"], ["k"], ["p"]], "default"),
        ([["q"], ["k", "None"], ["p", "0.0"]], "default"),
        ([["q"], ["k"], ["p", "0.0"], ["more"]], "position 3"),
    ],
)
def test_the_comparison_sees_each_kind_of_change(theirs, complaint):
    def ours(q, k, p=0.0):
        pass

    def with_required_extra(q, k, p):
        pass

    function = with_required_extra if complaint == "appended without" else ours
    found = differences(inspect.signature(function), theirs, may_append=True)
    assert bool(found) == (complaint is not None) and (complaint is None or complaint in found[0])
    if complaint is None:
        assert differences(inspect.signature(ours), theirs[:2], may_append=False) == ["p is not upstream's"]
