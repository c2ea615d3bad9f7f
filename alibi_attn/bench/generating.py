"""`alibi bench generating`: one new token of a whole BLOOM with a long cache, as it comes, patched, and with `ALiBiCache`."""

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from alibi_attn import records
from alibi_attn.bench.columns import Columns, append
from alibi_attn.bench.timing import medians_ms

LENGTHS = (2048, 8192, 32768, 65536)
PATCHED, THEIRS, THEIRS_STATIC = "patched, DynamicCache", "transformers", "transformers, StaticCache"
SPARE = 2  # steps that are not timed: one compared, one to warm up


def generating(
    out: Path,
    *,
    patch: Callable[[nn.Module], object],
    alibi_cache: Callable[[], Cache],
    lengths: Sequence[int] = LENGTHS,
    layers: int = 2,
    num_heads: int = 16,
    head_dim: int = 64,
    repeats: int = 9,
    say: Callable[[str], None] = print,
) -> Path:
    """Measure and keep one record; returns its path.

    "ours" is a patched model with an `ALiBiCache`; "transformers" has the cache that `generate` makes, which copies all keys for
    each token, and "transformers, StaticCache" the one of cache_implementation="static", which does not. Random weights, random
    cached keys and values, fp32, one sequence; logits are compared before anything is timed.

    Args:
        patch, alibi_cache: those of `alibi_attn.hf`, which this layer does not import.
    """
    asked: dict[str, records.Json] = {
        "lengths": list(lengths), "layers": layers, "heads": num_heads, "head_dim": head_dim, "dtype": "float32",
        "threads": torch.get_num_threads(), "ways": ["ours", PATCHED, THEIRS, THEIRS_STATIC],
    }  # fmt: skip
    records.expect_new(out, "benchmark", "generating/bloom", asked)
    started = datetime.datetime.now(datetime.UTC)
    torch.manual_seed(0)
    config = BloomConfig(hidden_size=num_heads * head_dim, n_layer=layers, n_head=num_heads, vocab_size=1000)
    plain, patched = BloomForCausalLM(config), BloomForCausalLM(config)
    for model in (plain, patched):
        model.train(False)
    patched.load_state_dict(plain.state_dict())
    patch(patched)
    columns: Columns = {}
    for length in sorted(lengths):
        torch.manual_seed(1)
        filling = [tuple(torch.randn(1, num_heads, length, head_dim) for _ in range(2)) for _ in range(layers)]
        room = StaticCache(config=config, max_cache_len=length + repeats + SPARE)
        caches = {"ours": alibi_cache(), PATCHED: DynamicCache(), THEIRS: DynamicCache(), THEIRS_STATIC: room}
        calls: dict[str, Callable[[], object]] = {}
        with torch.no_grad():
            for name, cache in caches.items():
                for layer, (key, value) in enumerate(filling):
                    cache.update(key, value, layer)
                calls[name] = _step(plain if name in (THEIRS, THEIRS_STATIC) else patched, cache, torch.tensor([[7]]))
            logits = {name: call() for name, call in calls.items()}
            true = logits[THEIRS]
            for name, found in logits.items():
                error = float((found - true).abs().max() / true.abs().max())  # type: ignore[operator, attr-defined]
                if not error < 1e-4:
                    raise RuntimeError(f"{name} is off by {error:.1e} of the largest logit at {length} tokens")
            taken = medians_ms(calls, repeats=repeats, budget_s=60.0)
        for name, milliseconds in taken.items():
            append(columns, name, {"length": length, "forward_ms": milliseconds})
        ours = taken["ours"]
        said = ", ".join(f"{name} {ms:.1f} ms ({ms / ours:.1f}×)" for name, ms in taken.items())
        say(f"{length:>7} cached tokens: {said}")
    made = records.make("benchmark", "generating/bloom", config=asked, metrics={}, curves=columns, started=started)
    return records.save(made, out)


def _step(model: nn.Module, cache: Cache, token: Tensor) -> Callable[[], Tensor]:
    """One token, which the cache then forgets again; a StaticCache, which cannot, has room for all of them."""

    def call() -> Tensor:
        logits: Tensor = model(token, past_key_values=cache).logits
        if not isinstance(cache, StaticCache):
            cache.crop(-1)
        return logits

    return call
