"""The kernels compile without a GPU; on sm_90 they load asynchronously, use wgmma and do not spill, as recorded."""

import json
import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from programs import printed

from alibi_lab import records

ROOT = Path(__file__).parents[3]
SMALL = {"norms", "survey", "reach", "plan", "visitors", "merge", "labels", "spread", "split", "scan", "suffix"}
SMALL |= {"append", "rings"}
# Instructions per score in the loop over full tiles: half as many as with masks and a bias per score.
MOST_INSTRUCTIONS = {
    "forward/D=64": 9,
    "forward/D=128": 10.5,
    "query/D=64": 13,
    "query/D=128": 15,
    "key/D=64": 18,
    "key/D=128": 30,
    "decode/D=64": 80,
    "decode/D=128": 120,
    "forward, biased/D=64": 16,
    "query, biased/D=64": 18,
    "key, biased/D=64": 18,
    "decode, biased/D=64": 155,
}
MOST_ONLINE = {"forward/D=64": 380, "forward/D=128": 450}  # instructions of the loop with online softmax
MOST_WITH_A_TABLE = {
    "forward, table/D=64": 18,
    "query, table/D=64": 18,
    "key, table/D=64": 22,
    "diagonal, table/D=64": 20,
}
PROGRAM = ROOT / "tests" / "support" / "interpreter" / "offline_compile.py"
OLDEST_TRITON = ROOT / "build" / "triton-3.6.0"
AS_ON_A_DEVICE = ROOT / "tests" / "support" / "interpreter" / "as_on_a_device.py"


def compiled(*targets: str) -> dict[str, dict[str, int]]:
    return ran(PROGRAM, *targets)


def ran(program: Path, *arguments: str) -> dict[str, Any]:
    said = printed(program, *arguments, cwd=ROOT, timeout=1500, TRITON_DEFAULT_FP_FUSION="1", OMP_NUM_THREADS="1")
    return json.loads(said.splitlines()[-1])


def recorded(triton: str) -> dict[str, dict[str, int | None]]:
    """The record of the Triton kernels for this release of Triton; empty if there is none."""
    rows: dict[str, dict[str, int | None]] = {}
    for record in records.find(ROOT / "results", kind="compilation"):
        if record.config.get("triton") == triton:
            columns = record.curves["kernels"]
            rows |= {kernel: {c: columns[c][at] for c in columns} for at, kernel in enumerate(columns["kernel"])}
    return rows


def assert_pipelined(name: str, found: dict[str, int], most: Mapping[str, float] = MOST_INSTRUCTIONS) -> None:
    """Asserts asynchronous loads, matrix instructions and no spill in the loop; wgmma unless decoding (16 rows)."""
    assert found["async_loads"] > 0, f"{name} is not pipelined: {found}"
    assert found["wgmma"] > 0 or "decode" in name, f"{name} does not use wgmma: {found}"
    assert found["matrix_instructions"] > 0, f"{name} uses no matrix instructions: {found}"
    assert found["spills_in_loop"] == 0, f"{name} spills in its loop: {found}"
    assert 0 < found["instructions_per_score"] < most[name.split("/", 1)[1]], f"{name}: {found}"
    assert found["online_instructions"] <= MOST_ONLINE.get(name.split("/", 1)[1], 0), f"{name}: {found}"


def assert_as_recorded(name: str, found: dict[str, int], kept: dict[str, int | None]) -> None:
    instructions = "matrix_instructions", "loop_instructions", "online_instructions"
    for figure in ("async_loads", "wgmma", "spills_in_loop", "spilled", *instructions):
        if figure in found:
            assert found[figure] == kept[figure], (
                f"{name}: {figure} is {found[figure]} but the record says {kept[figure]}; if that is meant, delete the record "
                "and run python tests/support/interpreter/offline_compile.py --record results"
            )


@pytest.fixture(scope="module")
def of_sm_90() -> dict[str, dict[str, int]]:
    """Figures of one process for D = 64: without a key bias, and attention with it."""
    return compiled("sm_90", "sm_90-biased")


def assert_all_as_recorded(found: dict[str, dict[str, int]], triton: str = metadata.version("triton")) -> None:
    kept = recorded(triton)
    for name, row in found.items():
        if name.split("/")[1] in SMALL:  # one tile or two per program: no loop to pipeline
            assert row["spilled"] == 0, f"{name} spills {row['spilled']} bytes: {row}"
            assert row["wgmma"] > 0 or "reach" not in name, f"{name} does not use wgmma: {row}"
            # The kernel of the reach also makes the plan, once per head.
            most = 7000 if "reach" in name else 2500
            assert row["instructions"] < most, f"{name}: the certificate costs as much as attention: {row}"
        else:
            assert_pipelined(name, row)
        if kept:
            assert_as_recorded(name, row, kept[name])


def test_attention_on_sm_90_is_pipelined_and_as_recorded() -> None:
    found = compiled("sm_90-few")
    assert_pipelined("sm_90/forward, biased/D=64", found.pop("sm_90/forward, biased/D=64"))
    assert set(found) == {"sm_90/forward/D=64", "sm_90/reach/D=64"}
    assert_all_as_recorded(found)


