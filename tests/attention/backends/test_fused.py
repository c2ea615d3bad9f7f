"""The Triton kernels, interpreted: all cases, exactly the certified tiles, autograd and torch.compile."""

import contextlib
import dataclasses
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import conformance_on_device as device
import device_arithmetic
import differential_fuzz
import far_in_interpreter as far
import fused_in_interpreter as inside
import numpy as np
import plan_in_interpreter as plans
import pytest
import torch
from attention_cases import CASES, INSIDE, KEY_BIASES, ONE_FAR_KEY, SHORT_INSIDE, Case
from attention_checks import assert_exact, assert_one_far_key
from attention_oracle import Answer

from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.fused import configs
from alibi_attn.attention.backends.fused.configs import PLAN_ROWS, tile_shape
from alibi_attn.attention.backends.fused.launch import MAX_ROW_STRIDE, in_rows
from alibi_attn.attention.backends.fused.plan import How
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.bounds import bounds
from alibi_attn.attention.certificate.constants import TILE
from alibi_attn.attention.certificate.tiles import key_tiles
from alibi_lab import records
from alibi_lab.measure.attention import attention
from alibi_lab.report.sections.benchmark import is_drawn

interpreted = pytest.mark.usefixtures("interpreter")
LONG = Case("long", batch=1, heads=2, query_len=333, key_len=333, slopes="steep")
SINK = dataclasses.replace(LONG, name="sink", sink=200.0)
CHUNK = Case("chunk", batch=1, heads=4, kv_heads=2, query_len=70, key_len=400, slopes="steep", offset=300)
BOTH = Case("both sides", batch=1, heads=2, query_len=260, key_len=260, slopes="steep", causal=False)
DECODE = Case("decode", batch=2, heads=4, kv_heads=2, query_len=3, key_len=700, slopes="steep", head_dim=16)
DECODE_SINK = dataclasses.replace(DECODE, name="decode with a sink", sink=200.0)
SOME = tuple(
    case
    for case in (*CASES, *INSIDE)
    if case.name
    in {
        "grouped-query",
        "one query",
        "right slopes a batch",
        "NaN in masked keys, inf in their values",
        "everything",
        "steep, long, sink, peaked",
        "inside, window",
        "inside, packed segments",
    }
)


@pytest.mark.parametrize("case", ONE_FAR_KEY, ids=str)
def test_one_far_key_gives_the_slope_no_gradient_but_through_lse(interpreter: ProcessPoolExecutor, case: Case) -> None:
    assert_one_far_key(case, _answer(interpreter, case, "float32"))


# fp16 and bf16 run the cases of SOME, too. Of long cases with a key bias one is enough in the short list.
LATER = {case.name for case in (*CASES, *SHORT_INSIDE)[1::2]}
LATER |= {case.name for case in KEY_BIASES if "long" in case.name and "rising" not in case.name}
FP32 = [
    pytest.param(case, id=str(case), marks=pytest.mark.long if case.name in LATER else ())
    for case in (*CASES, *SHORT_INSIDE, *KEY_BIASES)
]


@pytest.mark.parametrize("case", FP32)
def test_fp32_equals_the_definition(interpreter: ProcessPoolExecutor, case: Case) -> None:
    assert_exact(case, torch.float32, _answer(interpreter, case, "float32"), tolerance=2.0**-28)


@interpreted
def test_an_integer_overflow_is_detected() -> None:
    """The overflow check runs in all fp32 comparisons with the definition."""
    from wrong_kernels import product

    assert product(2**15, -(2**16)) == -(2**31)
    with pytest.raises(Exception, match="mul of int32 gives 2147483648 to 2147483648"):
        product(2**15, 2**16)


@interpreted
def test_a_tuple_with_none_is_detected() -> None:
    """This check runs in every call of a kernel; Triton 3.6 is not installed here."""
    from wrong_kernels import return_none_in_a_tuple

    with pytest.raises(Exception, match="_with_none returns None in a tuple, which Triton"):
        return_none_in_a_tuple()


FP16_INSIDE = {"inside", "inside, right slopes", "inside, segments on both sides", "inside, chunk", "inside, offsets"}
FP16 = [
    pytest.param(case, id=str(case), marks=() if case in SOME or case.name in FP16_INSIDE else pytest.mark.long)
    for case in (*CASES, *INSIDE)
] + [case for case in KEY_BIASES if case.name in ("key bias, gates", "key bias, hidden keys")]


@pytest.mark.parametrize("case", FP16, ids=str)
def test_fp16_equals_the_definition(interpreter: ProcessPoolExecutor, case: Case) -> None:
    assert_exact(case, torch.float16, _answer(interpreter, case, "float16"), tolerance=2.0**-15)


