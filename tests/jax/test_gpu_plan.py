"""What "auto" takes on a GPU, and that the large tiles of its loop give the results of all scores. No device is needed."""

import jax
import jax.numpy as jnp
import pytest

from alibi_attn.jax import attention, explain
from alibi_attn.jax.call.plan import Plan


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays are said to be on a GPU."""
    monkeypatch.setattr(attention, "platforms", lambda _: {"gpu"})


def plan_of(batch: int, length: int, backend: attention.Backend = "auto") -> Plan:
    plans = []

    def planned(query: jax.Array) -> jax.Array:
        plans.append(attention.make_plan(attention.make_spec(query, query, query), query, backend))
        return query

    jax.eval_shape(planned, jax.ShapeDtypeStruct((batch, length, 16, 128), jnp.bfloat16))
    return plans[0]


def test_auto_computes_all_scores_until_one_array_of_them_takes_two_gigabytes() -> None:
    assert plan_of(8, 2048).dense
    assert not plan_of(9, 2048).dense
    assert plan_of(1, 4096).dense
    assert not plan_of(1, 16384).dense


def test_the_loop_has_large_tiles_that_divide_the_input_evenly() -> None:
    sizes = {16384: (1024, 4096), 700: (700, 768), 5000: (1000, 2560)}
    plans = {length: plan_of(1, length, "loop") for length in sizes}
    assert {length: (plan.query_block, plan.key_tile) for length, plan in plans.items()} == sizes


def test_explain_says_how_many_scores_auto_computes() -> None:
    rows = jnp.ones((1, 300, 2, 8))
    found = explain(rows, rows, rows)
    assert found.backend == "dense"
    assert "auto picks it on a GPU for more than 536,870,912 scores" in str(found)
