"""Whether steps can be captured in a CUDA graph, as far as that shows without a device; a standalone program, which prints JSON.

    python tests/support/interpreter/replayable.py

A graph replays the launches that were captured. So a step must launch the same kernels with the same numbers whatever its tensors
hold, and the host must not read a tensor.
"""

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

sys.path.extend(map(str, Path(__file__).parents[1].iterdir()))  # the folders next to this one, as pytest's pythonpath

import torch
from torch import Tensor

from alibi_attn import alibi_attention, forgetting_attention, toeplitz_attention
from alibi_attn.attention.backends.fused import recording, split_keys
from alibi_attn.nn import ALiBiAttention, KVCache
from alibi_lab.measure.absent_device import Launch, absent_device

ADDRESSES = 2**32  # larger numbers are addresses, which are fixed by the graph's own memory
STEP = "append_kernel", "decode_kernel", "merge_kernel"
LONG_STEP = "append_kernel", "norms_kernel", "reach_kernel", "decode_kernel", "merge_kernel"
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


def launched(step: Callable[[], object], launches: list[Launch]) -> list[tuple[object, ...]]:
    """The launches of a step, without addresses; raises if the host reads a tensor."""
    step()
    launches.clear()
    with nothing_read():
        step()
    return [(launch.kernel, launch.grid, numbers(launch.arguments)) for launch in launches]


def numbers(arguments: tuple[object, ...]) -> list[object]:
    flat = [numbers(x) if isinstance(x, tuple) else x for x in arguments]
    return ["address" if isinstance(x, int) and x >= ADDRESSES else x for x in flat]


@contextlib.contextmanager
def nothing_read() -> Iterator[None]:
    def refuse(*_: object) -> None:
        raise AssertionError("the host reads a tensor")

    with contextlib.ExitStack() as stack:
        for name in READS:
            stack.enter_context(mock.patch.object(Tensor, name, refuse))
        yield


def main() -> dict[str, bool]:
    """For each kind of step, whether other values leave its launches as they are."""
    found = {}
    query, key, value = (torch.randn(2, 4, 256, 16).to(torch.bfloat16).requires_grad_() for _ in range(3))
    shown, gates = torch.ones(2, 256, dtype=torch.bool), torch.full((2, 4, 256), -0.1).requires_grad_()
    table = torch.randn(4, 511).requires_grad_()
    position, one = torch.tensor(3), query[:, :, :1].detach()

    def training() -> object:
        output = alibi_attention(query, key, value)
        return torch.autograd.grad(output, [query, key, value], output)

    def encoder() -> object:
        with torch.no_grad():
            return alibi_attention(query, key, value, causal=False, key_mask=shown)

    def gated() -> object:
        output = forgetting_attention(query, key, value, gates)
        return torch.autograd.grad(output, [query, key, value, gates], output)

    def of_table() -> object:
        output = toeplitz_attention(query, key, value, table, causal=False, key_mask=shown)
        return torch.autograd.grad(output, [query, key, value, table], output)

    def decoding() -> object:
        with torch.no_grad():
            return alibi_attention(one, key, value, query_offset=position)

    layer = ALiBiAttention(64, 4, qk_norm=True, slopes=[4.0, 3.0, 2.0, 1.0]).to(torch.bfloat16).eval()
    token = torch.randn(2, 1, 64).to(torch.bfloat16)
    caches = {"capacity": KVCache(capacity=2048), "reach, capacity": layer.reach_cache(capacity=500)}

    def cached(cache: KVCache) -> object:
        with torch.no_grad():
            return layer(token, cache=cache)

    kinds = {"training": training, "encoder": encoder, "gates": gated, "table": of_table, "decoding": decoding}
    kinds |= {name: functools.partial(cached, cache) for name, cache in caches.items()}
    with absent_device() as launches:
        for name, step in kinds.items():
            before = launched(step, launches)
            if name == "capacity":
                assert [x.kernel for x in launches] == list(STEP)
                caches["capacity"].fixed.length.fill_(1000)
                # As for more keys.
                with mock.patch.object(split_keys, "WHOLE_BYTES", 0), mock.patch.dict(recording._KNOWN, clear=True):
                    launched(step, launches)
                assert [x.kernel for x in launches] == list(LONG_STEP)
                assert launches[1].grid == (8 * 4, 1, 1)  # the tiles near the query instead of all 32
            with torch.no_grad():
                query.mul_(3), key.mul_(2), table.mul_(2)
                shown[:, 100:], gates[:, :, 50] = False, -torch.inf
                position.fill_(200)
            found[name] = bool(before) and launched(step, launches) == before
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
