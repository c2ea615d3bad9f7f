"""The Triton kernels for tables of distances, interpreted: random calls, memory, visited tiles, torch.compile, T5.

All but two tests run in the process with the interpreter.
"""

import contextlib
import functools
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import conformance_on_device as device
import device_arithmetic
import pytest
import quick_interpreter
import toeplitz_calls
import torch
from torch import Tensor

from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.fused import launch, plan, space, table
from alibi_attn.attention.backends.fused.table import widths
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.operators.schema import Arguments
from alibi_attn.attention.toeplitz import toeplitz_attention

inside = pytest.mark.usefixtures("interpreter")
both = pytest.mark.parametrize("causal", [True, False])
# Causal and not, few queries, splits of keys, groups, windows, masks, segments, offsets on both sides of the keys, scales.
SEEDS = {"float32": range(24), "float16": range(24, 36), "bfloat16": range(36, 44)}
MANY = [pytest.param(x, marks=pytest.mark.long) for x in (range(50, 150), (True, False))]


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


@inside
@pytest.mark.parametrize("seeds", [None, *MANY], ids=["some", "many", "long"])
@pytest.mark.parametrize("dtype", SEEDS)
def test_random_calls_are_the_loop_over_pairs(dtype: str, seeds: Iterable[int | bool] | None) -> None:
    assert not wrong_calls(SEEDS[dtype] if seeds is None else seeds, dtype)


