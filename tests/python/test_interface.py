"""How the public and raw functions read their arguments and what they return: spellings, defaults, shapes, class names,
class names and what reaches the operators. Numbers are the subject of the test_attention_* files."""

import inspect
import types

import pytest
import torch
from small_calls import calls, dense, varlen

import flash_attn
from flash_attn import _attention, _native, _raw
from flash_attn import flash_attn_interface as interface

pytestmark = pytest.mark.second_torch

WINDOWS = [
    ((3, 1), [[3, 1], torch.tensor([3, 1]), (torch.tensor(3), 1), torch.Size([3, 1])]),
    ((3, -1), [(3, None), (3, -7)]),
    ((-1, 0), [(None, 0)]),
    ((-1, -1), [(None, None), None]),
]


@pytest.mark.parametrize("same_as, window_size", [(a, b) for a, others in WINDOWS for b in others])
def test_window_size_spellings(same_as, window_size):
    expected = flash_attn.flash_attn_func(*dense(), window_size=same_as)
    assert torch.equal(flash_attn.flash_attn_func(*dense(), window_size=window_size), expected)


def test_left_and_right():
    causal = flash_attn.flash_attn_func(*dense(), causal=True)
    assert torch.equal(flash_attn.flash_attn_func(*dense(), window_size=(-1, 0)), causal)
    assert not torch.equal(flash_attn.flash_attn_func(*dense(), window_size=(0, -1)), causal)


def test_windows_as_clients_pass_them():
    """(w - 1, w - 1) with causal, as transformers does, and windows beyond the sequence."""
    q, k, v = dense()
    expected = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(3, 0))
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(3, 3)), expected)
    for causal in (False, True):
        expected = flash_attn.flash_attn_func(q, k, v, causal=causal)
        assert torch.equal(flash_attn.flash_attn_func(q, k, v, causal=causal, window_size=(4095, 4095)), expected)


def test_the_windows_above_differ():
    outputs = [flash_attn.flash_attn_func(*dense(), window_size=window) for window, _ in WINDOWS]
    assert not any(torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])


@pytest.mark.parametrize("window_size", [3, (3,), (3, 1, 0), torch.tensor([1])])
def test_window_size_needs_two_items(window_size):
    with pytest.raises(ValueError, match="window_size is .*two items"):
        flash_attn.flash_attn_func(*dense(), window_size=window_size)


def test_max_seqlen_as_tensor():
    *rest, max_q, max_k = varlen()
    expected = flash_attn.flash_attn_varlen_func(*rest, max_q, max_k)
    tensors = [torch.tensor(max_q, dtype=torch.int32), torch.tensor(max_k)]
    assert torch.equal(flash_attn.flash_attn_varlen_func(*rest, *tensors), expected)


def test_softmax_scale_default():
    q, k, v = dense()
    expected = flash_attn.flash_attn_func(q, k, v, softmax_scale=8**-0.5)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v), expected)
    qkv = torch.stack([q, q, q], dim=2)
    expected = flash_attn.flash_attn_qkvpacked_func(qkv, softmax_scale=8**-0.5)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv), expected)


@pytest.mark.parametrize("bad", [torch.zeros(()), torch.zeros(2, 5, 4, 0), [1.0]])
def test_inputs_without_head_dim_name_the_argument(bad):
    with pytest.raises(RuntimeError, match=r"\bq\b"):
        flash_attn.flash_attn_func(bad, bad, bad)


@pytest.mark.parametrize("name", calls())
def test_return_values(name):
    function, arguments, out_shape, lse_shape = calls()[name]
    out = function(*arguments)
    assert isinstance(out, torch.Tensor) and out.shape == out_shape and out.dtype == torch.float32
    with_probs = function(*arguments, return_attn_probs=True)
    assert type(with_probs) is tuple and len(with_probs) == 3
    assert torch.equal(with_probs[0], out)
    assert with_probs[1].shape == lse_shape and with_probs[1].dtype == torch.float32
    assert with_probs[2].shape == (0,) and with_probs[2].dtype == out.dtype
    s_dmask = function(*arguments, dropout_p=0.5, return_attn_probs=True)[2]
    keys = {"Func": 9, "KVPackedFunc": 9, "QKVPackedFunc": 5, "VarlenFunc": 7, "VarlenKVPackedFunc": 7}.get(name, 3)
    assert s_dmask.shape == (2, 4, 3 if "Varlen" in name else 5, keys)


@pytest.mark.parametrize("name", calls())
@pytest.mark.parametrize("is_grad_enabled", [True, False])
def test_class_names(name, is_grad_enabled):
    function, arguments, *_ = calls()[name]
    arguments = [x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]
    score = (0.0, 0.3, True, (3, -1), 2.0, torch.tensor([0.1, 0.2, 0.3, 0.4]), True, True)
    block_table = (None,) if name == "VarlenFunc" else ()
    apply = getattr(interface, "FlashAttn" + name).apply
    result = apply(*arguments, *score, *block_table, is_grad_enabled)
    expected = function(*arguments, *score, *block_table)
    assert all(torch.equal(a, b) for a, b in zip(result, expected))
    assert result[0].requires_grad is is_grad_enabled
    with torch.no_grad():
        assert not apply(*arguments, *score, *block_table, is_grad_enabled)[0].requires_grad
    assert torch.is_grad_enabled()
    alone = apply(*arguments, *score[:-1], False, *block_table, is_grad_enabled)
    assert torch.equal(alone, result[0])
    with pytest.raises(TypeError, match="is_grad_enabled"):
        apply(*arguments, *score, *block_table)


