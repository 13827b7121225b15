"""Packing and unpacking of padded batches, against plain loops over the mask."""

import pytest
import torch

from flash_attn.bert_padding import (
    IndexFirstAxis,
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    rearrange,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

pytestmark = pytest.mark.second_torch

B, S = 4, 7


def random_mask(lengths=None):
    if lengths is not None:
        return torch.arange(S)[None] < torch.tensor(lengths)[:, None]
    return torch.rand(B, S, generator=torch.Generator().manual_seed(1)) < 0.6


def hidden_states(*trailing):
    return torch.randn(B, S, *trailing, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def selected(hidden, mask):
    """Row by row, the tokens whose mask is set; and each row's count."""
    tokens = [[hidden[b, s] for s in range(S) if mask[b, s]] for b in range(B)]
    return torch.stack([t for row in tokens for t in row]), [len(row) for row in tokens]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
@pytest.mark.parametrize("trailing", [(3,), (2, 3)])
@pytest.mark.parametrize("lengths", [None, [7, 0, 3, 1], [0, 0, 5, 0]])
def test_unpad_input(dtype, trailing, lengths):
    hidden, mask = hidden_states(*trailing), random_mask(lengths)
    packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(hidden, mask.to(dtype))
    expected, counts = selected(hidden, mask)
    assert torch.equal(packed, expected)
    assert torch.equal(hidden.flatten(0, 1)[indices], expected)
    assert cu_seqlens.tolist() == [sum(counts[:b]) for b in range(B + 1)]
    assert type(max_seqlen) is int and max_seqlen == max(counts)
    assert seqused.tolist() == counts
    assert (indices.dtype, cu_seqlens.dtype, seqused.dtype) == (torch.int64, torch.int32, torch.int32)
    assert cu_seqlens.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
def test_unused_tokens_are_packed_but_not_counted_as_used(dtype):
    used, unused = random_mask([5, 2, 0, 7]), torch.zeros(B, S, dtype=torch.bool)
    unused[0, 5] = unused[1, 6] = unused[2, 0] = True
    hidden = hidden_states(3)
    packed, _, cu_seqlens, max_seqlen, seqused = unpad_input(hidden, used.to(dtype), unused.to(dtype))
    expected, counts = selected(hidden, used | unused)
    assert torch.equal(packed, expected)
    assert cu_seqlens.tolist() == [0, 6, 9, 10, 17] and max_seqlen == max(counts) == 7
    assert seqused.tolist() == [5, 2, 0, 7]
    again = unpad_input(hidden, used.to(dtype), (used | unused).to(dtype))  # a token of both is one token
    assert torch.equal(again[0], expected) and torch.equal(again[2], cu_seqlens)


def test_pad_input_undoes_unpad_input():
    hidden, mask = hidden_states(2, 3), random_mask()
    packed, indices, *_ = unpad_input(hidden, mask)
    padded = pad_input(packed, indices, B, S)
    assert padded.shape == hidden.shape
    assert torch.equal(padded, hidden * mask[:, :, None, None])


def test_indices_may_be_int32():
    """transformers unpads single queries with the cu_seqlens of its batch as indices."""
    x, indices = torch.randn(4, 2, 3, requires_grad=True), torch.tensor([5, 0, 3, 2])
    wanted = index_put_first_axis(x, indices, 6)
    assert torch.equal(index_put_first_axis(x, indices.int(), 6), wanted)
    assert torch.equal(pad_input(x, indices.int(), 2, 3), wanted.unflatten(0, (2, 3)))
    dout = torch.randn_like(wanted)
    (got,) = torch.autograd.grad(index_put_first_axis(x, indices.int(), 6), x, dout)
    assert torch.equal(got, dout[indices])
    for function in (index_first_axis, lambda *arguments: index_first_axis_residual(*arguments)[0]):
        rows = function(x, torch.tensor([3, 1], dtype=torch.int32))
        assert torch.equal(rows, x[[3, 1]])
        (got,) = torch.autograd.grad(rows, x, torch.ones_like(rows))
        assert got.sum(dim=(1, 2)).tolist() == [0, 6, 0, 6]


def test_concatenated_sequences():
    in_length = torch.zeros(B, S, dtype=torch.int64)
    in_length[0, :2] = torch.tensor([2, 3])
    in_length[2, :1] = torch.tensor([7])
    in_length[3, :3] = torch.tensor([1, 1, 4])
    hidden = hidden_states(3)
    packed, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(hidden, in_length)
    assert torch.equal(packed, torch.cat([hidden[0, :5], hidden[2], hidden[3, :6]]))
    assert torch.equal(packed, hidden.flatten(0, 1)[indices])
    assert cu_seqlens.tolist() == [0, 2, 5, 12, 13, 14, 18]
    assert cu_seqlens.dtype == torch.int32 and type(max_seqlen) is int and max_seqlen == 7


def test_gradients():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    indices = torch.tensor([4, 0, 4, 2])  # one row twice: its gradients add up

    assert torch.autograd.gradcheck(lambda x: index_first_axis(x, indices), x)
    assert torch.autograd.gradcheck(lambda x: index_first_axis_residual(x, indices), x)
    assert torch.autograd.gradcheck(lambda x: index_put_first_axis(x, torch.tensor([6, 1, 0, 3, 5]), 8), x)


def test_residual_shares_the_input_and_leaves_gradients_alone():
    x = torch.randn(5, 2, requires_grad=True)
    indices = torch.tensor([3, 1])
    rows, residual = index_first_axis_residual(x, indices)
    assert torch.equal(rows, x[indices]) and residual.data_ptr() == x.data_ptr()
    grad_residual = torch.ones_like(residual)
    (grad,) = torch.autograd.grad((rows, residual), x, (torch.full_like(rows, 2.0), grad_residual))
    assert grad.tolist() == [[1, 1], [3, 3], [1, 1], [3, 3], [1, 1]]
    assert torch.equal(grad_residual, torch.ones_like(residual))


def test_round_trip_gradient_is_the_mask():
    hidden, mask = hidden_states(3).requires_grad_(), random_mask()
    packed, indices, *_ = unpad_input(hidden, mask)
    pad_input(packed, indices, B, S).sum().backward()
    assert torch.equal(hidden.grad, mask[:, :, None].expand_as(hidden).to(hidden.dtype))


def test_dtype_is_kept():
    x = torch.randn(4, 2).bfloat16()
    assert index_first_axis(x, torch.tensor([1])).dtype == torch.bfloat16
    assert index_put_first_axis(x, torch.arange(4), 9).dtype == torch.bfloat16


def test_rows_without_features_are_refused():
    for function in (index_first_axis, index_first_axis_residual):
        with pytest.raises(AssertionError, match=r"input has shape \(3,\)"):
            function(torch.zeros(3), torch.tensor([0]))
    with pytest.raises(AssertionError, match=r"values has shape \(1,\)"):
        index_put_first_axis(torch.zeros(1), torch.tensor([0]), 3)


def test_names_that_clients_import():
    assert rearrange(torch.zeros(2, 3), "a b -> b a").shape == (3, 2)
    assert index_first_axis.__self__ is IndexFirstAxis