def test_the_check_on_a_device_runs(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(device.conform_table, 41, "float32", "cpu").result() <= 1


@inside
def test_a_shifted_table_is_detected() -> None:
    def shifted(*, table: Tensor, **given: Any) -> Any:
        return toeplitz_attention(**given, table=table.roll(1, dims=1))

    with mock.patch.object(toeplitz_calls, "toeplitz_attention", shifted):
        assert len(wrong_calls(range(3), "float32")) == 3


def inputs(t: int = 150, s: int = 150, *, causal: bool = True) -> list[Tensor]:
    """Query, key and value of grouped heads, and a table."""
    shapes = (1, 4, t, 16), (1, 2, s, 16), (1, 2, s, 16), (4, s if causal else 2 * s - 1)
    return [torch.randn(shape).requires_grad_() for shape in shapes]


@inside
@both
def test_split_keys_give_the_result_of_the_same_queries_among_many(causal: bool) -> None:
    query, key, value, numbers = (x[:, :1] if x.ndim == 4 else x[:1] for x in inputs(200, 900, causal=causal))
    call = functools.partial(toeplitz_attention, causal=causal, return_lse=True, backend="fused")
    grids, launched = [], table.launch

    def counted(device: torch.device, kernel: Any, grid: tuple[int, int, int], *rest: Any) -> None:
        grids.append(grid)
        launched(device, kernel, grid, *rest)

    with torch.no_grad():
        with mock.patch.object(table, "launch", counted):
            few = call(query[:, :, -3:], key, value, numbers)
        many = call(query, key, value, numbers)
    assert grids[0][1] == 4, "programs share the keys of a head"
    for x, y in zip(few, many, strict=True):
        torch.testing.assert_close(x, y[:, :, -3:], rtol=0, atol=1e-5)


@inside
@both
def test_no_tolerance_skips_a_key(causal: bool) -> None:
    """Slopes of 0 would skip the short keys."""
    query, key, value, numbers = (x.detach() for x in inputs(150, 300, causal=causal))
    key[:, :, :64] *= 1e-3
    numbers[:, -64:] += 30.0
    given = {"causal": causal, "backend": "fused"}
    found = [toeplitz_attention(10 * query, key, value, numbers, tolerance=x, **given) for x in (0.9, 0.0)]
    assert torch.equal(*found)


@inside
def test_memory_is_linear() -> None:
    """The numbers kept for backward, and the words of scratch memory, of twice the length."""
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
    for one, two in zip(*found, strict=True):
        assert 0 < two < 2.2 * one


@inside
def test_tiles_are_visited_where_masks_allow_pairs() -> None:
    query, key, value, numbers = inputs(300, 300, causal=False)
    documents = torch.arange(300)[None] // 100
    for options in ({"causal": False}, {"causal": True}, {"causal": False, "window": 9}, {"segment_ids": documents}):
        spec = make_spec(query, key, value, [0.0] * 4, tolerance=0.0, **options).changed(table=numbers)
        scores = fused.visits(spec, query, key, value).scores[0].tolist()
        assert len(set(scores)) == 1, "all heads alike"
        assert scores[0] == 300 * 300 if options == {"causal": False} else 0 < scores[0] < 0.75 * 300 * 300


@inside
def test_hidden_keys_are_never_used() -> None:
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


@inside
def test_the_largest_finite_numbers_are_right() -> None:
    """The scores of a causal row, from distance 0 on, are −3·10³⁸, 0, 1, −3·10³⁸ and 3·10³⁸."""
    most = torch.finfo(torch.float32).max
    numbers = torch.tensor([[-most, 0.0, 1.0, -most, most]])
    zeros, value = torch.zeros(1, 1, 5, 16), torch.eye(5, 16)[None, None]
    first, more, less = [1, 0, 0, 0, 0], torch.e / (1 + torch.e), 1 / (1 + torch.e)
    expected = torch.tensor([first, first, [more, less, 0, 0, 0], [0, more, less, 0, 0], first])
    weights = toeplitz_attention(zeros, zeros, value, numbers, backend="fused")[0, 0, :, :5]
    torch.testing.assert_close(weights, expected)


@inside
def test_compile_autocast_checkpointing_library_checks_and_torch_func() -> None:
    leaves = inputs(70, 70)

    def loss(*x: Tensor, backend: str = "fused") -> Tensor:
        output, lse = toeplitz_attention(*x, return_lse=True, backend=backend)
        return output.square().sum() + lse.sum()

    eager = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    again = torch.utils.checkpoint.checkpoint(loss, *leaves, use_reentrant=False)
    for other in (compiled(*leaves), again):
        assert all(torch.equal(a, b) for a, b in zip(eager, torch.autograd.grad(other, leaves), strict=True))
    spec = make_spec(*leaves[:3], [0.0] * 4, tolerance=0.0).changed(table=leaves[3])
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    forward = torch.ops.alibi_attn.fused_forward.default
    torch.library.opcheck(forward, tuple(Arguments.of(spec, *leaves[:3])), test_utils=tests)
    with torch.autocast("cpu", torch.float16):
        assert toeplitz_attention(*leaves, backend="fused").dtype == torch.float16
    with pytest.raises(ValueError, match=r"does not differentiate or map a table of distances in torch\.func"):
        torch.func.grad(loss)(*(x.detach() for x in leaves))


@inside
def test_a_patched_t5_runs_on_the_kernels() -> None:
    """Its logits, greedy tokens, and the gradient of its bias."""
    from transformers import T5Config, T5ForConditionalGeneration

    from alibi_attn.hf import patch

    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(**sizes, **ids, dropout_rate=0.0)).eval()
    texts, answers = torch.randint(2, 60, (2, 70)), torch.randint(2, 60, (2, 9))
    mask = torch.ones_like(texts)
    mask[1, 50:] = 0

    def results() -> list[Tensor]:
        model.zero_grad()
        logits = model(input_ids=texts, attention_mask=mask, decoder_input_ids=answers).logits
        logits.square().sum().backward()
        tokens = model.generate(texts, attention_mask=mask, max_new_tokens=4, do_sample=False)
        of_decoder = model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad
        return [logits.detach(), tokens.double(), of_decoder.clone()]

    before = results()
    with patch(model, "fused"):
        after = results()
    for x, y in zip(before, after, strict=True):
        assert float((x - y).abs().max()) < 1e-4 * float(x.abs().max().clamp(min=1.0))


def test_the_table_of_tiles_fits_the_plan() -> None:
    """A tile of keys divides TILE = 64, one of queries a block of the plan."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for head_dim in (1, 16, 64, 65, 128, 129, 256):
            found = widths(torch.empty(1, 1, 1, head_dim, dtype=dtype))
            assert {*found.rows, *found.keys, found.diagonal} <= {16, 32, 64}
