"""`watched` passes on the queries and keys of every layer, or raises an error."""

import torch

from alibi_attn.hf import ALiBiCausalLMConfig, ALiBiForCausalLM
from alibi_attn.hf.patching.capture_qk import watched


@torch.no_grad()
def test_slopes_that_depend_on_the_length_are_those_of_this_length(tokens):
    sizes = {"vocab_size": 60, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    scaling = {"type": "linear", "train_seq_len": 8}
    model = ALiBiForCausalLM(ALiBiCausalLMConfig(**sizes, alibi_scaling=scaling)).eval()
    seen = []
    with watched(model, lambda layer, query, key, slopes, scale: seen.append((layer, slopes))):
        model(tokens(1, 20))
    assert [layer for layer, _ in seen] == [0, 1]
    for _, slopes in seen:
        torch.testing.assert_close(slopes, torch.tensor(model.config.unstretched) / (20 / 8))
