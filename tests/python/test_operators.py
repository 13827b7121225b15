"""The two ways to an operator: at once where all arguments are plain, and through torch.ops. They mean the same."""

import sys

import pytest
import torch

import flash_attn
from flash_attn import _native
from flash_attn._operators import Operator

pytestmark = pytest.mark.second_torch

WINDOW = 10  # its place after three tensors and the lengths
# As the public functions take them, with all results.
DENSE = (None, None, 0, 0, 0.0, 0.25, False, (-1, -1), 0.0, None, False, True)


def attention(*arguments):
    """Through torch.ops, where a window is two arguments."""
    window = arguments[WINDOW] if len(arguments) > WINDOW else ()
    return torch.ops.flash_attn.attention.default(*arguments[:WINDOW], *window, *arguments[WINDOW + 1 :])


def qkv(grad=False):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, 5, 2, 16, generator=g).requires_grad_(grad) for _ in range(3)]


def replaced(arguments, position, by):
    return (*arguments[:position], by, *arguments[position + 1 :])


@pytest.fixture
def counted():
    """The operator attention, and the calls of it that went through torch.ops."""
    general = Operator("attention", ("q", "k", "v")).general
    seen = []

    def counting(*args):
        seen.append(args)
        return general(*args)

    return _native.load()._plain_call("flash_attn::attention", counting), seen


def test_plain_arguments_go_there_at_once(counted):
    call, seen = counted
    q, k, v = qkv()
    bias = torch.randn(2, 2, 5, 5)
    expected = attention(q, k, v, *DENSE, bias)
    assert all(map(torch.equal, call(q, k, v, *DENSE, bias), expected))
    assert torch.equal(call(torch.nn.Parameter(q), k, v, *DENSE, bias)[0], expected[0])
    assert not seen


def test_with_a_graph(counted):
    call, seen = counted
    grads = []
    for function in (call, attention):
        inputs = qkv(grad=True)
        out, lse, _ = function(*inputs, *DENSE)
        grads.append(torch.autograd.grad((out * out).sum() + lse.sum(), inputs))
    assert all(map(torch.equal, *grads)) and not seen


@pytest.mark.parametrize("window", [None, (None, None), (2, None), (None, 1), (1, 0), (-1, 2)], ids=str)
def test_windows_that_are_plain(counted, window):
    call, seen = counted
    bounds = [-1 if bound is None else bound for bound in window or (-1, -1)]
    arguments = (*qkv(), *DENSE)
    expected = attention(*replaced(arguments, WINDOW, bounds))
    assert all(map(torch.equal, call(*replaced(arguments, WINDOW, window)), expected)) and not seen


@pytest.mark.parametrize("window", [[1, 0], torch.Size([1, 0]), torch.tensor([1, 0]), (1, torch.tensor(0))], ids=str)
def test_other_windows_are_left_to_python(counted, window):
    call, seen = counted
    arguments = (*qkv(), *DENSE)
    expected = attention(*replaced(arguments, WINDOW, (1, 0)))
    assert all(map(torch.equal, call(*replaced(arguments, WINDOW, window)), expected)) and len(seen) == 1


@pytest.mark.parametrize("window", [(1,), (1, 0, 2), 3], ids=str)
def test_a_window_without_two_items(counted, window):
    call, seen = counted
    with pytest.raises(ValueError, match="window_size is .* two items"):
        call(*replaced((*qkv(), *DENSE), WINDOW, window))
    assert len(seen) == 1


@pytest.mark.parametrize("D", [1, 3, 16, 40, 64, 100, 192])
def test_the_default_scale(counted, D):
    call, seen = counted
    qkv = torch.randn(1, 4, 3, 2, D)
    q, k, v = qkv.unbind(2)
    plain = call(*replaced((q, k, v, *DENSE), 8, None))
    assert all(map(torch.equal, plain, attention(*replaced((q, k, v, *DENSE), 8, D**-0.5)))) and not seen
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv), plain[0])


def test_what_has_no_default_scale(counted):
    call, seen = counted
    for q in (torch.tensor(1.0), torch.empty(1, 4, 2, 0), "q"):
        with pytest.raises((RuntimeError, TypeError)):
            call(*replaced((q, q, q, *DENSE), 8, None))
    assert len(seen) == 3


