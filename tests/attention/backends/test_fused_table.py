"""The Triton kernels for tables of distances, interpreted: random calls, memory, visited tiles, torch.compile, T5."""

from concurrent.futures import ProcessPoolExecutor

import conformance_on_device as device
import pytest
import table_in_interpreter as inside
import torch

from alibi_attn.attention.backends.fused.table import widths

# Causal and not, few queries, splits of keys, groups, windows, masks, segments, offsets on both sides of the keys, scales.
SEEDS = {"float32": range(24), "float16": range(24, 36), "bfloat16": range(36, 44)}


@pytest.mark.parametrize("dtype", SEEDS)
def test_random_calls_are_the_loop_over_pairs(interpreter: ProcessPoolExecutor, dtype: str) -> None:
    assert not interpreter.submit(inside.wrong_calls, SEEDS[dtype], dtype).result()


@pytest.mark.long
@pytest.mark.parametrize("dtype", SEEDS)
def test_many_random_calls_are_the_loop_over_pairs(interpreter: ProcessPoolExecutor, dtype: str) -> None:
    assert not interpreter.submit(inside.wrong_calls, range(50, 150), dtype).result()


def test_the_check_on_a_device_runs(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(device.conform_table, 41, "float32", "cpu").result() <= 1


@pytest.mark.long
@pytest.mark.parametrize("dtype", SEEDS)
def test_long_calls_are_the_loop_over_pairs(interpreter: ProcessPoolExecutor, dtype: str) -> None:
    assert not interpreter.submit(inside.wrong_calls, (True, False), dtype).result()


def test_a_shifted_table_is_detected(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(inside.wrong_calls_of_a_shifted_table, range(3)).result() == 3


@pytest.mark.parametrize("causal", [True, False])
def test_split_keys_give_one_result(interpreter: ProcessPoolExecutor, causal: bool) -> None:
    parts, error = interpreter.submit(inside.error_of_split_keys, causal).result()
    assert parts == 4
    assert error < 1e-5


@pytest.mark.parametrize("causal", [True, False])
def test_no_tolerance_skips_a_key(interpreter: ProcessPoolExecutor, causal: bool) -> None:
    assert interpreter.submit(inside.same_with_any_tolerance, causal=causal).result()


def test_memory_is_linear(interpreter: ProcessPoolExecutor) -> None:
    short, long = interpreter.submit(inside.memory).result()
    for one, two in zip(short, long, strict=True):
        assert 0 < two < 2.2 * one


def test_tiles_are_visited_where_masks_allow_pairs(interpreter: ProcessPoolExecutor) -> None:
    everything, causal, window, documents = interpreter.submit(inside.visited).result()
    assert everything == [300 * 300] * 4
    for scores in (causal, window, documents):
        assert len(set(scores)) == 1  # all heads alike
        assert 0 < scores[0] < 0.75 * everything[0]


def test_hidden_keys_are_never_used(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(inside.hidden_keys_are_never_used).result()


def test_the_largest_finite_numbers_are_right(interpreter: ProcessPoolExecutor) -> None:
    """The scores of a causal row, from distance 0 on, are −3·10³⁸, 0, 1, −3·10³⁸ and 3·10³⁸."""
    first, more, less = [1, 0, 0, 0, 0], torch.e / (1 + torch.e), 1 / (1 + torch.e)
    expected = [first, first, [more, less, 0, 0, 0], [0, more, less, 0, 0], first]
    weights = interpreter.submit(inside.huge_numbers).result()
    torch.testing.assert_close(torch.tensor(weights), torch.tensor(expected))


def test_compile_autocast_checkpointing_and_library_checks(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(inside.compiled_and_transformed).result()


def test_a_patched_t5_runs_on_the_kernels(interpreter: ProcessPoolExecutor) -> None:
    errors = interpreter.submit(inside.errors_of_t5).result()
    assert max(errors.values()) < 1e-4, errors
    assert "gradient of relative_attention_bias" in errors


def test_the_table_of_tiles_fits_the_plan() -> None:
    """A tile of keys divides TILE = 64, one of queries a block of the plan."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for head_dim in (1, 16, 64, 65, 128, 129, 256):
            found = widths(torch.empty(1, 1, 1, head_dim, dtype=dtype))
            assert {*found.rows, *found.keys, found.diagonal} <= {16, 32, 64}