def test_random_calls_equal_the_definition(interpreter: ProcessPoolExecutor) -> None:
    """The random calls of `test_differential_fuzz`; in call 12 the gradient of lse has a negative bit, with key biases.
    In call 38 slopes are so steep that they are finite only in natural units. From 44 on biases and gates are extreme, from 115
    on there are also NaN and huge numbers in hidden keys, with many queries and with few, in both dtypes."""
    for seed in (*range(8), 12, 38, 44, 59, 72, 96, 115, 130, 137, 232, 273, 312, 467, 740, 766, 872, 995, 1187):
        assert (
            not interpreter.submit(differential_fuzz.fuzz, ["fused"], range(seed, seed + 1)).result()["fused"].failures
        )


@pytest.mark.parametrize("case", SOME, ids=str)
def test_bf16_equals_the_definition_with_the_arithmetic_of_a_gpu(interpreter: ProcessPoolExecutor, case: Case) -> None:
    assert interpreter.submit(device.conform, case, "bfloat16", "cpu").result() <= 1


def test_fp32_is_exact_from_tensor_cores(interpreter: ProcessPoolExecutor) -> None:
    """Three TF32 products, truncated as they are added, with steep slopes and outlier keys."""
    case = next(case for case in CASES if case.name == "steep, long, sink, peaked")
    assert interpreter.submit(device.conform, case, "float32", "cpu").result() <= 1


@pytest.mark.parametrize("part", ["bfloat16", "products", "functions"])
def test_the_arithmetic_of_a_gpu_is_off_as_documented(interpreter: ProcessPoolExecutor, part: str) -> None:
    interpreter.submit(device_arithmetic.is_as_documented, part).result()


@pytest.mark.parametrize("case", [LONG, SINK, CHUNK, BOTH, DECODE, DECODE_SINK], ids=str)
def test_exactly_the_certified_tiles_are_visited(interpreter: ProcessPoolExecutor, case: Case) -> None:
    counted, certified, every = interpreter.submit(inside.visits_and_certificate, case, 1e-6).result()
    assert_visits(counted, certified, every)


def assert_visits(counted: np.ndarray, certified: np.ndarray, every: int) -> None:
    """Asserts that the visited tiles equal the plan, and are fewer than all."""
    assert (counted == certified).all(), f"visited {counted.tolist()} but certified are {certified.tolist()}"
    assert counted.sum() < 0.75 * every, f"{counted.sum()} of {every} tiles are visited: nothing is skipped"


def test_a_kernel_that_visits_every_tile_is_detected() -> None:
    with pytest.raises(AssertionError, match="visited"):
        assert_visits(np.full((1, 1, 2), 6), np.full((1, 1, 2), 2), 12)
    with pytest.raises(AssertionError, match="nothing is skipped"):
        assert_visits(np.full((1, 1, 2), 6), np.full((1, 1, 2), 6), 12)


@pytest.mark.parametrize("biased", [False, True])
def test_no_attack_breaks_the_kernels_certificate(interpreter: ProcessPoolExecutor, biased: bool) -> None:
    """Every approximate function errs by its largest error, in the direction that shortens the reach."""
    found = interpreter.submit(device.attacked, range(16 if biased else 40), "cpu", biased=biased).result()
    worst = max(lost for _, lost, _, _ in found)
    assert worst <= 1, f"{worst} of the tolerance is dropped"
    ours, theirs = (sum(draw[at] for draw in found) / len(found) for at in (2, 3))
    assert sum(share > 0 for _, _, share, _ in found) >= (5 if biased else 10), (
        "an attack on nothing: few draws skip a key"
    )
    assert ours >= (0.5 if biased else 0.95) * theirs, (
        f"the kernels skip {ours:.3f} of the keys, other bounds {theirs:.3f}"
    )


def test_a_certificate_that_ignores_the_bias_is_detected(interpreter: ProcessPoolExecutor) -> None:
    for seed in (42, 45, 67, 68):
        attack = range(seed, seed + 1)
        ((_, lost, _, _),) = interpreter.submit(device.attacked, attack, "cpu", biased=True, forgetful=True).result()
        assert lost > 1


def test_attacks_on_a_device_have_two_head_sizes_so_that_few_kernels_are_compiled() -> None:
    assert {device.drawn(seed, "cuda").head_dim for seed in range(40)} == {5, 64}
    assert len({device.drawn(seed, "cpu").head_dim for seed in range(40)}) > 10