def test_one_result_is_returned_alone(counted):
    call, seen = counted
    arguments = replaced((*qkv(), *DENSE), 14, False)
    out = call(*arguments)
    assert torch.equal(out, attention(*arguments)[0]) and not seen
    assert torch.equal(Operator("attention", ("q", "k", "v")).general(*arguments), out)


class Named(torch.Tensor):
    """A subclass, whose results are of its kind."""


@pytest.mark.parametrize(
    "position, given",
    [(7, 0), (8, True), (9, 0), (10, (1.0, -1)), (10, (-1, torch.tensor(-1))), (11, 0), (6, 2**70), (12, 1.0)],
    ids=[
        "int for float",
        "bool for float",
        "int for bool",
        "float for int",
        "tensor for int",
        "softcap",
        "long",
        "tensor",
    ],
)
def test_other_numbers_are_left_to_torch(counted, position, given):
    call, seen = counted
    arguments = replaced((*qkv(), *DENSE), position, given)
    outcomes = []
    for function in (call, attention):
        try:
            outcomes.append([x.tolist() for x in function(*arguments)])
        except Exception as error:
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1] and len(seen) == 1


def test_subclasses_are_left_to_torch(counted):
    call, seen = counted
    q, k, v = qkv()
    out = call(q.as_subclass(Named), k, v, *DENSE)[0]
    assert len(seen) == 1 and type(out) is Named
    assert type(flash_attn.flash_attn_func(q.as_subclass(Named), k, v)) is Named


@pytest.mark.requires_torch(2, 0, "function modes of older torch are private")
def test_function_modes_see_the_operator(counted):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen_by_mode.append(function)
            return function(*args, **(kwargs or {}))

    seen_by_mode = []
    call, seen = counted
    with Mode():
        call(*qkv(), *DENSE)
    assert len(seen) == 1 and torch.ops.flash_attn.attention.default in seen_by_mode


@pytest.mark.requires_torch(2, 0, "dispatch modes of older torch are private")
def test_dispatch_modes_see_the_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen, tensors = [], qkv()
    with Mode(), torch.no_grad():
        flash_attn.flash_attn_func(*tensors)
    assert seen == [torch.ops.flash_attn.attention.default]


def test_errors_are_those_of_torch(counted):
    call, seen = counted
    q, k, v = qkv()
    for arguments in ((q, k[:1], v, *DENSE), (q, k, v), (q, k, v, *DENSE, *[None] * 10), (q, k, "v", *DENSE)):
        messages = []
        for function in (call, attention):
            with pytest.raises((RuntimeError, TypeError)) as raised:
                function(*arguments)
            messages.append((raised.type, str(raised.value)))
        assert messages[0] == messages[1]
    assert len(seen) == 3  # All but the first, whose arguments are plain.
    with pytest.raises(TypeError, match="keyword"):
        call(q=q)


def test_references_are_given_back():
    q, k, v = qkv()
    calls = 2000
    before = [sys.getrefcount(x) for x in (q, k, v, None)]
    for _ in range(calls):
        flash_attn.flash_attn_func(q, k, v)
    with pytest.raises(RuntimeError):
        flash_attn.flash_attn_func(q, k[:1], v)
    after = [sys.getrefcount(x) for x in (q, k, v, None)]
    assert after[:3] == before[:3] and abs(after[3] - before[3]) < calls / 4


def test_one_result_none_and_optional_numbers():
    x, cos, sin = torch.randn(1, 3, 2, 8), torch.randn(5, 4), torch.randn(5, 4)
    expected = torch.ops.flash_attn.rotate(x, cos, sin, 1, None, None, False, False)
    seen = []
    calls = {name: _native.load()._plain_call(f"flash_attn::{name}", seen.append) for name in ("rotate", "rotate_")}
    for longest in ((), (None,), (3,)):
        assert torch.equal(calls["rotate"](x, cos, sin, 1, None, None, False, False, *longest), expected)
    assert calls["rotate_"](x, cos, sin, 1, None, None, False, False) is None
    assert torch.equal(x, expected) and not seen
