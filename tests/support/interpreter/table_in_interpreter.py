"""Our Triton kernels for tables of distances; runs in the process that interprets, see `fused_in_interpreter.py`."""

import contextlib
import functools
from collections.abc import Iterable
from typing import Any
from unittest import mock

import device_arithmetic
import pytest
import quick_interpreter
import toeplitz_calls
import torch
from torch import Tensor

from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.fused import launch, plan, space, table
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.operators.schema import Arguments
from alibi_attn.attention.run import dispatch
from alibi_attn.attention.toeplitz import toeplitz_attention


def wrong_calls(seeds: Iterable[int | bool], dtype: str) -> list[str]:
    """What is wrong with the calls of these seeds, in one dtype; bf16 with a GPU's arithmetic."""
    found = []
    for seed in seeds:
        emulated = device_arithmetic.of_a_device("random") if dtype == "bfloat16" else contextlib.nullcontext()
        quick_interpreter.check_overflow(on=dtype == "float32")
        try:
            with emulated:
                toeplitz_calls.check(toeplitz_calls.seeded(seed, dtype), "fused")
        except AssertionError as error:
            found.append(f"{seed}: {error}")
        finally:
            quick_interpreter.check_overflow(on=False)
    return found


def wrong_calls_of_a_shifted_table(seeds: range) -> int:
    """How many calls are wrong if each table is off by one distance."""

    def shifted(*, table: Tensor, **given: Any) -> Any:
        return toeplitz_attention(**given, table=table.roll(1, dims=1))

    with mock.patch.object(toeplitz_calls, "toeplitz_attention", shifted):
        return len(wrong_calls(seeds, "float32"))


def inputs(t: int = 150, s: int = 150, *, causal: bool = True) -> list[Tensor]:
    """Query, key and value of grouped heads, and a table."""
    shapes = (1, 4, t, 16), (1, 2, s, 16), (1, 2, s, 16), (4, s if causal else 2 * s - 1)
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def same_with_any_tolerance(*, causal: bool) -> bool:
    """Whether a call without gradients is the same for a large tolerance, where slopes of 0 would skip the short keys."""
    query, key, value, table = (x.detach() for x in inputs(150, 300, causal=causal))
    key[:, :, :64] *= 1e-3
    table[:, -64:] += 30.0
    given = (10 * query, key, value, table)
    found = [
        toeplitz_attention(*given, causal=causal, tolerance=tolerance, backend="fused") for tolerance in (0.9, 0.0)
    ]
    return torch.equal(*found)


def memory() -> list[tuple[int, int]]:
    """For two lengths, the second twice the first: (numbers kept for backward, words of scratch memory)."""
    found = []
    for tokens in (128, 256):
        leaves, kept, words = inputs(tokens, tokens, causal=False), [], []

        def counted(size: int | tuple[int, int], *rest: Any, words: list[int] = words) -> Tensor:
            tensor = launch.scratch(size, *rest)
            words.append(tensor.numel())
            return tensor

        def packed(x: Tensor, kept: list[int] = kept) -> Tensor:
            kept.append(x.numel())
            return x

        with contextlib.ExitStack() as stack:
            for module in (fused, plan, space):
                stack.enter_context(mock.patch.object(module, "scratch", counted))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(packed, lambda x: x))
            toeplitz_attention(*leaves, causal=False, backend="fused").sum().backward()
        found.append((sum(kept), sum(words)))
    return found


def visited() -> list[list[int]]:
    """The scores that each head computes of 300 queries and keys: all, causal, with a window, and of three documents."""
    query, key, value, numbers = inputs(300, 300, causal=False)
    documents = torch.arange(300)[None] // 100
    found = []
    for options in ({"causal": False}, {"causal": True}, {"causal": False, "window": 9}, {"segment_ids": documents}):
        spec = make_spec(query, key, value, [0.0] * 4, tolerance=0.0, **options).changed(table=numbers)
        visits = dispatch.BACKENDS["fused"].visits(spec, query, key, value)
        assert visits is not None
        found.append(visits.scores[0].tolist())
    return found


def error_of_split_keys(causal: bool) -> tuple[int, float]:
    """(programs that share the keys of a head, largest difference from the same queries among many)."""
    query, key, value, numbers = (x[:, :1] if x.ndim == 4 else x[:1] for x in inputs(200, 900, causal=causal))
    call = functools.partial(toeplitz_attention, causal=causal, return_lse=True, backend="fused")
    grids, launched = [], table.launch

    def counted(device: torch.device, kernel: Any, grid: tuple[int, int, int], *rest: Any) -> None:
        grids.append(grid)
        launched(device, kernel, grid, *rest)

    with mock.patch.object(table, "launch", counted), torch.no_grad():
        few = call(query[:, :, -3:], key, value, numbers)
    with torch.no_grad():
        many = call(query, key, value, numbers)
    return grids[0][1], max(float((x - y[:, :, -3:]).abs().max()) for x, y in zip(few, many, strict=True))


