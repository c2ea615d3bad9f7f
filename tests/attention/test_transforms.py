"""torch.compile, torch.func and autocast with every option of a call, and no derivative of a derivative."""

from collections.abc import Callable

import pytest
import torch
from attention_calls import assert_close, assert_equal
from attention_checks import ON_CPU, WITH_KEY_BIAS
from torch import Tensor
from torch.utils._pytree import tree_map
from used_fields import FIELDS, SLOPES, S, rows

from alibi_attn import alibi_attention, forgetting_attention, toeplitz_attention
from alibi_attn.attention.run.dispatch import BACKENDS
from alibi_attn.attention.run.splitting import split

FUNCTIONS = {f.__name__: f for f in (alibi_attention, forgetting_attention, toeplitz_attention)}
# Seeds of dropout: test_dropout.py.
OPTIONS = [name for name, drawn in FIELDS.items() if drawn.function in FUNCTIONS and "dropout_p" not in drawn.options]
LEAVES = ("query", "key", "value", "slopes", "key_bias", "log_fgate", "table", "sink_logits")
IN_SHORT_TESTS = ("window", "head_windows", "prefix_len", "key_bias", "query_start", "table", "sink_logits")
MAPPED = [  # without a table, which no kernel maps, and the positions of `by_position`, which banded does not read
    (field, name)
    for name in ON_CPU
    for field in OPTIONS
    if not split(frozenset({field}), BACKENDS[name].READS | {"sink_logits"}).unread
    and (field, name) not in (("table", "native"), ("by_position", "banded"))
]

Attend = Callable[..., tuple[Tensor, ...]]


def call_of(field: str, backend: str = "native") -> tuple[Attend, dict[str, Tensor]]:
    """(a function of tensors, these tensors) of the call with this field."""
    drawn = FIELDS[field]
    given = dict(zip(("query", "key", "value"), rows(), strict=True)) | drawn.options
    given |= {} if "table" in given else {"slopes": torch.tensor(SLOPES)}
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor | tuple)}
    options = {name: x for name, x in given.items() if name not in tensors}

    def attend(**tensors: Tensor) -> tuple[Tensor, ...]:
        found = FUNCTIONS[drawn.function](**tensors, **options, backend=backend)
        return found if isinstance(found, tuple) else (found,)

    return attend, tensors


def total(results: tuple[Tensor, ...]) -> Tensor:
    return sum(x.sin().sum() for x in results)


def of_leaves(attend: Attend, tensors: dict[str, Tensor]) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """(a number as a function of the tensors that may have gradients, these tensors)."""
    names = [name for name in LEAVES if name in tensors]
    leaves = [tensors[name].clone().requires_grad_() for name in names]
    return lambda *leaves: total(attend(**tensors | dict(zip(names, leaves, strict=True)))), leaves


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("field", "backend"),
    [
        *(pytest.param(name, "native", marks=() if name in IN_SHORT_TESTS else pytest.mark.long) for name in OPTIONS),
        *(pytest.param("key_mask", name, marks=pytest.mark.long) for name in ON_CPU if name != "native"),
    ],
)
def test_compiled_to_one_graph_gradients_are_the_same(field: str, backend: str) -> None:
    torch._dynamo.reset()
    number, leaves = of_leaves(*call_of(field, backend))
    compiled = torch.compile(number, fullgraph=True, backend="aot_eager")
    expected, found = (torch.autograd.grad(f(*leaves), leaves) for f in (number, compiled))
    (assert_equal if field == "table" else assert_close)(found, expected)


def per_distance(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients, those of slopes divided by the greatest distance: they are sums of distances."""
    return {name: x / S if name == "slopes" else x for name, x in gradients.items()}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("axis", [0, None])
@pytest.mark.parametrize(("field", "backend"), MAPPED)
def test_vmap_is_a_loop(field: str, backend: str, axis: int | None) -> None:
    """Values, gradients of each entry and of the sum. Options have an axis, or all entries share them."""
    attend, tensors = call_of(field, backend)
    if "slopes" in tensors:
        tensors["slopes"] = torch.stack([tensors["slopes"], tensors["slopes"].flip(0)])  # of each sequence
    if field in ("window", "query_start"):  # far, and before the cuts
        tensors["key"][0, 1, 40, 2] = torch.nan
    parts = [{name: x for name, x in tensors.items() if (name in LEAVES) == is_leaf} for is_leaf in (True, False)]
    others = [tree_map(lambda x: x.flip(0), part) for part in parts]
    entries = [parts, [others[0], parts[1] if axis is None else others[1]]]

    def number(leaves: dict[str, Tensor], rest: dict[str, Tensor]) -> Tensor:
        return total(attend(**leaves, **rest))

    leaves, rest = (tree_map(lambda *x: torch.stack(x), *x) for x in zip(parts, others, strict=True))
    rest = parts[1] if axis is None else rest
    mapped = torch.vmap(number, (0, axis))
    expected = torch.stack([number(*entry) for entry in entries])
    gradients = tree_map(lambda *x: torch.stack(x), *(torch.func.grad(number)(*entry) for entry in entries))
    close = {"rtol": 2e-5, "atol": 2e-5, "equal_nan": True}
    torch.testing.assert_close(mapped(leaves, rest), expected, **close)
    for found in (
        torch.vmap(torch.func.grad(number), (0, axis))(leaves, rest),
        torch.func.grad(lambda x: mapped(x, rest).sum())(leaves),
    ):
        torch.testing.assert_close(per_distance(found), per_distance(gradients), **close)


@pytest.mark.parametrize("field", OPTIONS)
def test_grad_is_that_of_autograd(field: str) -> None:
    number, leaves = of_leaves(*call_of(field, "auto" if field == "table" else "native"))
    found = torch.func.grad(number, tuple(range(len(leaves))))(*(x.detach() for x in leaves))
    assert_close(found, torch.autograd.grad(number(*leaves), leaves))


@pytest.mark.parametrize("field", OPTIONS)
def test_autocast_casts_queries_keys_and_values_only(field: str) -> None:
    attend, tensors = call_of(field, "auto")
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(**tensors)
    expected = attend(**tensors | {name: tensors[name].bfloat16() for name in ("query", "key", "value")})
    assert found[0].dtype == torch.bfloat16
    assert_equal(found, expected)


@pytest.mark.parametrize(
    ("field", "backend"),
    [
        *(("window", name) for name in ON_CPU),
        *((field, name) for field in ("key_bias", "query_bias", "table", "sink_logits") for name in WITH_KEY_BIAS),
    ],
)
def test_second_derivatives_are_refused(field: str, backend: str) -> None:
    """Of every input alone, also of the gradient of the output, and in torch.func."""
    attend, tensors = call_of(field, backend)
    number, leaves = of_leaves(attend, tensors)
    once = pytest.raises(RuntimeError, match="differentiable once")
    for first in torch.autograd.grad(number(*leaves), leaves, create_graph=True):
        with once:
            torch.autograd.grad(first.sum(), leaves[0], retain_graph=True)
    weight = torch.ones_like(leaves[0]).requires_grad_()
    given = dict(zip((name for name in LEAVES if name in tensors), leaves, strict=True))
    (of_value,) = torch.autograd.grad(attend(**tensors | given)[0], given["value"], weight, create_graph=True)
    with once:
        torch.autograd.grad(of_value.sum(), weight)
    if backend in ("reference", "dense") or field != "table":
        gradient = torch.func.grad(number, len(leaves) - 1)
        with once:
            torch.func.grad(lambda x: gradient(*leaves[:-1], x).sum())(leaves[-1].detach())
