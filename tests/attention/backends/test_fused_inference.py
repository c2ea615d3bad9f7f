"""Calls of the Triton kernels without gradients: decoding, and short calls that need no certificate."""

import dataclasses
from concurrent.futures import ProcessPoolExecutor

import decoding_in_interpreter as decoding
import fused_in_interpreter as inside
import pytest
import torch
from attention_cases import CASES, KEY_BIASES, Case
from attention_checks import assert_exact

DECODE = Case("decode", batch=2, heads=4, kv_heads=2, query_len=3, key_len=700, slopes="steep", head_dim=16)
FEW_HEADS = Case("few heads", batch=1, heads=1, query_len=40, key_len=500, slopes="random", head_dim=16)
DECODE_SINK = dataclasses.replace(DECODE, name="decode with a sink", sink=200.0)
# Calls without gradients: few queries without and with a plan, all keys of the masks, and more than WHOLE_KEYS.
WITHOUT_GRADIENTS = (
    ("one query", 1024),
    ("offset after all keys", 1024),
    ("an offset a sequence, window", 1024),
    ("key bias, mask and segments", 1024),
    ("everything", 1024),
    ("steep, long, window and mask", 1024),
    ("steep, long", 0),
)


@pytest.mark.parametrize(("name", "whole_keys"), WITHOUT_GRADIENTS)
def test_calls_without_gradients_equal_the_definition(
    interpreter: ProcessPoolExecutor, name: str, whole_keys: int
) -> None:
    (case,) = (case for case in (*CASES, *KEY_BIASES) if case.name == name)
    got = interpreter.submit(decoding.without_gradients, case, whole_keys).result()
    assert_exact(case, torch.float32, got, tolerance=2.0**-28)


@pytest.mark.parametrize("case", [DECODE, DECODE_SINK, FEW_HEADS], ids=str)
def test_decoding_equals_forward(interpreter: ProcessPoolExecutor, case: Case) -> None:
    gap, parts = interpreter.submit(inside.decoding_equals_forward, case).result()
    assert gap < 1e-5
    assert parts == 1 or case.batch * (case.kv_heads or case.heads) < 4


def test_split_decoding_equals_forward(interpreter: ProcessPoolExecutor) -> None:
    gap, parts = interpreter.submit(inside.decoding_equals_forward, dataclasses.replace(DECODE_SINK, batch=1)).result()
    assert gap < 1e-5
    assert parts == 2


@pytest.mark.parametrize("window", [None, 300])
def test_decoding_reads_only_the_keys_within_reach(interpreter: ProcessPoolExecutor, window: int | None) -> None:
    assert interpreter.submit(decoding.decoding_with_remembered_norms, window).result() < 1e-5


def test_masked_bad_keys_change_nothing_in_decoding(interpreter: ProcessPoolExecutor) -> None:
    interpreter.submit(decoding.masked_bad_keys_change_nothing_in_decoding).result()


def test_a_layer_decodes_by_the_kernel(interpreter: ProcessPoolExecutor) -> None:
    gap, calls = interpreter.submit(decoding.a_layer_decodes_near).result()
    assert gap < 1e-5
    assert calls == 5  # chunks of 150, 1, 1, 8 and 40


@pytest.mark.parametrize("window", [None, 50])
def test_a_step_with_a_static_cache_reads_only_near_keys(interpreter: ProcessPoolExecutor, window: int | None) -> None:
    """Its position is in a tensor, so every step is the same launches."""
    error, near = interpreter.submit(decoding.static_steps_read_near, window).result()
    assert error < 1e-5
    assert near
