"""The C++ kernels called by XLA: PyTorch's bits, one call under vmap, the right path on every device, clear errors."""

import textwrap
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_checks import loss
from programs import printed

from alibi_attn.attention import api
from alibi_attn.attention.call.checks import dtype_name
from alibi_attn.jax import alibi_attention, explain
from alibi_attn.jax.backends import native

B, T, S, H, K, D = 2, 150, 170, 4, 2, 20
RNG = np.random.default_rng(0)
ROWS = {
    name: RNG.standard_normal((B, n, h, D)).astype(np.float32)
    for name, n, h in (("query", T, H), ("key", S, K), ("value", S, K))
}
SLOPES = np.float32([[1.0, 0.3, 0.05, 0.01], [0.5, 0.2, 0.0, -0.01]])  # [B, H]: gradients per sequence
SEGMENTS = np.sort(RNG.integers(0, 4, (B, S)), axis=1)

CALLS = {
    "plain": {},
    "no tolerance, a scale that no float is": {"tolerance": 0.0, "scale": 0.1},
    "both directions": {"causal": False, "right_slopes": np.float32([0.5, np.inf, 0.1, 2.0]), "tolerance": 1e-3},
    "window and mask": {"window": 40, "key_mask": RNG.random((B, S)) < 0.7},
    "segments": {"segment_ids": SEGMENTS},
    "offsets": {"query_offset": np.array([-30, 2000]), "segment_ids": (SEGMENTS[:, :T], SEGMENTS)},
    "biases": {"key_bias": np.where(RNG.random((B, H, S)) < 0.1, -np.inf, 50 * RNG.standard_normal((B, H, S)))},
}


def torch_answer(dtype: torch.dtype, call: dict) -> list[np.ndarray]:
    """Output, lse and the gradients of query, key, value, slopes and key_bias, if any, in JAX's layout."""
    leaves = {n: torch.tensor(x).to(dtype).transpose(1, 2).contiguous().requires_grad_() for n, x in ROWS.items()}
    wide = torch.promote_types(dtype, torch.float32)
    leaves["slopes"] = torch.tensor(SLOPES).to(wide).requires_grad_()
    rest = {n: torch.tensor(x) if isinstance(x, np.ndarray) else x for n, x in call.items()}
    if "segment_ids" in rest and isinstance(rest["segment_ids"], tuple):
        rest["segment_ids"] = tuple(torch.tensor(x) for x in rest["segment_ids"])
    if "key_bias" in rest:
        leaves["key_bias"] = rest.pop("key_bias").to(wide).requires_grad_()
    output, lse = api.alibi_attention(**leaves, **rest, return_lse=True, backend="native")
    grads = torch.autograd.grad((output, lse), list(leaves.values()), (output.detach(), torch.ones_like(lse)))
    return [_numpy(x.transpose(1, 2) if x.ndim == 4 else x) for x in (output, lse, *grads)]


def jax_answer(dtype: str, call: dict) -> list[np.ndarray]:
    leaves = {name: jnp.asarray(x, dtype) for name, x in ROWS.items()}
    wide = jnp.promote_types(dtype, jnp.float32)
    leaves["slopes"] = jnp.asarray(SLOPES, wide)
    rest = dict(call)
    if "key_bias" in rest:
        leaves["key_bias"] = jnp.asarray(rest.pop("key_bias"), wide)

    @jax.jit
    def run(leaves: dict[str, jax.Array]) -> tuple[object, ...]:
        attend = partial(alibi_attention, **rest, return_lse=True, backend="native")
        (output, lse), pull = jax.vjp(lambda x: attend(**x), leaves)
        return output, lse, *pull((output, jnp.ones_like(lse)))[0].values()

    found = dict(zip(("output", "lse", *sorted(leaves)), run(leaves), strict=True))
    return [np.asarray(found[name], np.float64) for name in ("output", "lse", *leaves)]


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


