"""Context parallelism over 1 to 4 gloo processes equals one process: outputs, lse and all gradients."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from context_cases import CASES, DISAGREEMENTS, INVALID, joined, planned, truth
from context_models import MODELS, run

from alibi_attn.attention.run.merging import merged
from alibi_attn.distributed import Traffic, context_parallel_attention

PROCESSES = Path(__file__).parent.parent / "support" / "processes"
EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of four processes, which are started once for all tests."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "error", str(PROCESSES / "context_ranks.py"), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr, result.stderr
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(4)]


def assert_like_one_process(name, results, expected):
    """The error is at most rounding plus the effect of dropping twice the tolerance."""
    case = CASES[name]
    unit = EPS[case.dtype]
    tolerance = 2 * case.options.get("tolerance", unit / 32)
    drawn = case.drawn()
    largest = {
        n: float(drawn[n].double().nan_to_num(0.0, 0.0).norm(dim=-1).max()) for n in ("value", "grad", "query", "key")
    }
    # A weight's relative error is its score's absolute error, which grows with the norms of queries and keys.
    rounding = 32 * unit * max(1.0, largest["query"] * largest["key"] / case.dim**0.5 / 16)
    assert results.keys() == expected.keys()
    for part, x in expected.items():
        ours, mask = results[part], x.isinf()
        assert ours.shape == x.shape
        assert torch.equal(ours.isinf(), mask), f"{part} is infinite in other rows"
        error = float((ours - x).masked_fill(mask, 0.0).abs().max())
        size = float(x.masked_fill(mask, 0.0).abs().max())
        # Dropping a share R moves an output by at most 2R·max‖v‖ and lse by R. A gradient sums, over at most all rows,
        # terms R·‖do‖·2·max‖v‖ times a query, a key or a distance.
        dropped = {"output": 2 * largest["value"], "lse": 2.0}.get(part)
        if dropped is None:
            factor = {"dquery": largest["key"], "dkey": largest["query"], "dslopes": case.total}.get(part, 1.0)
            dropped = case.total * (1 + 2 * largest["grad"] * max(largest["value"], 1.0)) * factor
        allowed = rounding * max(size, 1.0) * (8 if part.startswith("d") else 1) + tolerance * dropped
        assert error <= allowed, f"{part} is off by {error:.3g}, which is more than {allowed:.3g}"


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_process_computes(ranks, name):
    parts = [results["cases"][name] for results in ranks if name in results["cases"]]
    assert_like_one_process(name, joined(CASES[name], parts), truth(CASES[name]))


def test_a_wrong_answer_is_noticed(ranks):
    name = "three, uneven"
    expected = truth(CASES[name])
    parts = [dict(results["cases"][name]) for results in ranks[:3]]
    parts[1]["dkey"] = parts[1]["dkey"] * (1 + 1e-9)
    with pytest.raises(AssertionError, match="dkey is off by"):
        assert_like_one_process(name, joined(CASES[name], parts), expected)
    parts = [results["cases"][name] for results in ranks[:3]]
    with pytest.raises(AssertionError, match="is off by"):
        assert_like_one_process(
            name, joined(CASES[name], parts[:1] + parts[:0:-1]), expected | {"dslopes": expected["dslopes"] * 2}
        )


@pytest.mark.parametrize(
    "name",
    [n for n, case in CASES.items() if not case.gates and "score_bound" not in case.options and len(case.lengths) > 1],
)
def test_the_traffic_is_that_of_the_planned_halo(ranks, name):
    """The code that sends the rows counts them."""
    case = CASES[name]
    drawn = case.drawn()
    options = {n: drawn[n] for n in ("key_mask", "segment_ids", "key_bias") if n in drawn} | case.options
    options.pop("dropout_p", None)  # has no effect on the halo
    drawn["query"].requires_grad_()  # the halo of training is wider
    halo = planned(case, drawn, **options)
    traffic = [Traffic(**results["traffic"][name]) for results in ranks if name in results["traffic"]]
    assert [t.rows_received for t in traffic] == halo.rows.sum((1, 2)).tolist()
    assert [t.rows_sent for t in traffic] == halo.rows.sum((0, 2)).tolist()
    if not (case.mask or case.segments or case.bias):
        # A rank receives rows in forward, and gradients of the rows that it sent in backward.
        received = halo.rows.sum((1, 2)) + halo.rows.sum((0, 2))
        assert [t.bytes_received for t in traffic] == (received * halo.row_bytes).tolist()


def test_most_rows_stay_where_they_are(ranks):
    traffic = [Traffic(**results["traffic"]["outlier keys on rank 0"]) for results in ranks]
    case = CASES["outlier keys on rank 0"]
    # Of training, whose halo also obeys the key rule; shards of 90 to 160 rows are short.
    assert 0 < sum(t.rows_received for t in traffic) < 0.6 * sum(np.cumsum(case.lengths[:-1])) * case.kv_heads
    assert 0 < ranks[2]["traffic"]["score bound"]["rows_received"] < 150 * 2


@pytest.mark.parametrize("name", MODELS)
def test_models_over_three_ranks_are_the_model_over_all_rows(ranks, name):
    """Outputs are concatenated; parameter gradients are summed over the ranks."""
    parts = [results["models"][name] for results in ranks[:3]]
    model, whole = MODELS[name]()
    expected = run(model, whole)
    output = torch.cat([part["output"] for part in parts], 1)
    size = float(expected["output"].abs().max())
    assert float((output - expected["output"]).abs().max()) <= 1e-11 * size
    assert parts[0]["gradients"].keys() == expected["gradients"].keys()
    for parameter, gradient in expected["gradients"].items():
        total = sum(part["gradients"][parameter] for part in parts)
        assert float((total - gradient).abs().max()) <= 1e-10 * float(gradient.abs().max()), parameter
    assert all(part["undone"] and len(part["layers"]) == 2 for part in parts)
    assert all(part["rows"] > 0 for part in parts[1:])


def test_the_same_call_gives_the_same_bits(ranks):
    again = [results["again"] for results in ranks]
    assert {name for one in again for name in one} == {"three, uneven", "outlier keys on rank 0", "gates", "bfloat16"}
    assert all(all(one.values()) for one in again)


def test_rows_travel_while_a_rank_computes_over_its_own_keys(ranks):
    """Forward waits for keys only after the call over its own, and backward for gradients only after those of its own."""
    rows, gradients = "keys and values", "gradients of keys and values"
    forward, backward = [f"send {rows}", "own", f"wait for {rows}"], [f"send {gradients}", "gradients of own"]
    assert ranks[1]["order"] == [*forward, "halo", "gradients of halo", *backward, f"wait for {gradients}"]
    # The first rank of a causal call receives no rows, so it has no gradients to compute first.
    assert ranks[0]["order"] == [*forward, *reversed(backward), f"wait for {gradients}"]


def test_rows_that_are_not_sent_change_nothing(ranks):
    assert [results["garbage"] for results in ranks[:3]] == [True, True, True]


def test_half_precision_stays_in_its_dtype(ranks):
    results = ranks[1]["cases"]["bfloat16"]
    assert results["output"].dtype == results["dkey"].dtype == torch.bfloat16
    assert results["lse"].dtype == results["dslopes"].dtype == torch.float32


@pytest.mark.parametrize("argument", DISAGREEMENTS)
def test_every_rank_reports_which_rank_and_argument_differ(ranks, argument):
    errors = [results["disagreements"][argument] for results in ranks[:3]]
    assert errors[0].startswith("rank 1 of 3 was called with")
    assert DISAGREEMENTS[argument][2] in errors[0]
    assert errors[1] == errors[2] == errors[0]


@pytest.mark.parametrize("change", INVALID)
def test_invalid_arguments_of_one_rank_raise_on_all_ranks(ranks, change):
    errors = [results["disagreements"][change] for results in ranks[:3]]
    assert INVALID[change][2] in errors[1]
    assert errors[0] == errors[2]
    assert "rank 1 of 3 rejected its arguments" in errors[0]


def test_waiting_for_a_missing_rank_ends_at_the_timeout(ranks):
    assert ranks[0]["left alone"].startswith("True rank 0 of 2: exchanging arguments did not finish within 0.5 s")


def test_without_a_process_group_the_error_explains_how_to_start_one():
    q = torch.zeros(1, 4, 10, 8)
    with pytest.raises(ValueError, match="torchrun"):
        context_parallel_attention(q, q, q)


def test_merging_rows_that_see_no_keys_has_finite_gradients():
    generator = torch.Generator().manual_seed(0)
    outputs = [torch.randn(2, 3, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    lses = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in ([1.0, -torch.inf], [3.0, -torch.inf])]
    output, lse = merged(outputs[0], lses[0], outputs[1], lses[1])
    (output.sum() + lse[0]).backward()
    output, lse = output.detach(), lse.detach()
    assert float(lse[0]) == pytest.approx(np.logaddexp(1.0, 3.0))
    assert lse[1] == -torch.inf
    assert (output[1] == 0).all()
    assert all(bool(x.grad.isfinite().all()) for x in (*outputs, *lses))
    share = 1 / (1 + np.exp(2.0))
    assert float(output[0, 0]) == pytest.approx(share * outputs[0][0, 0].item() + (1 - share) * outputs[1][0, 0].item())


def test_the_cases_reach_over_more_than_one_rank():
    """The cases include halos that span several ranks, masks of single heads, and outlier tiles."""
    halo = planned(CASES["four, one short, one empty"])
    assert halo.rows[3, 1].max() == 20
    assert halo.rows[3, 0].max() > 0
    halo = planned(CASES["outlier keys on rank 0"])
    assert any(spans for heads in halo.outliers for spans in heads)
    halo = planned(CASES["three, uneven"])
    assert len({(n - 1).bit_length() for n in halo.left[1]}) < len(set(halo.left[1]))
