"""PyTorch's Triton kernels, called from JAX: the same launches, code and bits. No device is needed."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import jax_compiled as compiled
import jax_in_interpreter as inside
import numpy as np
import pytest
from fused_in_interpreter import interpreter
from programs import printed

from alibi_attn.jax import alibi_attention, attention, explain
from alibi_attn.jax.backends import fused
from alibi_attn.jax.backends.launching import Launch

ROOT = Path(__file__).parents[2]
KERNELS = "norms", "survey", "reach", "forward", "visitors", "query", "key"
ROWS = jnp.ones((1, 70, 2, 16))


def ran(what: str, **variables: str) -> dict[str, Any]:
    """What jax_compiled.py prints, in a process of its own, in which tensors say that they are on a device."""
    said = printed("-W", "ignore", compiled.__file__, what, PYTHONPATH=str(ROOT), **variables)
    return json.loads(said.splitlines()[-1])


def test_a_training_step_launches_each_kernel_once_and_changes_its_results() -> None:
    pytest.importorskip("triton")
    launches = [asked for asked, _ in compiled.launched(window=50)]
    assert [x.source.kernel.fn.__name__ for x in launches] == [f"{name}_kernel" for name in KERNELS]
    assert [len(x.changed) for x in launches] == [4, 4, 11, 4, 3, 4, 2]
    for launch in launches:
        assert len(launch.numbers) == len([x for x in launch.numbers if x is not None]) + len(launch.arrays)


def test_arguments_keep_their_places_types_and_alignments() -> None:
    kernel = type("Kernel", (), {"arg_names": ["X", "n", "none", "SIZE"], "fn": None})()
    rows = fused._rows(jnp.ones((2, 3, 5, 16), jnp.bfloat16))
    launch = Launch(kernel, (rows, 2**40, None), {"SIZE": 4}, {})
    assert launch.source.types == {
        "X": ("*bf16", "i32", "i32", "i32"),
        "n": "i64",
        "none": "constexpr",
        "SIZE": "constexpr",
    }
    assert launch.source.constants == {(2,): None, (3,): 4}
    assert [place for place, x in launch.source.aligned.items() if x] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert launch.numbers == [None, (240, "i32"), (16, "i32"), (80, "i32"), (2**40, "i64")]
    assert launch.changed == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, None),
        ({"causal": False, "window": 9}, None),
        ({"key_mask": jnp.ones((1, 70), bool)}, "does not compute key_mask"),
        ({"key_bias": jnp.ones(70)}, "does not compute key_bias"),
        ({"segment_ids": jnp.zeros((1, 70), int)}, "does not compute segment_ids"),
        ({"dropout_p": 0.5}, "does not compute dropout_p"),
        ({"tolerance": 0.0}, "a tolerance above 0"),
        ({"query_offset": 3}, "at positions of keys"),
        ({"query_offset": jnp.int32(0)}, "does not compute query_offset as an array"),
    ],
)
def test_calls_beyond_the_kernels_in_jax_have_a_reason(
    options: dict[str, Any], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused.launching, "missing", lambda: None)
    monkeypatch.setattr(attention, "platforms", lambda query: {"gpu"})
    said = attention.why_not("fused", attention.make_spec(ROWS, ROWS, ROWS, **options), ROWS)
    assert said is None if words is None else words in said


def test_short_calls_and_machines_without_a_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'fused' cannot run this: it runs on CUDA devices but query is on cpu"):
        alibi_attention(ROWS, ROWS, ROWS, backend="fused")
    assert "it runs on CUDA devices but query is on cpu" in str(explain(ROWS, ROWS, ROWS))
    few = ROWS[:, :64]
    spec = attention.make_spec(few, few, few)
    assert fused.why_not(spec, few, {"gpu"}) == fused.launching.missing()
    monkeypatch.setattr(fused.launching, "missing", lambda: None)
    assert "more than 64 queries" in str(fused.why_not(spec, few, {"gpu"}))


@pytest.mark.long  # starts a process
@pytest.mark.parametrize("what", ["causal", "symmetric"])
def test_triton_is_asked_for_the_code_of_pytorch(what: str) -> None:
    """With pointers in place of descriptors in the kernels of backward, and so other tiles."""
    pytest.importorskip("triton")
    found = ran(what)
    for name in ("query_kernel", "key_kernel"):
        assert set(found.pop(name)) <= {"types", "constants", "aligned", "programs"}
    assert found == {f"{name}_kernel": [] for name in KERNELS if name not in ("query", "key")}


@pytest.mark.long  # compiles seven kernels
def test_jaxs_launcher_passes_the_parameters_of_the_compiled_code() -> None:
    pytest.importorskip("triton")
    assert ran("sm_90") == {f"{name}_kernel": True for name in KERNELS}


@pytest.mark.long  # compiles seven kernels twice
def test_code_is_compiled_again_where_tritons_cache_lacks_ptx(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    without = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_STORE_BINARY_ONLY": "1"}
    assert ran("sm_90", **without) == {f"{name}_kernel": True for name in KERNELS}


CALLS: tuple[tuple[tuple[int, ...], int, int, dict[str, Any]], ...] = (
    ((1, 70, 2, 16), 2, 70, {}),
    ((2, 150, 2, 16), 1, 200, {"window": 40}),
    ((1, 130, 3, 80), 3, 130, {"dtype": "float16", "scale": 0.2}),
    ((1, 200, 2, 24), 2, 300, {"query_offset": 30, "tolerance": 0.2}),
    ((1, 150, 2, 16), 1, 170, {"causal": False}),
    ((1, 150, 2, 16), 2, 150, {"causal": False, "right_slopes": np.float32([0.1, np.inf]), "window": 60}),
    ((1, 70, 1, 200), 1, 70, {}),  # fp32 tiles of fewer than 64 queries: nothing is measured
)


@pytest.mark.long
def test_results_have_the_bits_of_pytorch() -> None:
    """In the interpreter. The gradients of slopes, T numbers of about T each, are added in fp32 here and in fp64 there; in
    16 bits gradients have other tiles than with PyTorch's descriptors.
    """
    pytest.importorskip("triton")
    with interpreter() as executor:
        for *sizes, options in CALLS:
            results = executor.submit(inside.both, *sizes, **options).result()
            for name, (ours, theirs) in zip(inside.NAMES, results, strict=False):
                allowed = 0.0
                if "slopes" in name:
                    allowed = sizes[0][1] ** 2 * 2.0**-24
                elif ours.dtype == np.float16 and "gradient" in name:
                    allowed = 2.0**-10 * float(np.abs(theirs).max())
                off = np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max()
                assert off <= allowed, (sizes, options, name, off)