@pytest.mark.requires_torch(2, 8, "compilers before it make no int of a tensor within one graph")
def test_arguments_under_compile():
    def block(q, k, v, cu_q, cu_k, max_q, max_k):
        return flash_attn.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, max_q, max_k, causal=True, window_size=[max_k - 4, None], softcap=3.0
        )

    arguments = varlen()
    expected = block(*arguments)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(*arguments), expected)
    *rest, max_q, max_k = arguments
    assert torch.equal(compiled(*rest, torch.tensor(max_q), torch.tensor(max_k)), expected)


@pytest.mark.requires_torch(2, 4, "torch.compile with a static graph")
@pytest.mark.parametrize("is_grad_enabled", [True, False])
def test_class_names_under_compile(is_grad_enabled):
    def block(q, k, v):
        return interface.FlashAttnFunc.apply(q, k, v, 0.0, None, True, (3, 0), 0.0, None, False, False, is_grad_enabled)

    arguments = dense(requires_grad=True)
    torch._dynamo.reset()
    out = torch.compile(block, fullgraph=True, backend="aot_eager")(*arguments)
    assert torch.equal(out, block(*arguments)) and out.requires_grad is is_grad_enabled


# What reaches the operators

OPERATOR_OF = {"Func": "attention", "KVPackedFunc": "attention_kvpacked", "QKVPackedFunc": "attention_qkvpacked"}


@pytest.mark.parametrize("name", calls())
def test_every_argument_reaches_the_operator(monkeypatch, name):
    function, arguments, *_ = calls()[name]
    operator = OPERATOR_OF[name.replace("Varlen", "")]
    schema = getattr(torch.ops.flash_attn, operator).default._schema
    # Both window arguments are one until the operator is called, which returns one result or all.
    names = [argument.name for argument in schema.arguments if argument.name != "window_size_right"]
    received = []
    receive = types.SimpleNamespace(call=lambda *args: received.append(args) or "results")
    monkeypatch.setattr(_attention, f"_{operator}", receive)
    score = {
        name: name for name in ("dropout_p", "softmax_scale", "causal", "softcap", "alibi_slopes", "deterministic")
    }
    for return_softmax in (False, True):
        options = {**score, "window_size": ("left", "right"), "return_attn_probs": return_softmax}
        assert function(*arguments, **options) == "results"
    for args, return_softmax in zip(received, (False, True)):
        by_name = dict(zip(names, args))
        # Where keys are stored is the business of one function alone.
        storage = names[len(args) :]
        assert storage in ([], ["block_table", "leftpad_k", "seqused_k", "num_splits"])
        assert not storage or name == "Func"
        assert by_name["window_size_left"] == ("left", "right")
        assert by_name["return_softmax"] is return_softmax
        assert all(by_name[key] == value for key, value in score.items())
        given = dict(zip(inspect.signature(function).parameters, arguments))
        for side in ("q", "k"):
            cu_seqlens = given.get(f"cu_seqlens_{side}", given.get("cu_seqlens"))
            assert by_name[f"cu_seqlens_{side}"] is cu_seqlens
            assert by_name[f"max_seqlen_{side}"] == given.get(f"max_seqlen_{side}", given.get("max_seqlen", 0))
        assert all(by_name[key] is given[key] for key in ("q", "k", "v", "kv", "qkv") if key in given)


@pytest.mark.parametrize("name", [name for name in calls() if "Varlen" in name])
def test_check_inputs_checks_both_sides_and_changes_nothing(monkeypatch, name):
    function, arguments, *_ = calls()[name]
    plain, check, checked = function(*arguments), _native.load()._check_lengths, []
    noted = types.SimpleNamespace(_check_lengths=lambda *args: checked.append(args) or check(*args))
    monkeypatch.setattr(_attention._native, "load", lambda: noted)
    assert torch.equal(function(*arguments, check_inputs=True), plain)
    given = dict(zip(inspect.signature(function).parameters, arguments))
    for side, (cu_seqlens, of_queries, rows, longest) in zip(("q", "k"), checked):
        packed = next(given[n] for n in (side, "kv", "qkv") if n in given)
        assert cu_seqlens is given.get(f"cu_seqlens_{side}", given.get("cu_seqlens"))
        assert (of_queries, rows) == (side == "q", packed.shape[0])
        assert longest == given.get(f"max_seqlen_{side}", given.get("max_seqlen"))
    assert len(checked) == 2


def test_check_inputs_reads_no_rows_of_pages():
    q, k, v, *lengths = varlen()
    table = torch.arange(2, dtype=torch.int32)[:, None]
    pages = [torch.randn(2, 7, *x.shape[1:]) for x in (k, v)]
    out = flash_attn.flash_attn_varlen_func(q, *pages, *lengths, block_table=table, check_inputs=True)
    assert torch.equal(out, flash_attn.flash_attn_varlen_func(q, *pages, *lengths, block_table=table))


