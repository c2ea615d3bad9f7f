"""Whether replayed calls launch what direct ones do; a standalone program, which prints JSON.

    python tests/support/interpreter/replayed_launches.py

The first call of a kind launches kernel by kernel, the second is recorded, and later ones replay it with their own addresses.
A CUDA graph replays the launches that were captured as well. So a step must launch the same kernels with the same numbers
whatever its tensors hold, and the host must not read a tensor.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

from alibi_attn import alibi_attention, forgetting_attention, toeplitz_attention
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.fused import recording, split_keys
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.run.decoding import attend_groups
from alibi_attn.inspect import decode_with_norms
from alibi_attn.nn import ALiBiAttention, KVCache
from alibi_lab.measure import host
from alibi_lab.measure.absent_device import Launch, absent_device
from alibi_lab.measure.decoding import layer_of

ADDRESSES = 2**32  # larger numbers are addresses
Call = Callable[..., Tensor]
STEP = ["append_kernel", "decode_kernel", "merge_kernel"]
LONG_STEP = ["append_kernel", "norms_kernel", "reach_kernel", *STEP[1:]]
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


def kinds() -> dict[str, tuple[Call, list[tuple[int, ...]]]]:
    """Each kind of call, and the shapes of its inputs."""
    rows, grouped = [(2, 4, 200, 16)] * 3, [(2, 4, 200, 16), (2, 2, 200, 16), (2, 2, 200, 16)]
    shown, segments = torch.ones(2, 200, dtype=torch.bool), torch.arange(400).view(2, 200) // 90
    return {
        "plain": (alibi_attention, rows),
        "one tensor": (lambda x: alibi_attention(x, x, x), rows[:1]),
        "lse": (lambda *x: torch.cat([y.float().flatten() for y in alibi_attention(*x, return_lse=True)]), rows),
        "groups, masked": (lambda *x: alibi_attention(*x, causal=False, key_mask=x[1][:, 0, :, 0] < 1.0), grouped),
        "segments, dropout": (
            functools.partial(alibi_attention, segment_ids=segments, dropout_p=0.5, window=70),
            grouped,
        ),
        "slopes": (lambda *x: alibi_attention(*x[:3], x[3].float()), [*rows, (4,)]),
        "wide heads": (alibi_attention, [(2, 4, 200, 64)] * 3),
        "few queries": (alibi_attention, [(2, 4, 3, 16), (2, 4, 500, 16), (2, 4, 500, 16)]),
        "table": (
            lambda *x: toeplitz_attention(*x[:3], x[3].float(), key_mask=shown, query_offset=0),
            [*grouped, (4, 200)],
        ),
        "gates": (lambda *x: forgetting_attention(*x[:3], -x[3].float().square()), [*rows, (2, 4, 200)]),
    }


def launched(step: Callable[[], object], inputs: list[Tensor], launches: list[Launch]) -> list[object]:
    """The launches of a step: numbers, which input an address lies in, and in which order other addresses occur."""
    alive, empty = [], torch.empty
    labels: dict[int, int] = {}

    def kept(*arguments: object, **options: object) -> Tensor:
        alive.append(empty(*arguments, **options))
        return alive[-1]

    def label(x: object) -> object:
        if isinstance(x, tuple):
            return [label(y) for y in x]
        if hasattr(x, "block_shape"):  # a descriptor
            return [label(x.base.data_ptr()), x.shape, x.strides, x.block_shape]
        if not isinstance(x, int) or x < ADDRESSES:
            return x
        for at, tensor in enumerate(inputs):
            if 0 <= x - tensor.data_ptr() < tensor.nbytes:
                return f"input {at} + {x - tensor.data_ptr()}"
        return f"address {labels.setdefault(x, len(labels))}"

    launches.clear()
    with mock.patch.object(torch, "empty", kept):
        step()
    return [(x.kernel, x.grid, label(x.arguments)) for x in launches]


@contextlib.contextmanager
def replays_counted() -> Iterator[list[int]]:
    """Inside, every replay of a recording adds a number to the list."""
    replay, replays = recording.Recording.replay, []

    def counted(*arguments: object) -> None:
        replays.append(1)
        replay(*arguments)

    with mock.patch.object(recording.Recording, "replay", counted):
        yield replays


@contextlib.contextmanager
def nothing_read() -> Iterator[None]:
    def refuse(*_: object) -> None:
        raise AssertionError("the host reads a tensor")

    with contextlib.ExitStack() as stack:
        for name in READS:
            stack.enter_context(mock.patch.object(Tensor, name, refuse))
        yield


def steps(call: Call, shapes: list[tuple[int, ...]]) -> Iterator[tuple[Callable[[], object], list[Tensor]]]:
    """Four times a forward and backward pass of other tensors, each of larger numbers; the second, which is recorded, reads its
    keys as values."""
    for number in range(4):
        inputs = [((number + 1) * torch.randn(shape)).to(torch.bfloat16).requires_grad_() for shape in shapes]
        if number == 1 and len(inputs) >= 3:
            inputs[2] = inputs[1]

        def step(inputs: list[Tensor] = inputs) -> object:
            output = call(*inputs)
            return torch.autograd.grad(output, inputs, torch.ones_like(output))

        yield step, inputs


def decoding() -> Iterator[tuple[Callable[[], object], list[Tensor]]]:
    """Four decoding steps with remembered norms."""
    for _ in range(4):
        query, key, value = (torch.randn(1, 4, n, 16).to(torch.bfloat16) for n in (1, 700, 700))
        norms, slopes = Norms.of(key, value), torch.rand(4)

        def step(arguments: tuple[object, ...] = (query, key, value, slopes, norms)) -> object:
            with torch.no_grad():
                return decode_with_norms(*arguments)

        yield step, [query, key, value, slopes, norms.keys, norms.values]


def growing(call: Call, launches: list[Launch], *, queries: int = 1) -> tuple[bool, bool]:
    """(whether steps with a growing cache launch what they launch unrecorded, whether all but two for each tile are replayed).

    The cache grows token by token, and has five tiles first and eight at last.
    """
    first, last, alike, prepared = 320, 450, [], 0
    keys, values, query = (torch.randn(2, 4, n, 16).to(torch.bfloat16) for n in (512, 512, queries))
    slopes, known = torch.rand(4), dict[object, object]()
    for length in range(first, last):
        key, value = keys[:, :, :length], values[:, :, :length]
        norms = Norms.of(key[:, :, :-1], value[:, :, :-1])
        inputs = [query, keys, values, slopes, norms.keys, norms.values]
        step = functools.partial(call, query, key, value, slopes, norms)
        with mock.patch.object(recording, "_KNOWN", known), replays_counted() as replays:
            replayed = launched(step, inputs, launches)
        with mock.patch.object(recording, "_KNOWN", {}):
            alike.append(replayed == launched(step, inputs, launches))
        prepared += not replays
    return all(alike), prepared == 1 + 2 + 2 + 1


def grouped(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, norms: Norms) -> Tensor:
    """Heads in three groups, one of which keeps the last keys only."""
    some = [(key[:, :2], value[:, :2]), (key[:, 2:3, -70:], value[:, 2:3, -70:]), (key[:, 3:], value[:, 3:])]
    return attend_groups(query, some, slopes, ((0, 2), (2, 3), (3, 4)), windows=(400,) * 3)


def replayed_steps() -> dict[str, list[bool]]:
    """For caches of a layer, whether of 64 tokens all but the first two of a tile, and the one that completes it, are replayed.

    A cache within reach needs no norms, so nothing happens when a tile is whole.
    """
    found, heads = {}, torch.randn(1, host.HEADS, 1, host.HEAD_DIM).to(torch.bfloat16)
    layer, x = layer_of(heads, heads, heads), heads.transpose(1, 2).flatten(2)
    caches = {"KVCache": (KVCache(), 61), "reach": (layer.reach_cache(score_bound=20.0, tolerance=1e-4), 62)}
    for name, (cache, most) in caches.items():
        prompt = heads.expand(-1, -1, 2048, -1)
        with torch.no_grad():
            cache.append(prompt, prompt)
        step = host.forward_pass(functools.partial(layer, cache=cache), [x])
        for _ in range(64):
            step()
        with replays_counted() as replays:
            for _ in range(64):
                step()
        found[name] = [len(replays) == most]
    return found


def at_positions() -> tuple[dict[str, Callable[[], object]], Tensor, KVCache]:
    """Steps at a position that a tensor holds, that tensor, and the cache of a step."""
    query, key, value = torch.randn(3, 2, 4, 256, 16).to(torch.bfloat16)
    position = torch.tensor(3)
    layer = ALiBiAttention(64, 4, qk_norm=True, slopes=[4.0, 3.0, 2.0, 1.0]).to(torch.bfloat16).eval()
    token = torch.randn(2, 1, 64).to(torch.bfloat16)
    caches = {"capacity": KVCache(capacity=2048), "reach, capacity": layer.reach_cache(capacity=500)}
    kinds = {"position": functools.partial(alibi_attention, query[:, :, :1], key, value, query_offset=position)}
    kinds |= {name: functools.partial(layer, token, cache=cache) for name, cache in caches.items()}
    return kinds, position, caches["capacity"]


def captured(
    kinds: dict[str, Callable[[], object]], position: Tensor, cache: KVCache, launches: list[Launch]
) -> dict[str, list[bool]]:
    """For each kind of step, whether another position leaves its launches as they are."""
    found = {}
    for name, step in kinds.items():
        launched(step, [], launches)
        with nothing_read():
            before = launched(step, [], launches)
        if name == "capacity":
            assert [x.kernel for x in launches] == STEP
            cache.fixed.length.fill_(1000)
            # As for more keys.
            with mock.patch.object(split_keys, "WHOLE_BYTES", 0), mock.patch.dict(recording._KNOWN, clear=True):
                launched(step, [], launches)
            assert [x.kernel for x in launches] == LONG_STEP
            assert launches[1].grid == (8 * 4, 1, 1)  # the tiles near the query instead of all 32
        position.fill_(200)
        with nothing_read():
            found[name] = [bool(before), launched(step, [], launches) == before]
    return found


def differing(launches: list[Launch]) -> dict[str, bool]:
    """For each option, whether a call with another value launches something else than the calls before it."""
    query, key, value = inputs = [torch.randn(1, 2, 200, 16).to(torch.bfloat16) for _ in range(3)]
    offset = torch.tensor(1)
    others = {"scale": 0.5, "window": 80, "query_offset": 7, "tolerance": 1e-3, "dropout_p": 0.25, "causal": False}
    before = {"scale": 0.25, "window": 70, "query_offset": 6, "tolerance": 1e-4, "dropout_p": 0.5, "causal": True}
    found = {}
    with torch.no_grad():
        for name, other in {**others, "query_offset ": offset}.items():
            options = {name: x for name, x in before.items() if name != "causal"}
            calls = [functools.partial(alibi_attention, query, key, value, **options) for _ in range(3)]
            changed = functools.partial(alibi_attention, query, key, value, **{**options, name.strip(): other})
            *_, last, another = (launched(step, inputs, launches) for step in (*calls, changed))
            found[name] = last != another
    return found


def main() -> dict[str, list[bool]]:
    """For each kind of call: whether it was replayed in the end, and whether it then launched the same as at first."""
    found, positioned = {}, at_positions()
    with absent_device() as launches:
        every = {name: steps(call, shapes) for name, (call, shapes) in kinds().items()}
        for name, calls in {**every, "decoding": decoding()}.items():
            with replays_counted() as replays:
                (step, inputs), *others = calls
                first = launched(step, inputs, launches)
                with nothing_read():
                    *_, last = (launched(step, inputs, launches) for step, inputs in others)
            found[name] = [bool(replays), first == last]
        with torch.no_grad():
            found |= captured(*positioned, launches)
            found["growing, norms"] = list(growing(decode_with_norms, launches))
            found["growing"] = list(growing(lambda *x: alibi_attention(*x[:4], window=300), launches))
            found["growing, queries"] = list(growing(lambda *x: alibi_attention(*x[:4]), launches, queries=3))
            found["growing, groups"] = list(growing(grouped, launches))
            found["growing, norms, queries"] = list(growing(decode_with_norms, launches, queries=8))
        found |= replayed_steps()
        with mock.patch.object(fused, "WHOLE_KEYS", 0):  # so that the tolerance is used
            found["options"] = list(differing(launches).values())
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
