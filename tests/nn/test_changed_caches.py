"""Caches whose tensors, or layers whose slopes, are changed after keys were certified or forgotten."""

import copy

import pytest
import torch

from alibi_attn.nn import ALiBiAttention, KVCache

pytestmark = pytest.mark.usefixtures("no_gradients")


def test_a_forgetting_cache_refuses_keys_beyond_its_bound():
    torch.manual_seed(0)
    layer = ALiBiAttention(64, 4, qk_norm=True)
    cache = layer.reach_cache()
    x = torch.randn(1, 600, 64)
    layer(x, cache=cache)
    layer(x[:, :1], cache=cache)
    cache.groups[-1].filled()[0][:, :, -3] *= 50
    with pytest.raises(ValueError, match="scores may reach"):
        layer(x[:, :1], cache=cache)


@pytest.mark.parametrize("gated", [False, True])
def test_a_forgetting_cache_refuses_smaller_slopes(gated):
    torch.manual_seed(0)
    layer = ALiBiAttention(64, 4, qk_norm=True, learn_slopes=True, forget_gate=gated)
    cache = layer.reach_cache()
    x = torch.randn(1, 600, 64)
    layer(x, cache=cache)
    layer.slopes.values[0] *= 2
    layer(x[:, :1], cache=cache)
    layer.slopes.values[0] /= 4
    with pytest.raises(ValueError, match="create a new one after slopes fall"):
        layer(x[:, :1], cache=cache)
    layer(x[:, :1], cache=layer.reach_cache())


def test_a_gated_cache_refuses_changed_gates_once_tokens_are_forgotten():
    torch.manual_seed(0)
    layer = ALiBiAttention(64, 4, qk_norm=True, forget_gate=True)
    cache = layer.reach_cache()
    x = torch.randn(1, 900, 64)
    for part in x.split(300, 1):
        layer(part, cache=cache)
    assert any(cache.forgotten)
    twin = copy.deepcopy(cache)
    layer(x[:, :1], cache=twin)
    for group in cache.groups:
        group.filled()[2].zero_()
    with pytest.raises(ValueError, match="changed after tokens had been forgotten"):
        layer(x[:, :1], cache=cache)


def test_a_cache_in_a_file_refuses_writes(tmp_path):
    key, value = torch.randn(2, 1, 4, 80, 16)
    cache = KVCache(tmp_path / "cache")
    cache.append(key, value)
    cache.append(key[:, :, :3], value[:, :, :3])
    cache.value[:, :, 4] = 7.0
    for use in (cache.groups[0].norms, lambda: cache.append(key, value)):
        with pytest.raises(ValueError, match="changed in place"):
            use()
    cache.crop(0)
    cache.append(key, value)
    cache.verify()
