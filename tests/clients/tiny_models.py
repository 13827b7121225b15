"""Models of transformers with a few thousand random weights, and inputs for them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
import transformers

VOCABULARY = 61
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    # Large weights make scores large, so that a window, a softcap or a mask that is lost changes the results.
    initializer_range=0.2,
)
GQA = dict(num_key_value_heads=2)


@dataclass(frozen=True)
class Tiny:
    """One model: its class and configuration, and what its attention layers must pass, in order of the layers."""

    name: str
    causal: bool = True
    options: dict = field(default_factory=dict)
    # The window_size and softcap of each layer's call on more keys than the window has.
    windows: tuple = (None, None)
    softcap: float | None = None
    # Options without which eager's results must differ, or the test could not see them being lost.
    without: dict | None = None

    def config(self, **changed):
        return getattr(transformers, f"{self.name}Config")(**{**SIZES, **self.options, **changed})

    def build(self, attention, dtype=torch.float32, **changed):
        """The model with weights that depend on its shapes alone."""
        torch.manual_seed(11)
        kind = getattr(transformers, f"{self.name}For{'CausalLM' if self.causal else 'MaskedLM'}")
        model = kind._from_config(self.config(**changed), attn_implementation=attention)
        return model.to(dtype).eval()

    def pair(self, dtype=torch.float32):
        """(eager's, flash_attn's) with the same weights."""
        eager, flash = self.build("eager", dtype), self.build("flash_attention_2", dtype)
        flash.load_state_dict(copy.deepcopy(eager.state_dict()))
        return eager, flash


# transformers says "the last w keys" to causal models and passes (w - 1, w - 1); ModernBERT's window is w / 2 each way.
MODELS = [
    Tiny("Llama", options=GQA),
    Tiny("Mistral", options={**GQA, "sliding_window": 6}, windows=((5, 5),) * 2, without={"sliding_window": None}),
    Tiny(
        "Gemma2",
        options={
            **GQA,
            "head_dim": 24,
            "sliding_window": 6,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 9,
            "tie_word_embeddings": False,
        },
        windows=((5, 5), None),
        softcap=2.0,
        without={"attn_logit_softcapping": 50.0},
    ),
    Tiny("Qwen2", options=GQA),
    Tiny(
        "ModernBert",
        causal=False,
        options={
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            "initializer_cutoff_factor": 5.0,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
        windows=(None, (4, 4)),
        without={"local_attention": 64},
    ),
]


def tokens(*shape, seed=0):
    """Token numbers, none of them special."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def padded(lengths, side):
    """(input_ids, attention_mask) of sequences with these lengths, padded on that side."""
    longest = max(lengths)
    ids = tokens(len(lengths), longest)
    position = torch.arange(longest).expand(len(lengths), longest)
    used = torch.tensor(lengths)[:, None]
    mask = position < used if side == "right" else position >= longest - used
    return ids.masked_fill(~mask, 0), mask.long()
