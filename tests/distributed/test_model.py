"""`context_parallel` on models in one process; test_attention.py starts several."""

import pytest
import torch
from torch import distributed as dist
from torch import nn

from alibi_attn.distributed import context_parallel
from alibi_attn.hf.readers.decoder.model import ALiBiForCausalLM
from alibi_attn.hf.readers.decoder_config import ALiBiCausalLMConfig
from alibi_attn.nn import ALiBiAttention, KVCache


@pytest.fixture
def group(tmp_path):
    """A process group with this process only."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank_computes_what_the_model_computes(group):
    layer, x = ALiBiAttention(32, 4), torch.randn(1, 20, 32)
    before = layer(x)
    with context_parallel(nn.Sequential(layer), group) as handle:
        assert handle.layers == ("0",)
        assert torch.equal(layer(x), before)
        assert "active=True" in repr(handle)
    assert "attend" not in vars(layer)
    with pytest.raises(ValueError, match="already undone"):
        handle.undo()


def test_attention_that_was_wrapped_since_is_not_removed(group):
    first, second = ALiBiAttention(32, 4), ALiBiAttention(32, 4)
    handle = context_parallel(nn.Sequential(first, second), group)
    ours = second.attend
    second.attend = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(ValueError, match=r"^1 \(ALiBiAttention\) has another attend than context_parallel"):
        handle.undo()
    assert "attend" in vars(first)
    second.attend = ours
    handle.undo()
    assert not {"attend", "attend_gated"} & (vars(first).keys() | vars(second).keys())


def test_dropout_is_that_of_the_first_ranks_generator(group):
    layer, x = ALiBiAttention(32, 4, dropout_p=0.5), torch.randn(1, 20, 32)
    torch.manual_seed(3)
    expected = layer(x)
    with context_parallel(layer, group):
        torch.manual_seed(3)
        assert torch.equal(layer(x), expected)


def test_unsupported_uses_raise(group):
    layer = ALiBiAttention(32, 4)
    x = torch.randn(1, 20, 32)
    with pytest.raises(ValueError, match="no attention layers from alibi_attn"):
        context_parallel(nn.Linear(3, 3), group)
    with pytest.raises(TypeError, match="must be an nn"):
        context_parallel("model", group)
    with context_parallel(layer, group):
        with pytest.raises(ValueError, match="no cache"):
            layer(x, cache=KVCache())
        with pytest.raises(ValueError, match="already"):
            context_parallel(layer, group)


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 40,
}


def test_several_texts_in_one_row_raise(group):
    """Their numbers begin anew in the shard of every rank."""
    model, ids = ALiBiForCausalLM(ALiBiCausalLMConfig(**SIZES)), torch.arange(8)[None]
    with context_parallel(model, group), pytest.raises(ValueError, match="supports one text per row"):
        model(ids, segment_ids=ids // 4, use_cache=False)


def test_slopes_that_depend_on_the_length_raise(group):
    config = ALiBiCausalLMConfig(**SIZES, alibi_scaling={"type": "linear", "train_seq_len": 8})
    with pytest.raises(ValueError, match="needs the length of the text"):
        context_parallel(ALiBiForCausalLM(config), group)
