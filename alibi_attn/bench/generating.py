"""`alibi bench generating`: one new token of a whole BLOOM with a long cache, as it comes, patched, and with `ALiBiCache`; also
of two rows at once, without and behind padding, and after a prompt beside llama.cpp and CTranslate2, where they are installed."""

import contextlib
import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from alibi_attn import records
from alibi_attn.bench import model_peers
from alibi_attn.bench.columns import Columns, append
from alibi_attn.bench.timing import medians_ms

LENGTHS = (512, 2048, 8192, 32768, 65536)
PATCHED, THEIRS, THEIRS_STATIC = "patched, DynamicCache", "transformers", "transformers, StaticCache"
ROWS, PADDED, UNEVEN = "ours, two rows", "ours, two rows behind padding", "ours, one row a quarter as long"
PADDING = 1 / 8  # positions of padding for each cached token
PROMPTED = "ours, after a prompt"
MOST_PROMPT = 8192  # tokens that every peer reads before its tokens are timed
MOST_ERROR = 1e-4  # of the largest logit; llama.cpp's GELU is off by 1e-5
MOST_PADDED = 32768  # cached tokens of two rows, three times over in memory
Filling = Sequence[tuple[Tensor, ...]]
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
    cached keys and values, fp32, one sequence; logits are compared before anything is timed. Up to 32,768 tokens a batch of two
    sequences is measured besides: without padding, the same tokens behind an eighth of padding, and these where the mask shows
    only the last quarter of one. The metrics say how much longer padding takes.

    Up to 8,192 tokens ours also reads a prompt and is measured beside the peers that are installed (`model_peers.py`), which
    read the same; the metrics have the first token behind the prompt, and ours over each of them.

    Args:
        patch, alibi_cache: those of `alibi_attn.hf`, which this layer does not import.
    """
    peers = model_peers.installed(say)
    ways = ["ours", PATCHED, THEIRS, THEIRS_STATIC, ROWS, PADDED, UNEVEN, PROMPTED, *peers]
    asked: dict[str, records.Json] = {
        "lengths": list(lengths), "layers": layers, "heads": num_heads, "head_dim": head_dim, "dtype": "float32",
        "threads": torch.get_num_threads(), "ways": list(ways), "padding": PADDING,
    }  # fmt: skip
    records.expect_new(out, "benchmark", "generating/bloom", asked)
    started = datetime.datetime.now(datetime.UTC)
    torch.manual_seed(0)
    config = BloomConfig(hidden_size=num_heads * head_dim, n_layer=layers, n_head=num_heads, vocab_size=1000)
    plain, patched = BloomForCausalLM(config), BloomForCausalLM(config)
    for model in (plain, patched):
        model.train(False).requires_grad_(False)
    patched.load_state_dict(plain.state_dict())
    patch(patched)
    columns: Columns = {}
    metrics: dict[str, float | None] = {}
    for length in sorted(lengths):
        torch.manual_seed(1)
        filling = [tuple(torch.randn(1, num_heads, length, head_dim) for _ in range(2)) for _ in range(layers)]
        with torch.no_grad():
            taken = _one_row(plain, patched, alibi_cache, filling, repeats=repeats)
            if length <= MOST_PADDED:
                taken |= _two_rows(patched, alibi_cache, filling, repeats=repeats)
                metrics[f"padding_costs_{length}"] = taken[PADDED] / taken[ROWS]
            if length <= MOST_PROMPT:
                prompted, metrics[f"first_token_ms_{length}"] = _after_a_prompt(
                    patched, alibi_cache, peers, length, repeats=repeats, say=say
                )
                metrics |= {
                    f"token_over_{name}_{length}": prompted[PROMPTED] / prompted[name]
                    for name in peers
                    if name in prompted
                }
                taken |= prompted
        for name, milliseconds in taken.items():
            append(columns, name, {"length": length, "forward_ms": milliseconds})
        ours = taken["ours"]
        said = ", ".join(f"{name} {ms:.1f} ms ({ms / ours:.1f}×)" for name, ms in taken.items())
        say(f"{length:>7} cached tokens: {said}")
    made = records.make("benchmark", "generating/bloom", config=asked, metrics=metrics, curves=columns, started=started)
    return records.save(made, out)


def _one_row(
    plain: BloomForCausalLM, patched: nn.Module, alibi_cache: Callable[[], Cache], filling: Filling, *, repeats: int
) -> dict[str, float]:
    """The milliseconds of a token in every way; `filling` is what is cached, keys and values [1, H, S, D] of every layer."""
    length = filling[0][0].shape[2]
    room = StaticCache(config=plain.config, max_cache_len=length + repeats + SPARE)
    caches = {"ours": alibi_cache(), PATCHED: DynamicCache(), THEIRS: DynamicCache(), THEIRS_STATIC: room}
    calls: dict[str, Callable[[], Tensor]] = {}
    for name, cache in caches.items():
        for layer, (key, value) in enumerate(filling):
            cache.update(key, value, layer)
        calls[name] = _step(plain if name in (THEIRS, THEIRS_STATIC) else patched, cache, torch.tensor([[7]]))
    logits = {name: call() for name, call in calls.items()}
    for name, found in logits.items():
        _expect(name, found, logits[THEIRS], length)
    return medians_ms(calls, repeats=repeats, budget_s=60.0)


def _two_rows(
    model: nn.Module, alibi_cache: Callable[[], Cache], filling: Filling, *, repeats: int
) -> dict[str, float]:
    """The milliseconds of a token in each of two rows, the second with the heads of the first in another order."""
    length = filling[0][0].shape[2]
    padding = max(int(length * PADDING), 1)
    plain, padded, token = alibi_cache(), alibi_cache(), torch.tensor([[7], [8]])
    for layer, parts in enumerate(filling):
        rows = [torch.cat([x, x.flip(1)]) for x in parts]
        plain.update(rows[0], rows[1], layer)
        behind = [nn.functional.pad(x, (0, 0, padding, 0), value=9.0) for x in rows]
        padded.update(behind[0], behind[1], layer)
    at = torch.arange(padding + length + 1)
    starts = padding, padding + length - length // 4
    calls = {
        ROWS: _step(model, plain, token),
        PADDED: _step(model, padded, token, torch.stack([at >= padding] * 2).long()),
        UNEVEN: _step(model, padded, token, torch.stack([at >= start for start in starts]).long()),
    }
    true = calls[ROWS]()
    _expect(PADDED, calls[PADDED](), true, length)
    _expect(UNEVEN, calls[UNEVEN]()[:1], true[:1], length)
    return medians_ms(calls, repeats=repeats, budget_s=60.0)


def _after_a_prompt(
    model: BloomForCausalLM,
    alibi_cache: Callable[[], Cache],
    peers: Sequence[str],
    length: int,
    *,
    repeats: int,
    say: Callable[[str], None],
) -> tuple[dict[str, float], float]:
    """(milliseconds of a token behind a prompt of so many, of ours and of every peer; of the first one of ours)."""
    tokens = torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(length))
    last, cache, listed = tokens[:, -1:], alibi_cache(), tokens[0].tolist()
    model(tokens, past_key_values=cache, logits_to_keep=1)

    def ours() -> float:
        start = time.perf_counter()
        model(last, past_key_values=cache)
        taken = time.perf_counter() - start
        cache.crop(-1)
        return taken

    first = ours()
    true = model(last, past_key_values=cache).logits[0, -1]
    cache.crop(-1)
    calls: dict[str, Callable[[], float]] = {PROMPTED: ours}
    with contextlib.ExitStack() as open_peers:
        for name in peers:
            peer = open_peers.enter_context(
                model_peers.opened(name, model, room=length + SPARE * repeats, threads=torch.get_num_threads())
            )
            error = _error(torch.from_numpy(peer.logits([*listed, listed[-1]])), true)
            if error < MOST_ERROR:
                calls[name] = peer.token(listed)
            else:
                say(f"{name} is off by {error:.1e} of the largest logit at {length} tokens, so its time says nothing")
        spent: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(repeats + 1):  # the first is to warm up
            for name, call in calls.items():
                seconds = call()
                if turn:
                    spent[name].append(seconds)
    return {name: statistics.median(seconds) * 1e3 for name, seconds in spent.items()}, first * 1e3


def _expect(name: str, found: Tensor, true: Tensor, length: int) -> None:
    error = _error(found, true)
    if not error < MOST_ERROR:
        raise RuntimeError(f"{name} is off by {error:.1e} of the largest logit at {length} tokens")


def _error(found: Tensor, true: Tensor) -> float:
    return float((found - true).abs().max() / true.abs().max())


def _step(model: nn.Module, cache: Cache, token: Tensor, mask: Tensor | None = None) -> Callable[[], Tensor]:
    """One token a row, which the cache then forgets again; a StaticCache, which cannot, has room for all of them."""

    def call() -> Tensor:
        logits: Tensor = model(token, attention_mask=mask, past_key_values=cache).logits
        if not isinstance(cache, StaticCache):
            cache.crop(-1)
        return logits

    return call