@interpreted
def test_queries_in_padding_have_no_wider_reach_than_others() -> None:
    """A block of queries far after the last visible key visits few tiles with a tolerance, and all without."""
    query, key, value = torch.randn(3, 1, 1, 640, 16)
    for tolerance, fewest, most in ((1e-6, 0, 2), (0.0, 4, 4)):  # a block spans 64 distances
        spec = make_spec(query, key, value, [1.0], key_mask=torch.arange(640)[None] < 256, tolerance=tolerance)
        first, last = fused.plan(spec, query, key, value).bands[0, 0, -1, :2].tolist()
        assert fewest <= last - first <= most


@pytest.mark.parametrize("case", [case for case in (*CASES, *INSIDE) if case.mask or case.segments], ids=str)
def test_nothing_is_hidden_in_full_tiles_and_everything_outside_the_allowed(
    interpreter: ProcessPoolExecutor, case: Case
) -> None:
    """Checked pair by pair."""
    hidden, allowed, full = interpreter.submit(plans.full_tiles_of, case).result()
    for b, pairs in enumerate(hidden):
        for n, (low, high) in enumerate(allowed[b]):
            seen = np.flatnonzero(~pairs[n * TILE : (n + 1) * TILE].all(0))
            assert seen.size == 0 or (low <= seen[0] and seen[-1] < high), (
                f"block {n} sees keys outside {low} to {high}"
            )
        for rows, (of_blocks, of_tiles) in full.items():
            for n, (low, high) in enumerate(of_blocks[b]):
                block = pairs[n * rows : (n + 1) * rows, low * TILE : high * TILE]
                assert not block.any(), f"something is hidden from block {n} in tiles {low} to {high}"
            for tile, (low, high) in enumerate(of_tiles[b]):
                block = pairs[low * rows : high * rows, tile * TILE : (tile + 1) * TILE]
                assert not block.any(), f"tile {tile} hides something from blocks {low} to {high}"


def test_full_tiles_of_long_documents_are_found(interpreter: ProcessPoolExecutor) -> None:
    """512 tokens of padding, then documents of 512, 1,024 and 512: all tiles are full except those at a border."""
    to_blocks, to_tiles, allowed = interpreter.submit(plans.full_tiles_of_long_documents).result()
    assert to_blocks[:4] == [[0, 0]] * 4  # hidden by the mask
    assert to_blocks[5:8] == [[8, 16]] * 3
    assert to_blocks[9:16] == [[16, 32]] * 7
    assert to_blocks[17:] == [[32, 40]] * 3
    assert to_tiles[:8] == [[0, 0]] * 8
    assert to_tiles[8:14] == [[4, 8]] * 6
    assert to_tiles[16:30] == [[8, 16]] * 14
    assert allowed[:8] == [[2560, 0]] * 8
    assert allowed[8:16] == [[512, 1024]] * 8
    assert allowed[16:32] == [[1024, 2048]] * 16


@pytest.mark.parametrize("queries", [3, 100])
@pytest.mark.parametrize("name", ["causal", "both sides", "window", "dropout", "key bias"])
def test_queries_far_from_all_keys_lose_no_digit(interpreter: ProcessPoolExecutor, queries: int, name: str) -> None:
    """Scores are up to 0.3·230·log₂e = 100, where fp32 is off by 2⁻¹⁸; 10⁻⁵ allows for three such errors."""
    errors = interpreter.submit(far.errors_of_far_queries, queries, name).result()
    assert max(errors.values()) < 1e-5, errors


def test_addresses_beyond_int32_are_right(interpreter: ProcessPoolExecutor) -> None:
    """The pairs of an lse with 2¹⁶ heads of 2¹⁵ rows, and rows 2²⁴ elements apart, which are copied."""
    assert interpreter.submit(far.offsets_of_pairs, 2**16, 2**15).result() == [2**33, 2**34]
    assert (PLAN_ROWS - 1) * (MAX_ROW_STRIDE - 1) < 2**31
    for row, copied in ((MAX_ROW_STRIDE - 1, MAX_ROW_STRIDE - 1), (MAX_ROW_STRIDE, 16)):
        (rows,) = in_rows(torch.empty_strided((1, 1, 3, 16), (0, 0, row, 1), device="meta"))
        assert rows.stride(-2) == copied


@interpreted
def test_gates_shorten_the_reach() -> None:
    """Of 128 queries, for steady gates plus 10⁶ on every bias."""
    query, key, value = torch.randn(3, 1, 1, 1500, 16)
    bias = torch.full((1, 1, 1500), 0.5, dtype=torch.float64).cumsum(-1) + 1e6
    spec = make_spec(query, key, value, [0.0], key_bias=bias, tolerance=1e-6)
    bands = fused.plan(spec, query, key, value).bands
    assert int((bands[..., 1] - bands[..., 0]).max()) <= 5 < 1500 // TILE