@pytest.mark.long
def test_all_kernels_on_sm_90_are_pipelined_and_as_recorded(of_sm_90: dict[str, dict[str, int]]) -> None:
    found = {name: row for name, row in of_sm_90.items() if "biased" not in name}
    assert len(found) == 17
    assert_all_as_recorded(found)


@pytest.mark.long
def test_wide_heads_are_pipelined_and_as_recorded() -> None:
    found = compiled("sm_90-wide")
    assert len(found) == 5
    assert_all_as_recorded(found)


@pytest.mark.long
def test_a_bias_for_every_key_costs_no_pipeline(of_sm_90: dict[str, dict[str, int]]) -> None:
    """About two more instructions per score than without."""
    assert_biased_are_pipelined({name: row for name, row in of_sm_90.items() if "biased" in name})


def assert_biased_are_pipelined(found: dict[str, dict[str, int]]) -> None:
    assert len(found) == 6
    for name, row in found.items():
        if name in ("sm_90/reach, biased/D=64", "sm_90/labels, biased/D=64"):
            assert row["spilled"] == 0, f"{name} spills {row['spilled']} bytes: {row}"
            assert row["instructions"] < 7000, f"{name}: the certificate costs as much as attention: {row}"
        else:
            assert_pipelined(name, row)


@pytest.mark.long
@pytest.mark.skipif(not OLDEST_TRITON.is_dir(), reason=f"make test-all installs Triton 3.6 in {OLDEST_TRITON}")
def test_the_oldest_triton_compiles_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes with torch 2.11, the oldest that is allowed."""
    monkeypatch.setenv("PYTHONPATH", str(OLDEST_TRITON))
    found = compiled("sm_90", "sm_90-wide", "sm_90-biased")
    assert recorded("3.6.0")
    assert_all_as_recorded({name: row for name, row in found.items() if "biased" not in name}, "3.6.0")
    assert_biased_are_pipelined({name: row for name, row in found.items() if "biased" in name})


@pytest.mark.long
def test_other_devices_compile() -> None:
    found = compiled("sm_80", "sm_100", "gfx942")
    assert len(found) == 18
    for name, row in found.items():
        assert row["matrix_instructions"] > 0 or name.split("/")[1] in SMALL, f"{name}: {row}"
        # sm_80's tiles are used on every device but the largest, including consumer cards.
        limit = {"gfx942": 64, "sm_80": 99, "sm_100": 227}[name.split("/")[0]] * 1024
        assert row["shared_bytes"] <= limit, (
            f"{name} needs {row['shared_bytes']} bytes of shared memory; there are {limit}"
        )


@pytest.mark.long
def test_kernels_with_a_table_are_pipelined_without_spills() -> None:
    found = compiled("sm_90-table")
    assert len(found) == len(MOST_WITH_A_TABLE)
    for name, row in found.items():
        assert_pipelined(name, row, MOST_WITH_A_TABLE)


def test_a_call_compiles_as_a_device_would_compile_it() -> None:
    """With one head and almost no keys."""
    asked = ran(AS_ON_A_DEVICE, "sm_90", "bfloat16", "71 heads over one key head")
    kernels = "decode", "merge", "query", "key", "visitors", "norms", "reach", "plan"
    assert set(asked) == {f"{name}_kernel" for name in kernels}


@pytest.mark.long
def test_calls_with_all_options_and_gates_compile_as_on_a_device() -> None:
    assert_calls_compile()


@pytest.mark.long
@pytest.mark.skipif(not OLDEST_TRITON.is_dir(), reason=f"make test-all installs Triton 3.6 in {OLDEST_TRITON}")
def test_the_oldest_triton_launches_compiled_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have what launches use: `warmup` of objects with a dtype and an address, and `CompiledKernel[grid]`."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (OLDEST_TRITON, ROOT))))
    assert_calls_compile()


def assert_calls_compile() -> None:
    calls = "71 heads over one key head", "inside, segments on both sides", "gates", "dropout", "table"
    asked = ran(AS_ON_A_DEVICE, "sm_90", "bfloat16", *calls)
    kernels = "forward", "decode", "merge", "query", "key", "visitors"
    before = "norms", "survey", "reach", "plan", "labels", "spread"
    biased, of_tables = ("split", "scan", "suffix"), ("diagonal", "total", "table_forward")
    assert set(asked) == {f"{name}_kernel" for name in (*kernels, *before, *biased, *of_tables)}


def test_a_lost_pipeline_is_detected() -> None:
    good = {
        "async_loads": 18,
        "wgmma": 16,
        "matrix_instructions": 16,
        "spills_in_loop": 0,
        "instructions_per_score": 8.0,
        "online_instructions": 342,
    }
    name = "sm_90/forward/D=64"
    assert_pipelined(name, good)
    for change, message in (
        ({"async_loads": 0}, "not pipelined"),
        ({"wgmma": 0}, "wgmma"),
        ({"spills_in_loop": 8}, "spills"),
        ({"instructions_per_score": 24.2}, "24.2"),
        ({"instructions_per_score": 0.0}, "0.0"),
        ({"online_instructions": 500}, "500"),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_pipelined(name, good | change)
    with pytest.raises(AssertionError, match="the record says 18"):
        assert_as_recorded(name, good | {"async_loads": 12}, good)
