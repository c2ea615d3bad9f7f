"""JAX's transformations: jit, vmap, checkpoint, shard_map, first derivatives, dropout, merging by lse."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax_checks import assert_close, draw, fixture_of_tiles, loss
from programs import printed

from alibi_attn.attention.call.options import DEFAULTS
from alibi_attn.jax import alibi_attention, attention, explain

B, T, H, D = 2, 24, 4, 8

small_tiles = fixture_of_tiles(8, 8, autouse=True)

QKV = tuple(draw(B, T, H, D, seed=seed) for seed in range(3))
SLOPES = np.float32([1.0, 0.5, 0.25, 0.125])


def test_the_function_has_the_defaults_of_pytorchs() -> None:
    defaults = {
        p.name: p.default for p in inspect.signature(alibi_attention).parameters.values() if p.kind is p.KEYWORD_ONLY
    }
    assert defaults == {**DEFAULTS, "dropout_key": None, "invariant": False, "backend": "auto"}


ALL = (0, 1, 2, 3)
GRADS = {name: jax.jit(jax.grad(partial(loss, backend=name), argnums=ALL)) for name in ("native", "loop")}


@pytest.mark.parametrize("backend", GRADS)
def test_checkpoint_changes_nothing(backend: str) -> None:
    again = jax.jit(jax.grad(jax.checkpoint(partial(loss, backend=backend)), argnums=ALL))(*QKV, SLOPES)
    assert_close(again, GRADS[backend](*QKV, SLOPES))


@pytest.mark.parametrize("backend", GRADS)
def test_vmap_equals_a_loop(backend: str) -> None:
    many = tuple(jnp.stack([x, 2 * x]) for x in QKV)
    of_slopes = jnp.stack([SLOPES, 2 * SLOPES])
    one = GRADS[backend]
    mapped = jax.jit(jax.vmap(one))(*many, of_slopes)
    for n in range(2):
        assert_close(jax.tree.map(lambda x, n=n: x[n], mapped), one(*(x[n] for x in many), of_slopes[n]))


def on_devices(backend: str, *specs: P):
    """The gradients of `loss`, computed on 2 × 2 devices."""
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("sequences", "heads"), axis_types=(auto, auto))

    def total(*args: jax.Array) -> jax.Array:
        return jax.lax.psum(loss(*args, backend=backend), ("sequences", "heads"))

    return jax.jit(jax.grad(jax.shard_map(total, mesh=mesh, in_specs=specs, out_specs=P()), argnums=ALL))


@pytest.mark.parametrize("backend", ["native", "loop", "auto"])
def test_shard_map_over_sequences_and_heads_equals_one_device(backend: str) -> None:
    spec = P("sequences", None, "heads")
    sharded = on_devices(backend, spec, spec, spec, P("heads"))
    assert_close(sharded(*QKV, SLOPES), GRADS["native"](*QKV, SLOPES))


@pytest.mark.parametrize("backend", ["native", "dense"])
def test_keys_that_devices_share_sum_their_gradients(backend: str) -> None:
    args = (QKV[0], QKV[1][:, :, :1], QKV[2][:, :, :1], SLOPES)
    sharded = on_devices(backend, P("sequences", None, "heads"), P("sequences"), P("sequences"), P("heads"))
    assert_close(sharded(*args), jax.jit(jax.grad(partial(loss, backend="dense"), argnums=ALL))(*args))


@pytest.mark.parametrize("backend", ["native", "dense"])
def test_a_traced_offset_is_not_recompiled(backend: str) -> None:
    traced = jax.jit(partial(alibi_attention, backend=backend))
    query, key, value = QKV
    outputs = [traced(query[:, offset : offset + 4], key, value, query_offset=offset) for offset in (3, 20)]
    assert traced._cache_size() == 1
    for offset, output in zip((3, 20), outputs, strict=True):
        assert_close(output, alibi_attention(*QKV, backend=backend)[:, offset : offset + 4])


@pytest.mark.parametrize("backend", ["native", "auto", "dense"])
def test_second_derivatives_are_refused(backend: str) -> None:
    f = partial(loss, backend=backend)
    with pytest.raises(NotImplementedError, match="can be differentiated once"):
        jax.grad(lambda q: jax.grad(f)(q, *QKV[1:], SLOPES).sum())(QKV[0])
    of_sinks = jax.grad(lambda sinks: loss(*QKV, SLOPES, sink_logits=sinks, backend=backend))
    with pytest.raises(NotImplementedError, match="can be differentiated once"):
        jax.grad(lambda sinks: of_sinks(sinks).sum())(SLOPES)


def test_no_queries_and_no_keys() -> None:
    query, key, value = QKV
    assert alibi_attention(query[:, :0], key, value).shape == (B, 0, H, D)
    nothing = alibi_attention(query[:, :0], key[:, :0], value[:, :0], segment_ids=np.zeros((B, 0), int))
    assert nothing.shape == (B, 0, H, D)
    output, lse = alibi_attention(query, key[:, :0], value[:, :0], return_lse=True)
    assert (output == 0).all()
    assert (lse == -jnp.inf).all()


@pytest.mark.parametrize("backend", ["native", "loop"])
def test_named_backends_give_the_empty_result_of_an_empty_call(backend: str) -> None:
    query, key, value = QKV
    for given in ((query[:0], key[:0], value[:0]), (query[:, :0], key, value), (query, key[:, :0], value[:, :0])):
        output, pull = jax.vjp(lambda *given: alibi_attention(*given, backend=backend), *given)
        assert output.shape == given[0].shape
        assert (output == 0).all()
        assert [x.shape for x in pull(output)] == [x.shape for x in given]
        assert explain(*given, backend=backend).backend == backend


def test_numpy_arrays_in_fp64_are_computed_in_fp32_unless_x64_is_enabled() -> None:
    wide = [x.astype(np.float64) for x in QKV]
    assert (alibi_attention(*wide, SLOPES) == alibi_attention(*QKV, SLOPES)).all()
    assert str(explain(*wide, SLOPES)) == str(explain(*QKV, SLOPES))
    with jax.enable_x64(True):
        assert alibi_attention(*wide).dtype == jnp.float64
        assert "float64 on cpu" in explain(*wide).call


def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERY_BLOCK", 128)
    monkeypatch.setattr(attention, "KEY_TILE", 128)
    grad = jax.jit(jax.grad(lambda q, k, v: alibi_attention(q, k, v, backend="loop").sum(), argnums=(0, 1, 2)))
    sizes = []
    for n in (8192, 65536):
        shape = jax.ShapeDtypeStruct((1, n, 8, 64), jnp.float32)
        sizes.append(grad.lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes)
    assert sizes[1] <= 8.5 * sizes[0]
    assert sizes[1] <= 12 * 65536 * 8 * 64 * 4  # a dozen arrays as large as the query


def test_nothing_imports_torch() -> None:
    loads = "import sys, alibi_attn.jax.attention, alibi_attn.jax.multihead; sys.exit('torch' in sys.modules)"
    printed("-c", loads)
