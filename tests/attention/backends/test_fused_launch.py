"""How Triton kernels are launched: which calls share compiled code, and in which order heads start."""

import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import far_in_interpreter as far
import numpy as np
import plan_in_interpreter as plans
import pytest
import torch
from programs import printed

from alibi_attn.attention.backends.fused import plan, recording, space
from alibi_attn.attention.backends.fused.call import call_of
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.constants import OUTLIER_CHOICES, OUTLIER_TILES

ROOT = Path(__file__).parents[3]
KERNELS = 7  # of a plain forward and backward pass


def ran(program: str) -> dict[str, Any]:
    """What a program prints in a process of its own, in which tensors say that they are on a device."""
    pytest.importorskip("triton")
    path = ROOT / "tests" / "support" / "interpreter" / program
    return json.loads(printed("-W", "ignore", path, cwd=ROOT).splitlines()[-1])


def test_calls_share_compiled_kernels_unless_their_code_must_differ() -> None:
    """Sizes and strides are arguments; alignment, strides beyond 32 bits, groups of heads and options change the code."""
    counts = ran("launch_kinds.py")
    assert counts.pop("first") == KERNELS
    assert {
        name: counts[name] for name in ("again", "other sizes", "transposed", "one head and one sequence")
    } == dict.fromkeys(("again", "other sizes", "transposed", "one head and one sequence"), 0)
    assert counts["other groups"] == counts["another window"] == 0
    assert 0 < counts["groups"] <= KERNELS
    assert 0 < counts["misaligned"] <= KERNELS
    assert 0 < counts["far strides"] <= KERNELS
    assert 0 < counts["a window"] <= KERNELS


def test_a_replayed_call_launches_the_same_as_a_direct_one() -> None:
    """On its own tensors, whichever were recorded and whatever they hold, and the host reads none, so that CUDA graphs can
    replay it too: training, an encoder with a mask, gates, a table, and decoding at a position. A call with another option is
    another kind."""
    found = ran("replayed_launches.py")
    assert len(found) == 22
    assert all(all(x) for x in found.values()), found


def test_rows_that_the_device_fetches_by_itself_are_those_at_addresses(interpreter: ProcessPoolExecutor) -> None:
    for described, addressed in interpreter.submit(far.described_and_addressed_rows).result():
        assert described == addressed
        assert described < 2e-3


def test_the_memory_of_a_plan_depends_on_the_number_of_tiles_only() -> None:
    """So that a call with a few keys more can be replayed."""

    def memory(key_len: int) -> tuple[int, ...]:
        words, key = [], torch.empty(1, 2, key_len, 16)
        query, spec = key[:, :, :3], make_spec(key[:, :, :3], key, key)

        def allocated(size: int, device: torch.device) -> torch.Tensor:
            words.append(size)
            return torch.empty(size, dtype=torch.int32, device=device)

        into = plan.empty_plan(spec, 64, key.device)
        with mock.patch.object(plan, "launch"), mock.patch.object(space, "scratch", allocated):
            plan.make_plan(spec, call_of(spec, key.device), query, key, key, plan.How(64, shared=True), into=into)
        assert len(words) == 2
        return *words, *into.shape

    assert len({memory(key_len) for key_len in range(129, 193)}) == 1
    assert memory(193) != memory(192)


def test_few_kinds_of_calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_KNOWN", {})
    for kind in range(recording.MOST + 10):
        recording._keep(kind, object())
    recording._keep(20, object())
    assert list(recording._KNOWN) == list(range(10, recording.MOST + 10))


@pytest.mark.parametrize("shape", [(1, 1), (2, 6), (5, 40)])
def test_heavy_heads_start_first(interpreter: ProcessPoolExecutor, shape: tuple[int, int]) -> None:
    weights = (10 ** np.random.default_rng(0).uniform(0, 6, shape)).astype(int)
    weights[0, 0] = 0  # its queries see nothing
    group = 2 if shape[1] % 2 == 0 else 1
    forward, backward, of_keys = interpreter.submit(plans.orders_of, weights.tolist(), group).result()
    flat, of_groups = weights.flatten(), weights.reshape(-1, group).sum(1)
    assert sorted(forward) == list(range(flat.size))
    in_order = flat[forward] + 1
    assert (in_order[1:] < in_order[:-1] * 2**0.51).all(), "a head starts before another with half an octave more tiles"
    np.testing.assert_array_equal(backward, np.argsort(-flat, kind="stable"))
    np.testing.assert_array_equal(of_keys, np.argsort(-of_groups, kind="stable"))


@pytest.mark.parametrize("tiles", [3, 16, 41])
def test_largest_norms_around_every_tile(interpreter: ProcessPoolExecutor, tiles: int) -> None:
    """By programs of 16 tiles; some tiles have no visible key."""
    norms = torch.rand(3, 2, tiles)
    hidden = torch.rand(2, tiles) < 0.4
    norms[:2, hidden], norms[2, hidden] = 0.0, torch.inf
    longest, latest, outliers, of_values = interpreter.submit(plans.survey_of, norms, span=16).result()
    count = min(tiles, OUTLIER_TILES)
    order = norms[0].argsort(dim=-1, descending=True, stable=True)[:, :count]
    assert outliers.tolist() == [[*row, *[-1] * (OUTLIER_TILES - count)] for row in order.tolist()]
    for choice, left_out in enumerate(OUTLIER_CHOICES):
        rest = norms[0].scatter(-1, order[:, :left_out], 0.0)
        assert torch.equal(longest[0, choice], rest.cummax(-1).values)
        assert torch.equal(longest[1, choice], rest.flip(-1).cummax(-1).values.flip(-1))
    shown = torch.where(hidden, -1, torch.arange(tiles))
    assert torch.equal(latest.long(), shown.cummax(-1).values)
    assert torch.equal(of_values, torch.stack([norms[1].amax(-1), norms[2].amin(-1)]))
