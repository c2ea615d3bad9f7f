"""A device of torch that no backend was made for and that has no fp64, like `mps`; its numbers are kept and computed on the CPU.

    python tests/support/processes/another_device.py [all]

Compares attention on it with the definition, and what surrounds it with the CPU; prints the number of comparisons.
It runs in a process of its own, because torch registers one such device per process and cannot remove it.
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.extend(map(str, Path(__file__).parents[1].iterdir()))  # the folders next to this one, as pytest's pythonpath

import torch
from attention_cases import CASES, KEY_BIASES
from attention_checks import answer, assert_exact
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

import alibi_attn
from alibi_attn import alibi_attention
from alibi_attn.attention.call import bias
from alibi_attn.nn import ALiBiAttention, KVCache, by_gates, within_reach

NAME = "another"
DEVICE = f"{NAME}:0"
FACTORIES = (
    "arange",
    "arange.start",
    "arange.start_step",
    "empty.memory_format",
    "empty_strided",
    "full",
    "ones",
    "zeros",
)
aten = torch.ops.aten


class OnDevice(Tensor):
    """A tensor of the device; `memory` holds its numbers, on the CPU."""

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor) -> "OnDevice":
        if memory.dtype == torch.float64:
            raise TypeError(f"{NAME} has no float64")
        sizes = {"strides": memory.stride(), "storage_offset": memory.storage_offset(), "dtype": memory.dtype}
        made = Tensor._make_wrapper_subclass(cls, memory.shape, device=DEVICE, **sizes)
        made.memory = memory
        return made

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = "cpu"
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        others = [x for x in tensors if not isinstance(x, OnDevice) and x.ndim]
        if others and op is not aten.copy_.default:
            raise RuntimeError(f"{op}: tensors are on {DEVICE} and on the CPU")
        changed = {id(x.memory): x for x in tensors if isinstance(x, OnDevice)}  # results of operators in place
        arguments, keywords = tree_map_only(OnDevice, lambda x: x.memory, (args, kwargs))
        result = op(*arguments, **keywords)
        if device is not None and torch.device(device).type != NAME:
            return result
        return tree_map_only(Tensor, lambda x: changed.get(id(x)) if id(x) in changed else OnDevice(x), result)


class Module(_DummyBackendModule):
    """What torch.autocast reads; there is nothing to cast to."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def register() -> torch.library.Library:
    """Makes torch know the device; keep the result."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    library = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        packet, _, overload = name.partition(".")
        library.impl(name, _factory(getattr(getattr(aten, packet), overload or "default")), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    bias.WITHOUT_FP64 = frozenset({NAME})
    return library


def _factory(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args, device=None, pin_memory=None, **options):
        return OnDevice(op(*args, device="cpu", **options))

    return made


def _copy_from(source: Tensor, target: OnDevice, non_blocking: bool = False) -> OnDevice:
    target.memory.copy_(source.memory if isinstance(source, OnDevice) else source)
    return target


def assert_same(call: Callable[..., Tensor], *tensors: Tensor) -> None:
    """Outputs and gradients of the call are those on the CPU, with the same backend."""
    results = []
    for device in ("cpu", DEVICE):
        args = [x.to(device).requires_grad_(x.is_floating_point()) for x in (y.clone() for y in tensors)]
        output = call(*args)
        assert output.device.type == torch.device(device).type
        wanted = [x for x in args if x.requires_grad]
        results.append([x.detach().cpu() for x in (output, *torch.autograd.grad(output.square().sum(), wanted))])
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there, here, atol=1e-5, rtol=1e-5)


def check_functions() -> int:
    """The public functions."""
    query, key, value = torch.randn(2, 4, 40, 16), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)
    gates, slopes, dense = logsigmoid(torch.randn(2, 4, 40)), torch.rand(4), {"backend": "dense"}
    cut = gates.clone()
    cut[:, :, 7] = -torch.inf

    def dropout(*args: Tensor) -> Tensor:
        torch.manual_seed(3)
        return alibi_attention(*args, dropout_p=0.3, **dense)

    forgetting, packed = alibi_attn.forgetting_attention, [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    calls: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (
            lambda *args: alibi_attention(*args[:4], sink_logits=args[4], **dense),
            (query, key, value, slopes, torch.randn(4)),
        ),
        (dropout, (query, key, value)),
        (lambda *args: forgetting(*args, **dense), (query, key, value, gates)),
        (lambda *args: forgetting(*args, **dense), (query, key, value, gates, slopes)),
        (lambda *args: forgetting(*args, **dense), (query, key, value, cut)),
        (lambda *args: alibi_attn.alibi_attention_varlen(*args, **dense), (*packed, torch.tensor([0, 10, 80]))),
        (lambda *args: alibi_attn.toeplitz_attention(*args, **dense), (query, key, value, torch.randn(4, 79))),
    ]
    for call, tensors in calls:
        assert_same(call, *tensors)
    there = [x.to(DEVICE) for x in (query, key, value)]
    assert "dense      runs (picked by auto)" in str(alibi_attn.explain(*there))
    assert alibi_attn.head_reach(*there[:2]).device.type == NAME
    return len(calls) + 2


def check_layers() -> int:
    """A layer's outputs, in one pass and with each of its caches in three."""
    kinds: list[tuple[dict[str, bool], Callable[[ALiBiAttention], object]]] = [
        ({}, lambda layer: KVCache()),
        ({"forget_gate": True}, lambda layer: KVCache()),
        ({"qk_norm": True}, lambda layer: KVCache(retention=within_reach(layer.static_reach(), **bounds(layer)))),
        (
            {"qk_norm": True, "forget_gate": True},
            lambda layer: KVCache(retention=by_gates(layer.slopes.values.cpu(), num_kv_heads=4, **bounds(layer))),
        ),
    ]
    x = torch.randn(2, 300, 64)
    for options, cache_of in kinds:
        layer = ALiBiAttention(64, 4, **options).eval()
        there = copy.deepcopy(layer).to(DEVICE)
        with torch.no_grad():
            whole, cache = layer(x), cache_of(there)
            parts = [
                there(x[:, start:stop].to(DEVICE), cache=cache) for start, stop in ((0, 200), (200, 201), (201, 300))
            ]
            torch.testing.assert_close(there(x.to(DEVICE)).cpu(), whole, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.cat(parts, 1).cpu(), whole, atol=1e-5, rtol=1e-5)
    return len(kinds)


def bounds(layer: ALiBiAttention) -> dict[str, float]:
    return {"score_bound": layer.score_bound(), "tolerance": 1e-7}


def main() -> None:
    library = register()
    every = "all" in sys.argv[1:]
    cases = (*CASES, *KEY_BIASES)[:: 1 if every else 5]
    dtypes = (torch.float32, torch.bfloat16) if every else (torch.float32,)
    for dtype in dtypes:
        for case in cases:
            assert_exact(case, dtype, answer(case, dtype, device=DEVICE))
    torch.manual_seed(0)
    print(len(dtypes) * len(cases) + check_functions() + check_layers())
    del library


if __name__ == "__main__":
    main()