def hidden_keys_are_never_used() -> None:
    """NaN and inf in masked keys and values, and NaN in a query that sees nothing, change no output and no gradient."""
    leaves = inputs(100, 100)
    mask = torch.ones(1, 100, dtype=torch.bool)
    mask[:, :3], mask[:, 40:47] = False, False
    hurt = [x.detach().clone() for x in leaves]
    hurt[0][:, :, 1] = torch.nan
    hurt[1][:, :, 41], hurt[2][:, :, 42], hurt[2][:, :, 2] = torch.nan, torch.inf, torch.nan
    found = []
    for tensors in (leaves, [x.requires_grad_() for x in hurt]):
        output = toeplitz_attention(*tensors, key_mask=mask, backend="fused")
        found.append((output, *torch.autograd.grad(output.sum(), tensors)))
    for name, clean, spoiled in zip(("output", *toeplitz_calls.INPUTS), *found, strict=True):
        assert torch.equal(clean, spoiled), name
    assert float(found[0][0][:, :, :3].detach().abs().max()) == 0.0
    with torch.no_grad():
        seeing = toeplitz_attention(*hurt, backend="fused")
    assert bool(seeing[:, :, 42:].isnan().all()), "a query that sees NaN must say so"


def errors_of_t5() -> dict[str, float]:
    """Relative errors of a patched T5 on these kernels: logits, greedy tokens, and the gradient of its bias."""
    from transformers import T5Config, T5ForConditionalGeneration

    from alibi_attn.hf import patch

    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(**sizes, **ids, dropout_rate=0.0)).eval()
    texts, answers = torch.randint(2, 60, (2, 70)), torch.randint(2, 60, (2, 9))
    mask = torch.ones_like(texts)
    mask[1, 50:] = 0

    def results() -> dict[str, Tensor]:
        model.zero_grad()
        logits = model(input_ids=texts, attention_mask=mask, decoder_input_ids=answers).logits
        logits.square().sum().backward()
        tokens = model.generate(texts, attention_mask=mask, max_new_tokens=4, do_sample=False)
        found = {"logits": logits.detach(), "tokens": tokens.double()}
        for name, weights in model.named_parameters():
            if "relative_attention_bias" in name:
                found[f"gradient of {name.split('.')[-2]}"] = weights.grad.clone()
        return found

    before = results()
    with patch(model, "fused"):
        after = results()
    return {name: float((x - after[name]).abs().max() / x.abs().max()) for name, x in before.items()}


def compiled_and_transformed() -> None:
    """Checks torch's own tests of operators, torch.compile(fullgraph=True), autocast, and what torch.func gets."""
    leaves = inputs(70, 70)

    def loss(*x: Tensor, backend: str = "fused") -> Tensor:
        output, lse = toeplitz_attention(*x, return_lse=True, backend=backend)
        return output.square().sum() + lse.sum()

    eager = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(eager, torch.autograd.grad(compiled(*leaves), leaves), strict=True))
    again = torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(eager, torch.autograd.grad(again, leaves), strict=True))
    spec = make_spec(*leaves[:3], [0.0] * 4, tolerance=0.0).changed(table=leaves[3])
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    forward = torch.ops.alibi_attn.fused_forward.default
    torch.library.opcheck(forward, tuple(Arguments.of(spec, *leaves[:3])), test_utils=tests)
    with torch.autocast("cpu", torch.float16):
        assert toeplitz_attention(*leaves, backend="fused").dtype == torch.float16
    with pytest.raises(ValueError, match=r"does not differentiate or map a table of distances in torch\.func"):
        torch.func.grad(loss)(*(x.detach() for x in leaves))


def huge_numbers() -> list[list[float]]:
    """The weights of queries if a table has the largest finite numbers of fp32, in causal attention over 5 keys."""
    most = torch.finfo(torch.float32).max
    numbers = torch.tensor([[-most, 0.0, 1.0, -most, most]])
    zeros = torch.zeros(1, 1, 5, 16)
    value = torch.eye(5, 16)[None, None]
    return toeplitz_attention(zeros, zeros, value, numbers, backend="fused")[0, 0, :, :5].tolist()
