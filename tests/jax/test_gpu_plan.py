"""What "auto" takes on a GPU, and that the large tiles of its loop give the results of all scores. No device is needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_checks import assert_close, draw

from alibi_attn.jax import alibi_attention, attention, explain
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


@pytest.mark.long  # 24 million scores
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 900, "dropout_p": 0.3}])
def test_large_tiles_give_the_output_and_gradients_of_all_scores(options: dict[str, object]) -> None:
    arrays = draw(1, 1300, 2, 8), draw(1, 9000, 1, 8, seed=1), draw(1, 9000, 1, 8, seed=2)
    slopes, out = np.float32([0.05, 0.001]), draw(1, 1300, 2, 8, seed=3)
    more = options | ({"dropout_key": jax.random.key(0)} if "dropout_p" in options else {})

    def loss(backend: str, *given: jax.Array) -> tuple[jax.Array, jax.Array]:
        output = alibi_attention(*given, backend=backend, **more)
        return (output * out).sum(), output

    one, other = (
        jax.jit(jax.grad(lambda *x, name=name: loss(name, *x), (0, 1, 2), has_aux=True))(*arrays, slopes)
        for name in ("loop", "dense")
    )
    assert_close(one, other)
    steep, flat = explain(*arrays, slopes, backend="loop", **options).scores[0]
    assert steep < 1300 * 9000 <= flat or "window" in options