def test_plans_that_read_too_early_are_noticed(interpreter: ProcessPoolExecutor) -> None:
    """The first check on a device: the last program of a head to finish makes its plan."""
    assert interpreter.submit(device.plans_that_differ, (1, 2, 1, 70), "cpu", 1).result() == 0
    found: list[Any] = []

    def by_torch(spec: Any, query: Any, key: Any, value: None, how: How) -> Any:
        certified = bounds(spec, query, key, key)
        found.append((key_tiles(spec, certified, rows=how.rows), certified))
        return found[-1]

    def early(*call: Any) -> Any:
        by_torch(*call)
        return found[-2]  # that of the call before

    def in_the_end(*call: Any) -> Any:
        return (early if len(found) > 6 else by_torch)(*call)

    assert device.plans_that_differ((1, 4, 4, 500), "cpu", 2, by_torch) == 0
    assert device.plans_that_differ((1, 4, 4, 500), "cpu", 2, in_the_end) == 1


def test_the_program_for_a_device_refuses_what_the_kernels_do(interpreter: ProcessPoolExecutor) -> None:
    case = next(case for case in CASES if case.name == "grouped-query")
    with pytest.raises(ValueError, match="at most 256 but D is 300"):
        interpreter.submit(device.conform, dataclasses.replace(case, head_dim=300), "float32", "cpu").result()


def test_refusals_name_their_reason(interpreter: ProcessPoolExecutor) -> None:
    assert "float64" in interpreter.submit(inside.refusal, "float64", 8).result()
    assert "bfloat16 wrongly" in interpreter.submit(inside.refusal, "bfloat16", 8).result()
    assert "at most 256 but D is 257" in interpreter.submit(inside.refusal, "float32", 257).result()
    assert interpreter.submit(inside.refusal, "float16", 256).result() is None
    assert inside.refusal("float32", 8) == "it runs on CUDA devices but query is on cpu"


@interpreted
def test_the_benchmark_checks_measures_and_keeps_a_record(tmp_path: Path) -> None:
    options = {"inputs": ("peaked",), "lengths": (64,), "shape": ((2, 16),), "backend": "fused", "kernels": True}
    (record,) = map(records.load, attention(tmp_path, **options, say=lambda line: None))
    assert record.name == "attention/cpu-float32-peaked-2x16"
    for name in ("ours", "causal, no bias", "SDPA + dense bias", "eager"):
        assert record.curves[name]["length"] == [64]
        assert record.curves[name]["right"] == [True]
    assert record.curves["scores"]["ours"][0] > 0
    assert any(name.startswith("ours: ") for name in record.curves), "the kernels of a step"
    assert is_drawn(record)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="there is no CUDA device"):
            attention(tmp_path, device="cuda")


def test_tiles_divide_the_certificates_own() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for head_dim in (16, 64, 128, 256):
            for large in (True, False):
                for kernel in ("forward", "decode", "query", "key"):
                    shape = tile_shape(kernel, dtype, head_dim, large=large)
                    assert TILE % shape.keys == 0
                    assert PLAN_ROWS % shape.queries == 0
    assert PLAN_ROWS % TILE == 0


@pytest.mark.parametrize(
    ("kernel", "queries", "keys", "valid"),
    [
        ("forward", 64, 128, False),
        ("decode", 16, 128, False),
        ("query", 64, 128, False),
        ("key", 64, 128, False),
        ("key", 64, 96, False),
        ("forward", 64, 48, False),
        ("forward", 48, 64, False),
        ("forward", 256, 64, False),
        ("query", 64, 32, True),
    ],
)
def test_tiles_that_would_skip_keys_or_queries_are_refused(
    kernel: configs.Kernel, queries: int, keys: int, valid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(configs._LARGE_HALF, 64, (configs.Shape(queries, keys, 4, 2),) * 4)
    with contextlib.nullcontext() if valid else pytest.raises(ValueError, match="the tile table has"):
        assert tile_shape(kernel, torch.bfloat16, 64, large=True).keys == keys


def _answer(interpreter: ProcessPoolExecutor, case: Case, dtype: str) -> Answer:
    got = {n: torch.from_numpy(x) for n, x in interpreter.submit(inside.case_answer, case, dtype).result().items()}
    return Answer(got.pop("output"), got.pop("lse"), got)
