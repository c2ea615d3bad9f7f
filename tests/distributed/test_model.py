"""`context_parallel` on models in one process; test_attention.py starts several."""

import pytest
import torch
from decoder_checkpoints import SIZES
from refusals import assert_refused
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
    """Numbers of texts in one row begin anew in the shard of every rank."""
    layer, x, ids = ALiBiAttention(32, 4), torch.randn(1, 20, 32), torch.arange(8)[None]
    scaling = {"type": "linear", "train_seq_len": 8}
    model, by_length = (ALiBiForCausalLM(ALiBiCausalLMConfig(**SIZES, alibi_scaling=x)) for x in (None, scaling))
    with context_parallel(layer, group), context_parallel(model, group):
        assert_refused(
            ("no attention layers from alibi_attn", lambda: context_parallel(nn.Linear(3, 3), group)),
            ("no cache", lambda: layer(x, cache=KVCache())),
            ("already", lambda: context_parallel(layer, group)),
            ("supports one text per row", lambda: model(ids, segment_ids=ids // 4, use_cache=False)),
            ("needs the length of the text", lambda: context_parallel(by_length, group)),
        )
    with pytest.raises(TypeError, match="must be an nn"):
        context_parallel("model", group)
