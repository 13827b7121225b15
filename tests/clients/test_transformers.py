"""transformers' models with attn_implementation="flash_attention_2" on the CPU against the same weights in eager.

Every test also looks at the calls that reached flash_attn: how many, and with which window, softcap and lengths.
"""

from __future__ import annotations

import pytest
import torch
from definition import assert_near
from tiny_models import MODELS, padded, tokens

pytestmark = pytest.mark.parametrize("tiny", MODELS, ids=lambda tiny: tiny.name)
LENGTHS = (17, 23, 5)


def check_calls(calls, tiny, function):
    """One call per layer and pass, with that layer's features."""
    assert calls and len(calls) % len(tiny.windows) == 0
    for i, (name, arguments) in enumerate(calls):
        assert name == function
        assert arguments["causal"] is tiny.causal
        assert arguments.get("window_size") == tiny.windows[i % len(tiny.windows)]
        assert arguments.get("softcap") == tiny.softcap
        assert arguments["softmax_scale"] is not None


@torch.no_grad()
def test_same_lengths(tiny, transformers_calls):
    eager, flash = tiny.pair()
    ids = tokens(3, 21)
    wanted = eager(ids).logits
    assert_near(flash(ids).logits, wanted)
    check_calls(transformers_calls, tiny, "flash_attn_func")
    if tiny.without:
        other = tiny.build("eager", **tiny.without)
        assert (other(ids).logits - wanted).abs().max() > 1e-2, "eager does not depend on what is tested"


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(tiny, transformers_calls, side):
    eager, flash = tiny.pair()
    ids, mask = padded(LENGTHS, side)
    used = mask.bool()
    wanted = eager(ids, attention_mask=mask).logits[used]
    assert_near(flash(ids, attention_mask=mask).logits[used], wanted)
    check_calls(transformers_calls, tiny, "flash_attn_varlen_func")
    assert all(call["cu_seqlens_q"].tolist() == [0, 17, 40, 45] for _, call in transformers_calls)
    if side == "left" or not tiny.causal:
        assert (eager(ids).logits[used] - wanted).abs().max() > 1e-2, "eager does not depend on the mask"


@torch.no_grad()
def test_padded_in_bf16(tiny, transformers_calls):
    """No further from fp32 than eager in bf16 is, within a factor of two."""
    ids, mask = padded(LENGTHS, "left")
    used = mask.bool()
    wanted = tiny.build("eager")(ids, attention_mask=mask).logits[used]
    eager, flash = (model(ids, attention_mask=mask).logits[used].float() for model in tiny.pair(torch.bfloat16))
    assert (flash - wanted).abs().max() <= 2 * (eager - wanted).abs().max() + 1e-3
    assert (flash - wanted).abs().mean() <= 2 * (eager - wanted).abs().mean() + 1e-4
    check_calls(transformers_calls, tiny, "flash_attn_varlen_func")
    assert all(call["q"].dtype is torch.bfloat16 for _, call in transformers_calls)


def packing(tiny):
    """The arguments with which a row of sequences of these LENGTHS is told apart. ModernBERT's layers do not get
    position_ids; it packs through the lengths themselves."""
    position_ids = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    if tiny.causal:
        return dict(position_ids=position_ids, use_cache=False)
    bounds = torch.tensor([0, 17, 40, 45], dtype=torch.int32)
    lengths = dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=max(LENGTHS), max_length_k=max(LENGTHS))
    return dict(position_ids=position_ids, **lengths)


@torch.no_grad()
def test_packed(tiny, transformers_calls):
    """Sequences one after another in one row against eager on each of them alone."""
    eager, flash = tiny.pair()
    ids = tokens(1, sum(LENGTHS))
    got = flash(ids, **packing(tiny)).logits
    wanted = torch.cat([eager(part).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
    assert_near(got, wanted)
    check_calls(transformers_calls, tiny, "flash_attn_varlen_func")
    for _, call in transformers_calls:
        assert call["cu_seqlens_k"].tolist() == [0, 17, 40, 45] and call["max_seqlen_k"] == 23
        # From position_ids, transformers 5 takes the length as a tensor without dimensions.
        assert isinstance(call["max_seqlen_q"], torch.Tensor) is tiny.causal


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(9, 9), (4, 9, 7)], ids=["one length", "padded"])
def test_generate(tiny, transformers_calls, lengths):
    """Greedy tokens are eager's: the prompt's pass, then single queries on a growing cache, past the window."""
    if not tiny.causal:
        pytest.skip("an encoder does not generate")
    eager, flash = tiny.pair()
    ids, mask = padded(lengths, "left")
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False)
    wanted = eager.generate(ids, **options)
    assert torch.equal(flash.generate(ids, **options), wanted)
    assert wanted.shape == (len(lengths), 21) and len(set(wanted[:, 9:].flatten().tolist())) > 3
    assert len(transformers_calls) == 12 * 2
    names = {name for name, _ in transformers_calls}
    assert names == {"flash_attn_func"} if len(lengths) == 2 else transformers_calls[0][0] == "flash_attn_varlen_func"
    for _, call in transformers_calls[2:]:
        rows = call["q"].shape[0] if "cu_seqlens_q" in call else call["q"].shape[:2].numel()
        assert rows == len(lengths), "decoding is one query of each sequence"


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_training_step(tiny, transformers_calls, kind):
    """Loss and the gradient of every parameter, then the loss after a step of SGD; eager's batch is padded."""
    ids, mask = padded(LENGTHS, "right")
    labels = ids.masked_fill(mask == 0, -100)
    if tiny.causal:
        labels[:, 0] = -100  # nothing predicts it, except, in a packed row, the sequence before
    batches = [dict(input_ids=ids, attention_mask=mask, labels=labels)] * 2
    if kind == "packed":
        used = mask.bool()
        batches[1] = dict(input_ids=ids[used][None], labels=labels[used][None], **packing(tiny))
    losses, gradients = [], []
    for model, batch in zip(tiny.pair(), batches):
        model.train()
        loss = model(**batch).loss
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        torch.optim.SGD(model.parameters(), lr=0.05).step()
        losses.append((loss.item(), model(**batch).loss.item()))
    (before, after), (flash_before, flash_after) = losses
    assert abs(before - flash_before) < 1e-5 * before and abs(after - flash_after) < 1e-4 * after and after < before
    for name, wanted in gradients[0].items():
        largest = wanted.abs().max()
        assert largest > 0, name
        assert_near(gradients[1][name] / largest, wanted / largest, 1e-4)
    check_calls(transformers_calls, tiny, "flash_attn_varlen_func")
    assert len(transformers_calls) == 4
