"""Fake tensors, exported programs and compiled graphs: right for their sizes, with few recompilations."""

import dataclasses

import pytest
import torch
import torch._dynamo.compiled_autograd
from attention_calls import assert_close, assert_equal, draw, gradients, loss
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.export import Dim, ExportedProgram, export
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from alibi_attn import alibi_attention, forgetting_attention
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.operators.schema import Arguments, Incoming
from alibi_attn.nn import ALiBiTransformerBlock

quiet = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")


@pytest.mark.parametrize(
    ("backend", "place"),
    [
        *((name, "fake") for name in ("reference", "dense", "banded", "native")),
        ("reference", "meta"),
        ("dense", "meta"),
    ],
)
def test_tensors_without_values_have_shapes_and_dtypes(backend: str, place: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with FakeTensorMode() if place == "fake" else torch.device("meta"):
            q, k, v, m = draw(dtype=dtype)
            mask, segments, offset = torch.ones(2, 70, dtype=torch.bool), torch.ones(2, 70).long(), torch.tensor(0)
            options = {"key_mask": mask, "segment_ids": segments, "query_offset": offset, "backend": backend}
            output, lse = alibi_attention(q, k, v, m.float(), return_lse=True, **options)
            of_value, of_slopes = torch.autograd.grad(output.sum() + lse.sum(), [v, m])
        assert (output.shape, output.dtype) == (q.shape, dtype)
        assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
        assert (of_value.shape, of_value.dtype, of_slopes.shape) == (v.shape, dtype, m.shape)


def reset() -> None:
    torch._dynamo.reset()
    counters.clear()


class Attention(torch.nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return alibi_attention(q, k, v, **self.options)


# Options, backend, whether to export strictly, the length of the example, and the lengths of calls; the first is the least. The
# examples are of both kinds of length, for which kernels pay off and not; sinks may be all keys, or all but one.
EXPORTS = [
    *(
        ({"window": 300}, *how, (2, 63, 64, 65, 400))
        for how in (("auto", True, 6), ("auto", False, 80), ("dense", False, 12))
    ),
    ({"window": 300}, "native", False, 6, (2, 63, 64, 65, 400)),
    *(
        ({"window": 6, "sinks": sinks}, *how, 9, (2, 3, 4, 5, 6, 70, 300))
        for sinks in (1, 4)
        for how in (("native", False), ("native", True), ("dense", False))
    ),
    *(({"causal": False, "registers": n}, "auto", False, 9, (n + 2, 9, 70, 300)) for n in (1, 4)),
]


@pytest.mark.parametrize(("options", "backend", "strict", "t", "lengths"), EXPORTS)
def test_an_exported_program_is_right_for_all_sizes(
    options: dict, backend: str, strict: bool, t: int, lengths: tuple[int, ...]
) -> None:
    sizes = {0: Dim("batch", min=2, max=64), 2: Dim("length", min=lengths[0], max=4096)}
    example = tuple(draw(b=3, t=t, requires_grad=False)[:3])
    program = export(Attention(backend=backend, **options), example, dynamic_shapes=(sizes,) * 3, strict=strict)
    assert runs_native(program) == (backend != "dense")
    for b, length in enumerate(lengths, 2):
        inputs = draw(b=b, t=length, requires_grad=False)[:3]
        assert_close([program.module()(*inputs)], [alibi_attention(*inputs, **options, backend="reference")])


def test_an_exported_program_drops_at_every_length() -> None:
    example = tuple(draw(b=2, t=31, requires_grad=False)[:3])
    length = Dim("length", min=2, max=4096)
    program = export(Attention(backend="dense", dropout_p=0.3), example, dynamic_shapes=({2: length},) * 3)
    for t in (2, 50, 333):
        inputs = draw(t=t, requires_grad=False)[:3]
        found = []
        for function in (program.module(), Attention(backend="native", dropout_p=0.3)):
            torch.manual_seed(4)
            found.append(function(*inputs))
        assert_close(found[:1], found[1:])


def runs_native(program: ExportedProgram) -> bool:
    return "alibi_attn.native_forward" in program.graph_module.print_readable(print_output=False)


def test_exported_lengths_may_be_two_or_known_to_be_short() -> None:
    example = tuple(draw(t=12, requires_grad=False)[:3])
    short, long = (({2: Dim("length", min=2, max=most)},) * 3 for most in (32, 4096))
    assert not runs_native(export(Attention(), example, dynamic_shapes=short))
    assert runs_native(export(Attention(), example, dynamic_shapes=long))
    queries, keys = Dim("queries", min=2, max=64), Dim("keys", min=2, max=256)
    for backend in ("native", "dense"):
        q, k, v, _ = draw(t=12, s=20, requires_grad=False)
        model = Attention(backend=backend, causal=False)
        program = export(model, (q, k, v), dynamic_shapes=({2: queries}, {2: keys}, {2: keys}), strict=False)
        for t, s in ((3, 50), (50, 3)):
            inputs = draw(t=t, s=s, requires_grad=False)[:3]
            assert_close([program.module()(*inputs)], [model(*inputs)])


def test_an_exported_block_takes_padding_of_any_size() -> None:
    class Padded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = ALiBiTransformerBlock(16, 4, num_kv_heads=2, qk_norm=True)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.block(x, key_mask=mask)

    sizes = {0: Dim("batch", min=2, max=64), 1: Dim("length", min=2, max=4096)}
    model = Padded()
    example = torch.randn(3, 20, 16), torch.rand(3, 20) < 0.8
    program = export(model, example, dynamic_shapes=(sizes, sizes), strict=False)
    x, mask = torch.randn(2, 300, 16), torch.rand(2, 300) < 0.8
    assert_close([program.module()(x, mask)], [model(x, mask)])


@quiet
@pytest.mark.parametrize(("backend", "marked"), [("auto", True), ("banded", False)])
def test_one_graph_serves_all_lengths(backend: str, marked: bool) -> None:
    reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=None if marked else True, backend="aot_eager")
    for t in (12, 63, 64, 65, 128, 129, 300, 380):
        leaves = draw(t=t)
        for x in leaves[:3] if marked else ():
            torch._dynamo.mark_dynamic(x, 2)
        ours = gradients(lambda *x: compiled(*x, backend=backend), leaves)
        assert_equal(ours, gradients(lambda *x: loss(*x, backend=backend), leaves))
    assert counters["stats"]["unique_graphs"] == (2 if backend == "auto" else 1), "short and long are two backends"


OF_KNOWN_SIZE = {  # those of batch, heads and lengths are unknown to the compiler
    "slopes": torch.ones(3, 4),
    "key_mask": torch.ones(3, 9, dtype=torch.bool),
    "segment_ids": torch.ones(3, 9, dtype=torch.int64),
    "query_offset": torch.arange(3),
    "sink_logits": torch.ones(4),
    **{f"key_bias {list(shape)}": torch.ones(shape) for shape in ((9,), (1, 4, 9), (3, 1, 9))},
}


@quiet
@pytest.mark.parametrize("option", OF_KNOWN_SIZE)
def test_options_of_known_size_fit_lengths_that_are_not_known(option: str) -> None:
    """As a Parameter has it, whose sizes are numbers in a graph with dynamic shapes."""
    reset()
    given, name = OF_KNOWN_SIZE[option], option.split()[0]
    torch._dynamo.mark_static(given)

    def checked(q: Tensor, k: Tensor, given: Tensor) -> Tensor:
        return getattr(make_spec(q, k, k, **{name: given}), "key_segments" if name == "segment_ids" else name) + 0

    q, k, _, _ = draw(b=3, t=5, s=9, requires_grad=False)
    compiled = torch.compile(checked, fullgraph=True, dynamic=True, backend="eager")
    assert torch.equal(compiled(q, k, given), checked(q, k, given))


@quiet
def test_one_graph_takes_every_query_offset() -> None:
    reset()

    def position(q: Tensor, k: Tensor, offset: int) -> Tensor:
        return q.new_full((), make_spec(q, k, k, query_offset=offset).query_offset)

    q, k, _, _ = draw(b=3, t=5, s=9, requires_grad=False)
    compiled = torch.compile(position, fullgraph=True, dynamic=True, backend="eager")
    assert [int(compiled(q, k, offset)) for offset in (7, 3)] == [7, 3]


@quiet
def test_one_graph_with_gates_serves_all_lengths() -> None:
    def gated(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        return forgetting_attention(q, k, v, gates, backend="dense")

    reset()
    compiled = torch.compile(gated, fullgraph=True, dynamic=True, backend="aot_eager")
    for b, t in ((3, 12), (2, 65)):
        q, k, v, _ = draw(b=b, t=t, requires_grad=False)
        gates = -torch.rand(q.shape[:3])
        assert_equal([compiled(q, k, v, gates)], [gated(q, k, v, gates)])
    assert counters["stats"]["unique_graphs"] == 1


@quiet
def test_a_scale_may_change_without_new_graphs() -> None:
    reset()
    compiled = torch.compile(lambda s, *x: loss(*x, scale=s, backend="native"), fullgraph=True, backend="aot_eager")
    leaves = draw()
    for scale in (0.3, -0.3, 0.7, 0.0, 1.5, -2.5, 0.3, 0.11, 0.12, 0.13, 0.14):
        ours = gradients(lambda *x, s=scale: compiled(s, *x), leaves)
        assert_equal(ours, gradients(lambda *x, s=scale: loss(*x, scale=s, backend="native"), leaves))
    assert counters["stats"]["unique_graphs"] <= 4


@quiet
def test_compiled_transforms_are_right_or_refused() -> None:
    reset()
    q, k, v, m = draw(2, requires_grad=False)

    def one(*x):
        return alibi_attention(*x, backend="native")

    def of_query(q):
        return one(q, k[0], v[0]).sum()

    compiled = torch.compile(vmap(one), fullgraph=True, backend="aot_eager")
    assert_close([compiled(q, k, v, m)], [vmap(one)(q, k, v, m)])
    for transformed in (lambda q: jvp(of_query, (q,), (q,)), grad(of_query)):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"outside torch.func or inside vmap only"):
            torch.compile(transformed, fullgraph=True, backend="aot_eager")(q[0])
    auto = torch.compile(grad(lambda q: loss(q, k[0], v[0])), fullgraph=True, backend="aot_eager")
    assert_close([auto(q[0])], [grad(lambda q: loss(q, k[0], v[0]))(q[0])])


@quiet
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # about shapes
@pytest.mark.parametrize(
    ("backend", "trace"),
    [("dense", "make_fx"), ("native", "make_fx"), ("native", "make_fx symbolic"), ("dense", "torch.jit.trace")],
)
def test_a_traced_program_is_right_for_other_numbers(backend: str, trace: str) -> None:
    """Also for NaN and inf, if the traced inputs had them."""

    def attention(q, k, v):
        return alibi_attention(q, k, v, [0.5, 0.25, 0.0, -0.01], backend=backend)

    first, second = (draw(t=30, requires_grad=False)[:3] for _ in range(2))
    second[1][0, 0, 20] = second[2][1, 1, 29] = torch.nan
    if trace == "torch.jit.trace":
        traced = torch.jit.trace(attention, first, check_trace=False)
    else:
        traced = make_fx(attention, tracing_mode="symbolic" if "symbolic" in trace else "real")(*first)
    for inputs in (first, second):
        torch.testing.assert_close(traced(*inputs), attention(*inputs), equal_nan=True)


@quiet
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_backward_compiles_on_its_own() -> None:
    reset()
    leaves = draw()
    exact = gradients(lambda *x: loss(*x, backend="native"), leaves)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        assert_close(gradients(lambda *x: loss(*x, backend="native"), leaves), exact)


@pytest.mark.parametrize("backend", ["banded", "native"])
@pytest.mark.parametrize("kind", ["plain", "everything"])
def test_both_operators_pass_torchs_own_checks(backend: str, kind: str) -> None:
    q, k, v, m = draw(t=66, dtype=torch.float64)
    right = mask = segments = key_bias = query_bias = seed = None
    if kind == "everything":
        m, right = (torch.rand(2, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
        mask, segments = torch.rand(2, 66) < 0.8, torch.randint(0, 2, (2, 66))
    if kind == "everything" and backend == "native":
        key_bias, query_bias = (torch.randn(2, 4, 66, dtype=torch.float64).requires_grad_() for _ in range(2))
        seed = torch.tensor([[7, 0, 0, 0]])
    spec = make_spec(
        q, k, v, m, causal=right is None, right_slopes=right, key_mask=mask, segment_ids=segments, key_bias=key_bias
    )
    spec = dataclasses.replace(spec, query_bias=query_bias, dropout_p=0.0 if seed is None else 0.2, dropout_seed=seed)
    leaves = (
        x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in Arguments.of(spec, q, k, v)
    )
    arguments = Arguments(*leaves)
    forward, backward = (getattr(torch.ops.alibi_attn, f"{backend}_{way}").default for way in ("forward", "backward"))
    torch.library.opcheck(forward, tuple(arguments))
    output, lse, *saved = (x.detach() for x in forward(*arguments))
    incoming = Incoming(
        torch.randn_like(output),
        None if kind == "plain" else torch.ones_like(lse),
        output,
        lse,
        *[kind == "everything"] * 2,
    )
    detached = (x.detach() if isinstance(x, Tensor) else x for x in arguments)
    torch.library.opcheck(backward, (*incoming, *detached, *saved))