@pytest.mark.parametrize("name", CALLS)
def test_bits_are_those_of_pytorch(name: str) -> None:
    ours, theirs = jax_answer("float32", CALLS[name]), torch_answer(torch.float32, CALLS[name])
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_bits_are_those_of_pytorch_in_other_dtypes(dtype: torch.dtype) -> None:
    with jax.enable_x64(dtype == torch.float64):
        call = {"window": 90, "scale": 0.1}
        for one, other in zip(jax_answer(dtype_name(dtype), call), torch_answer(dtype, call), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_unchecked_bad_bias_spoils_only_the_queries_that_see_it(bad: float) -> None:
    bias = np.zeros((H, S), np.float32)
    bias[1, 100] = bad
    run = jax.jit(partial(alibi_attention, backend="native", window=20))
    output = np.asarray(run(*ROWS.values(), key_bias=jnp.asarray(bias)))
    spoiled = np.isnan(output).any(-1)
    at = np.arange(T) + S - T
    assert (spoiled[:, :, 1] == ((at >= 100) & (at < 120))).all()
    assert not spoiled[:, :, [0, 2, 3]].any()


def of_two(x: np.ndarray) -> np.ndarray:
    return np.stack([x, 0.5 * x])


def test_vmap_is_one_call_that_drops_as_every_single_one() -> None:
    query, key, value = ROWS.values()
    dropout = {"dropout_p": 0.3, "dropout_key": jax.random.key(5), "backend": "native"}
    one = jax.value_and_grad(partial(loss, **dropout), argnums=(0, 1, 2, 3))
    mapped = jax.vmap(jax.vmap(one, (0, None, None, None)), (None, 0, None, 0))
    args = of_two(query), of_two(key), value, of_two(SLOPES)
    assert str(jax.make_jaxpr(mapped)(*args)).count("ffi_call[") == 2
    found = jax.jit(mapped)(*args)
    for m in range(2):
        for n in range(2):
            single = one(args[0][n], args[1][m], value, args[3][m])
            for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(single), strict=True):
                np.testing.assert_allclose(got[m, n], expected, rtol=1e-5, atol=1e-5)


def test_code_compiled_for_another_device_contains_the_loop() -> None:
    shapes = [jax.ShapeDtypeStruct((1, 300, 2, 16), jnp.float32)] * 3
    traced = jax.jit(jax.grad(lambda *x: alibi_attention(*x).sum())).trace(*shapes)
    here, there = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "cuda"))
    assert here.count("@alibi_xla_") == 2
    assert "stablehlo.while" not in here
    assert "@alibi_xla_" not in there
    assert "stablehlo.while" in there
    named = jax.jit(partial(alibi_attention, backend="native")).trace(*shapes)
    assert "@alibi_xla_" in named.lower(lowering_platforms=("cuda",)).as_text(), "XLA refuses it there"


def test_gradients_of_slopes_are_computed_only_on_request() -> None:
    shape, heads = jax.ShapeDtypeStruct((1, 300, 2, 16), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.float32)
    for argnums, results in ((0, 0), ((0, 1), 2)):
        call = jax.grad(lambda q, m: alibi_attention(q, q, q, m, backend="native").sum(), argnums=argnums)
        (line,) = [x for x in jax.jit(call).lower(shape, heads).as_text().splitlines() if "@alibi_xla_backward" in x]
        assert line.split("->")[-1].count("tensor<1x2xf32>") == results


def test_sharded_arrays_are_gathered_and_give_the_same() -> None:
    mesh = jax.make_mesh((2,), ("sequences",), axis_types=(jax.sharding.AxisType.Auto,))
    here = [jax.device_put(x, NamedSharding(mesh, P("sequences"))) for x in ROWS.values()]
    run = jax.jit(jax.grad(partial(loss, backend="native"), argnums=(0, 1, 2)))
    assert "all-gather" in run.lower(*here).compile().as_text()
    for one, other in zip(run(*here), run(*ROWS.values()), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_parts_of_a_shard_map_drop_as_if_each_were_alone() -> None:
    mesh = jax.make_mesh((2,), ("sequences",), axis_types=(jax.sharding.AxisType.Auto,))
    run = partial(alibi_attention, dropout_p=0.3, dropout_key=jax.random.key(5), backend="native")
    sharded = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("sequences"), out_specs=P("sequences")))(*ROWS.values())
    for n in range(B):
        np.testing.assert_array_equal(sharded[n : n + 1], run(*(x[n : n + 1] for x in ROWS.values())))


