"""transformers' continuous batching with "flash_attention_2" on the CPU: keys and values in pages."""

from __future__ import annotations

import pytest
import torch
from definition import assert_near
from plain_attention import attend
from tiny_models import MODELS, tokens
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.modeling_flash_attention_utils import _flash_attention_forward

PAGE, NEW = 16, 8
LENGTHS = (5, 9, 13)


@pytest.mark.parametrize("tiny", [m for m in MODELS if m.name in ("Llama", "Mistral")], ids=lambda tiny: tiny.name)
def test_continuous_batching(tiny, transformers_calls):
    """Prefill and decoding of all requests in one packed call a step. Greedy tokens are those of eager's generate."""
    eager, flash = tiny.pair()
    prompts = [tokens(n, seed=n).tolist() for n in LENGTHS]
    batching = ContinuousBatchingConfig(page_size=PAGE, num_blocks=32, max_batch_tokens=64, max_blocks_per_request=0)
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    results = flash.generate_batch(prompts, generation_config=generation, continuous_batching_config=batching)
    got = {tuple(result.prompt_ids): result.generated_tokens for result in results.values()}
    for prompt in prompts:
        wanted = eager.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        assert got[tuple(prompt)] == wanted[0, len(prompt) :].tolist()
    assert len(transformers_calls) == 2 * NEW
    assert {name for name, _ in transformers_calls} == {"flash_attn_varlen_func"}


def test_decoding_through_the_block_table(transformers_calls):
    """transformers takes this path on GPUs only, so its function is called as a model would: one token of each
    sequence, appended to the pages by flash_attn_with_kvcache."""
    B, H, Hk, D = 3, 4, 2, 16
    past = torch.tensor([4, 16, 20])
    pages = [torch.randn(6, PAGE, Hk, D) for _ in range(2)]
    table = torch.tensor([[3, 0], [5, 1], [2, 4]], dtype=torch.int32)
    before = [x[table.long()].flatten(1, 2) for x in pages]
    q, k, v = (torch.randn(1, B, h, D) for h in (H, Hk, Hk))
    out = _flash_attention_forward(
        q,
        k,
        v,
        attention_mask=None,
        query_length=B,
        is_causal=True,
        cu_seq_lens_q=torch.arange(B + 1, dtype=torch.int32),
        cu_seq_lens_k=torch.tensor([0, *(past + 1).cumsum(0).tolist()], dtype=torch.int32),
        max_length_q=1,
        max_length_k=21,
        attn_implementation="flash_attention_2",
        block_table=table,
        k_cache=pages[0],
        v_cache=pages[1],
    )
    ((name, call),) = transformers_calls
    assert name == "flash_attn_with_kvcache" and call["cache_seqlens"].tolist() == past.tolist()
    for b, n in enumerate(past.tolist()):
        keys, values = (torch.cat([x[b, :n], new[0, b, None]])[None] for x, new in zip(before, (k, v)))
        assert_near(out[:, b, None], attend(q[:, b, None].double(), keys.double(), values.double()))
        assert torch.equal(pages[0][table[b, n // PAGE], n % PAGE], k[0, b])