@pytest.mark.parametrize(
    "name", ["_flash_attn_forward", "_flash_attn_varlen_forward", "_flash_attn_backward", "_flash_attn_varlen_backward"]
)
def test_raw_functions_pass_every_argument_in_order(monkeypatch, name):
    function = getattr(interface, name)
    names = list(inspect.signature(function).parameters)
    operator = types.SimpleNamespace(default=lambda *args: args)
    monkeypatch.setattr(_raw, "_wrapped" + name, operator)
    assert list(function(**{name: name for name in reversed(names)})) == names


# The smaller names


def test_helpers():
    assert [interface.round_multiple(x, 128) for x in (0, 1, 128, 129)] == [0, 128, 128, 256]
    x = torch.zeros(3, 4)
    assert interface.maybe_contiguous(x) is x and interface.maybe_contiguous(None) is None
    assert interface.maybe_contiguous(x[:, ::2]).stride(-1) == 1
    assert interface.maybe_contiguous(x[::2]).data_ptr() == x.data_ptr()


def test_one_block_holds_a_row_of_s_dmask():
    block = interface._get_block_size_n(torch.device("cpu"), 576, True, False)
    assert len(torch.zeros(2, 1000).split(block, dim=-1)) == 1
    with pytest.raises(AssertionError, match="577"):
        interface._get_block_size_n(torch.device("cpu"), 577, True, False)


def test_decorator_names():
    for decorator in (interface._torch_custom_op_wrapper, interface._torch_register_fake_wrapper):
        assert callable(decorator)
    if not hasattr(torch.library, "custom_op"):

        def function():
            pass

        assert interface._torch_custom_op_wrapper("a::b", mutates_args=())(function) is function
        assert interface._torch_register_fake_wrapper("a::b")(function) is function


def test_wrapped_names_are_the_operators():
    for name in ("forward", "backward", "varlen_forward", "varlen_backward"):
        op = getattr(interface, f"_wrapped_flash_attn_{name}")
        assert op is getattr(torch.ops.flash_attn, f"_flash_attn_{name}")


def raw_calls(dropout_p, return_softmax):
    """Each raw function with arguments that it accepts, the backwards on results of the forwards."""
    score = (dropout_p, 0.3, True, -1, -1, 0.0, None)
    (q, k, v), (packed_q, packed_k, packed_v, *lengths) = dense(), varlen()
    forward = (q, k, v, *score, return_softmax)
    varlen_forward = (packed_q, packed_k, packed_v, *lengths, *score, return_softmax)
    out, lse, _, rng_state = interface._flash_attn_forward(*forward)
    packed_out, packed_lse, _, packed_rng_state = interface._flash_attn_varlen_forward(*varlen_forward)
    grads = [torch.full_like(x, 7.0) for x in (q, k, v)]
    packed_grads = [torch.full_like(x, 7.0) for x in (packed_q, packed_k, packed_v)]
    varlen_backward = (torch.ones_like(packed_out), packed_q, packed_k, packed_v, packed_out, packed_lse, *packed_grads)
    return {
        "_flash_attn_forward": forward,
        "_flash_attn_varlen_forward": varlen_forward,
        "_flash_attn_backward": (torch.ones_like(out), q, k, v, out, lse, *grads, *score, False, rng_state),
        "_flash_attn_varlen_backward": (*varlen_backward, *lengths, *score, False, packed_rng_state),
    }


@pytest.mark.parametrize("dropout_p, return_softmax", [(0.0, False), (0.3, True)])
@pytest.mark.parametrize(
    "name", ["_flash_attn_forward", "_flash_attn_varlen_forward", "_flash_attn_backward", "_flash_attn_varlen_backward"]
)
def test_fakes_have_the_shapes_of_results(name, dropout_p, return_softmax):
    arguments = raw_calls(dropout_p, return_softmax)[name]
    fake = getattr(interface, name + "_fake")(*arguments)
    if "backward" in name:
        assert all((grad == 7).all() for grad in arguments[6:9]), "a fake wrote into dq, dk or dv"
    real = getattr(interface, name)(*arguments)
    assert isinstance(fake, torch.Tensor) == isinstance(real, torch.Tensor)
    pairs = [(fake, real)] if isinstance(fake, torch.Tensor) else list(zip(fake, real))
    assert len(pairs) == (1 if "backward" in name else 4)
    for a, b in pairs:
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)
        assert not a.is_inference()


def test_fakes_take_what_their_functions_take():
    packed = (*varlen(), 0.3, 0.5, True)
    *_, s_dmask, _ = interface._flash_attn_varlen_forward_fake(*packed, return_softmax=True)  # after defaults
    assert s_dmask.shape == interface._flash_attn_varlen_forward(*packed, return_softmax=True)[2].shape != (0,)
    assert interface._flash_attn_varlen_forward_fake.__name__ == "_flash_attn_varlen_forward_fake"