def test_an_invariant_chunk_has_the_bits_of_pytorchs_whole_text() -> None:
    rows = {name: x[:, :T] for name, x in ROWS.items()}
    whole = api.alibi_attention(*(torch.tensor(x).transpose(1, 2) for x in rows.values()), SLOPES, invariant=True)
    keys = {name: x if name == "query" else x[:, :100] for name, x in rows.items()}
    chunk = alibi_attention(
        **keys | {"query": rows["query"][:, 37:100]}, slopes=SLOPES, query_offset=37, invariant=True
    )
    np.testing.assert_array_equal(chunk, whole.transpose(1, 2)[:, 37:100])
    with pytest.raises(ValueError, match="invariant=True does not support prefix_len"):
        alibi_attention(**rows, prefix_len=np.int32([3, 4]), invariant=True)


def test_explain_gives_the_text_that_it_gives_for_tensors() -> None:
    rows = {name: RNG.standard_normal((1, 900, 4, 16)).astype(np.float32) for name in ROWS}
    said = str(explain(**rows, slopes=SLOPES[:1], window=500)).splitlines()
    tensors = [torch.tensor(x).transpose(1, 2) for x in rows.values()]
    of_torch = str(api.explain(*tensors, torch.tensor(SLOPES[:1]), window=500, backend="native")).splitlines()
    assert said[0] == of_torch[0]
    assert said[1:5] == [
        "  native     runs (picked by auto)",
        "  loop       can run; auto does not pick it on this device",
        "  dense      can run; auto does not pick it on this device",
        "  fused      cannot: it runs on CUDA devices but query is on cpu",
    ]
    assert said[5:] == of_torch[-8:]
    assert said[5].startswith("head")


def test_explain_of_the_loop_counts_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_bound", lambda _: "there is no C++ compiler 'g++'")
    rows = [RNG.standard_normal((1, 900, 4, 16)).astype(np.float32) for _ in range(3)]
    said = str(explain(*rows, np.float32([4.0, 4.0, 0.0, 0.0]))).splitlines()
    assert said[1:3] == ["  native     cannot: there is no C++ compiler 'g++'", "  loop       runs (picked by auto)"]
    steep, flat = said[6].split(), said[9].split()
    assert int(steep[2]) <= 260, "its own tile and the one before; the last block of queries begins early, to be full"
    assert flat[2:] == ["900", f"{128 * (128 * 28 + 900) / 900**2:.1%}", "900"], "backward needs all of these"
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda *x: explain(*x) and x)(*rows)


def test_denormal_numbers_are_kept() -> None:
    query, key, value = (np.ones((1, 64, 2, 16), np.float32) for _ in range(3))
    value *= np.float32(1e-40)
    output, pull = jax.vjp(lambda *x: alibi_attention(*x, backend="native"), query, key, value)
    np.testing.assert_allclose(np.asarray(output).view(np.int32), value.view(np.int32), atol=2)
    of_value = np.asarray(pull(jnp.full_like(output, 1e-40))[2])
    assert 0 < of_value.min() < of_value.max() < 1e-38
    assert float(jnp.float32(1e-20) * jnp.float32(1e-20)) == 0, "XLA flushes others as before"


def test_torch_keeps_denormal_numbers_even_if_its_thread_flushes_them() -> None:
    query, key, value = (torch.ones(1, 2, 600, 16) * size for size in (1.0, 1e-39, 1e-39))
    plain = api.alibi_attention(query, key, value, backend="native")
    assert torch.set_flush_denormal(True)
    try:
        flushed = api.alibi_attention(query, key, value, backend="native")
    finally:
        torch.set_flush_denormal(False)
    assert (plain > 0).all()
    assert torch.equal(plain.view(torch.int32), flushed.view(torch.int32))


def test_without_a_compiler_native_raises_and_auto_takes_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_bound", lambda _: "there is no C++ compiler 'g++'")
    with pytest.raises(
        ValueError, match="'native' cannot run this: there is no C\\+\\+ compiler 'g\\+\\+'; backend='auto'"
    ):
        alibi_attention(*ROWS.values(), backend="native")
    assert "ffi_call" not in str(jax.make_jaxpr(alibi_attention)(*ROWS.values()))


def test_the_reason_on_another_device_names_that_device() -> None:
    assert native.why_not({"gpu"}, jnp.float32) == "it runs on the CPU but query is on gpu"


def test_a_binding_of_another_version_is_an_error_of_jax() -> None:
    assert native.why_not({"cpu"}, jnp.float32) is None
    call = jax.ffi.ffi_call("alibi_xla_forward", [jax.ShapeDtypeStruct((1,), jnp.float32)])
    numbers = dict.fromkeys(("causal", "for_backward", "dropout_threshold", "dropout_head", "dropout_key"), 0)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"called with 1 arrays for 1 results.*of different versions"):
        call(jnp.ones(3), **numbers, dropout_factor=1.0)


def test_export_names_the_unstable_target_and_takes_the_loop() -> None:
    from jax import export

    shape = jax.ShapeDtypeStruct((1, 300, 2, 16), jnp.float32)
    with pytest.raises(ValueError, match="alibi_xla_forward"):
        export.export(jax.jit(alibi_attention))(shape, shape, shape)
    assert export.export(jax.jit(partial(alibi_attention, backend="loop")))(shape, shape, shape)


def test_threads_of_both_frameworks_in_one_process_change_no_bit() -> None:
    """JAX first, then torch next to it, both with two threads, and at the same time."""
    program = """
        import concurrent.futures, sys
        import jax, numpy as np
        from alibi_attn.jax import alibi_attention
        rng = np.random.default_rng(0)
        rows = [rng.standard_normal((2, 300, 2, 16)).astype(np.float32) for _ in range(3)]
        def step(*x):
            output, pull = jax.vjp(lambda *x: alibi_attention(*x, backend="native"), *x)
            return output, *pull(output)
        step = jax.jit(step)
        alone = [np.asarray(x) for x in step(*rows)]
        assert "torch" not in sys.modules
        import torch
        from alibi_attn.attention.api import alibi_attention as of_torch
        torch.set_num_threads(2)
        def torch_step():
            leaves = [torch.tensor(x).transpose(1, 2).contiguous().requires_grad_() for x in rows]
            output = of_torch(*leaves, backend="native")
            grads = torch.autograd.grad(output, leaves, output.detach())
            return [x.detach().transpose(1, 2).numpy() for x in (output, *grads)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = [pool.submit(lambda: [np.asarray(x) for x in step(*rows)]) for _ in range(8)]
            found += [pool.submit(torch_step) for _ in range(8)]
            for one in found:
                for x, y in zip(one.result(), alone, strict=True):
                    np.testing.assert_array_equal(x, y)
        """
    printed("-c", textwrap.dedent(program), OMP_NUM_THREADS="2")


@pytest.mark.parametrize("backend", ["native", "dense", "loop"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(backend):
    given = {"key_mask": np.arange(S) >= np.array([[0], [90]]), "return_lse": True, "backend": backend}

    def results(at: slice) -> list[jax.Array]:
        """Output and lse; gradients of `native`, since XLA sums others in an order that depends on the batch."""
        own = given | {"key_mask": given["key_mask"][at]}
        inputs = [x[at] for x in ROWS.values()]
        found, pullback = jax.vjp(lambda q, k, v: alibi_attention(q, k, v, SLOPES[0], **own), *inputs)
        return [*found, *(pullback(jax.tree.map(jnp.cos, found)) if backend == "native" else ())]

    whole = results(slice(None))
    for row in range(B):
        at = slice(row, row + 1)
        for x, y in zip(whole, results(at), strict=True):
            assert np.array_equal(x[at], y)
