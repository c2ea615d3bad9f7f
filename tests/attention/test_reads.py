"""Nothing ignores a part of a call: what a consumer declares it computes, and what it does not declare it refuses."""

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from used_fields import FIELDS, PLANE, SLOPES, D, H, S, T, assert_computes, result, rows

from alibi_attn import (
    alibi_attention,
    alibi_attention_varlen,
    attention_rows,
    certified_block_mask,
    explain,
    head_reach,
)
from alibi_attn.attention import api, forgetting, toeplitz, varlen
from alibi_attn.attention import rows as rows_module
from alibi_attn.attention.backends import flex
from alibi_attn.attention.backends.fused import backend as fused
from alibi_attn.attention.backends.fused.call import FIELDS as FUSED_FIELDS
from alibi_attn.attention.call import explanation
from alibi_attn.attention.call.reads import Reads
from alibi_attn.attention.call.spec import ARRAYS, AttentionSpec, plain_fields
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.attention.kept import Kept
from alibi_attn.attention.kept import attend as attend_kept
from alibi_attn.attention.operators import schema
from alibi_attn.attention.operators.operator import operator
from alibi_attn.attention.run import decoding, dispatch, invariant, space, splitting
from alibi_attn.attention.run.dispatch import BACKENDS
from alibi_attn.attention.run.execution import attend
from alibi_attn.distributed import argument_check

RUN_HERE = [name for name in BACKENDS if name != "fused"]  # interpreted, in backends/test_fused_fields.py
PAIRS = [(name, field) for name in RUN_HERE for field in sorted(BACKENDS[name].READS)]
# FlexAttention has no lse on a CPU.
PAIRS.remove(("flex", "return_lse"))


def test_every_field_has_a_call_in_which_it_changes_the_result() -> None:
    assert set(FIELDS) == {name for name, _ in AttentionSpec.PLAIN} | {"query_offset"}


def test_reference_and_dense_read_every_field() -> None:
    """Sink logits scale the output of every backend."""
    assert BACKENDS["reference"].READS == BACKENDS["dense"].READS == set(FIELDS) - {"sink_logits"}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("backend", "field"), PAIRS)
def test_a_backend_computes_what_it_declares(backend: str, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_compiled", flex_attention)  # its definition: compiling takes seconds per call
    assert_computes(field, backend)


@pytest.mark.parametrize(("backend", "field"), PAIRS)
def test_a_backend_that_no_longer_declares_a_field_refuses_or_splits_it(
    backend: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BACKENDS[backend], "READS", BACKENDS[backend].READS - {field})
    drawn = FIELDS[field]
    if field not in splitting.SPLITS:
        with pytest.raises(ValueError, match=f"backend '{backend}' cannot run this: it does not compute"):
            result(drawn.function, drawn.options, backend)
    else:
        output, _ = result(drawn.function, drawn.options, backend)
        monkeypatch.undo()
        torch.testing.assert_close(output, result(drawn.function, drawn.options, "reference")[0], rtol=1e-4, atol=1e-4)


def test_auto_takes_no_backend_that_does_not_declare_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = FIELDS["window"]
    for name in ("native", "banded"):
        monkeypatch.setattr(BACKENDS[name], "READS", BACKENDS[name].READS - {"window"})
    long = torch.randn(1, 2, 800, 16)
    assert dispatch.choose("auto", make_spec(long, long, long, window=9), long, long, long).name == "dense"
    monkeypatch.setattr(BACKENDS["dense"], "READS", BACKENDS["dense"].READS - {"window"})
    with pytest.raises(ValueError, match="'auto' cannot run this: it does not compute window; no backend can"):
        result(drawn.function, drawn.options, "auto")


def test_an_operator_reads_no_field_that_its_schema_does_not_have() -> None:
    assert {name for backend in dispatch.WITH_OPERATOR for name in BACKENDS[backend].READS} <= schema.READS
    kernels: Any = None
    with pytest.raises(AttributeError):  # the message names the kernels
        operator(kernels, frozenset({"positions"}))


def test_the_triton_kernels_get_every_array_that_they_read() -> None:
    assert {*FUSED_FIELDS} >= set(ARRAYS) & fused.READS


# --- functions ---


def _assert_same(found: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor | None]) -> None:
    """(output, lse) of two calls; lse if it was expected."""
    for x, y in zip(found, expected, strict=True):
        if y is not None:
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def _assert_same_rows(field: str, function: str = "alibi_attention", **more: Any) -> None:
    """The weights of `attention_rows`, times the values, are the output of the definition."""
    options = {name: x for name, x in FIELDS[field].options.items() if name != "return_lse"} | more
    query, key, value = rows()
    some = torch.arange(T - 1, -1, -3)  # in another order
    weights = attention_rows(query.double(), key.double(), SLOPES, rows=some, **options)
    expected = result(function, options, "reference")[0][:, :, some]
    _assert_same((weights.float() @ value.repeat_interleave(2, 1), None), (expected, None))


def _dropped_mass(options: dict[str, Any], skipped: Tensor, slopes: list[float]) -> float:
    """The largest share of a query's softmax that the skipped pairs [B, H, T, S] hold."""
    same = {name: x for name, x in options.items() if name not in ("dropout_p", "sink_logits", "return_lse")}
    query, key, _ = rows()
    weights = attention_rows(query.double(), key.double(), slopes, rows=slice(None), **same)
    return float(weights.masked_fill(~skipped, 0.0).sum(-1).max())


def _skipping(field: str) -> str:
    """`native`, or `dense` if `native` computes no such calls."""
    return "native" if not splitting.split(frozenset({field}), BACKENDS["native"].READS).unread else "dense"


STEEP = [9.0, 4.0, 1.0, 0.1]  # some keys are skipped
TOLERANCE = 2.0**-28


def _assert_reach_is_certified(field: str) -> None:
    options = FIELDS[field].options
    offset = options.get("query_offset", torch.full((2,), S - T))
    distance = (offset[:, None] + torch.arange(T))[:, None, :, None] - torch.arange(S)
    for backend in {_skipping(field), "dense"}:
        reach = head_reach(*rows()[:2], STEEP, backend=backend, **options)
        assert _dropped_mass(options, distance.abs() >= reach[..., None, None], STEEP) <= TOLERANCE


def _assert_block_mask_is_certified(field: str) -> None:
    options = FIELDS[field].options
    mask = certified_block_mask(*rows()[:2], STEEP, block_size=64, **options).to_dense().bool()
    mask = mask.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :T, :S]
    assert _dropped_mass(options, ~mask, STEEP) <= TOLERANCE


def _packed(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a batch of one, as those of one packed sequence of S tokens."""
    changed = {name: x for name, x in options.items() if name not in ("segment_ids", "query_positions")}
    return {
        name: (x[0] if isinstance(x, Tensor) and name in ("positions", "key_bias") else x)
        for name, x in changed.items()
    }


def _assert_varlen_equals_a_batch(field: str) -> None:
    _, key, value = rows()
    query = torch.randn(1, H, S, D)
    key, value = key[:1], value[:1]
    options = _packed(FIELDS[field].options)
    lengths = torch.tensor([0, 30, S])
    torch.manual_seed(5)
    found: Any = alibi_attention_varlen(
        *(x[0].transpose(0, 1) for x in (query, key, value)), lengths, SLOPES, backend="native", **options
    )
    of_batch = {
        n: (x[None] if isinstance(x, Tensor) and n in ("positions", "key_bias") else x) for n, x in options.items()
    }
    marks = (torch.arange(S) >= 30).long()[None]
    torch.manual_seed(5)
    expected: Any = alibi_attention(query, key, value, SLOPES, segment_ids=marks, backend="reference", **of_batch)
    if options.get("return_lse"):
        (found, lse), (expected, expected_lse) = found, expected
        torch.testing.assert_close(lse, expected_lse[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, expected[0].transpose(0, 1), rtol=1e-4, atol=1e-4)


def _assert_computed(field: str, function: str) -> None:
    """`forgetting_attention` or `toeplitz_attention` by `native` is the definition's."""
    options = FIELDS[field].options
    base = FIELDS["query_bias" if function == "forgetting_attention" else "table"].options
    if function == "toeplitz_attention" and field == "causal":
        base = {"table": torch.sin(torch.arange(2.0 * S - 1)).expand(H, -1)}
    _assert_same(*(result(function, base | options, x) for x in ("native", "reference")))


def _assert_invariant(field: str) -> None:
    options = FIELDS[field].options
    found = result("alibi_attention", options | {"invariant": True}, "auto")
    _assert_same(found, result("alibi_attention", options, "reference"))


def _assert_explained(field: str) -> None:
    """The line about the call says that it differs, or the numbers of the pairs that are visible do."""
    drawn = FIELDS[field]
    backend = _skipping(field)
    said, plain = (explain(*rows(), SLOPES, backend=backend, **x) for x in (drawn.options, drawn.without))
    same = (said.call, said.visible, said.scores.tolist()) == (plain.call, plain.visible, plain.scores.tolist())
    only_results = ("return_lse", "query_positions", "query_coordinates")
    assert same == (field in only_results)


def _assert_computed_in_the_plane(field: str, backend: str) -> None:
    """The result is the definition's, and another one than that of the plain call in the plane."""
    options = PLANE | FIELDS[field].options
    found, expected = (result("alibi_attention", options, x) for x in (backend, "reference"))
    _assert_same(found, expected)
    plain = {} if field in ("causal", "coordinates") else PLANE
    changed = expected[0] - result("alibi_attention", plain, "reference")[0]
    assert field == "return_lse" or float(changed.abs().max()) > 0.01, f"{field} changes nothing in its call"


def _assert_computed_by_rows(field: str) -> None:
    few, no_kernel = mock.patch.object(space, "MOST_SCORES", 2 * H * S * 9), mock.patch.dict(dispatch.PREFERRED, cpu=())
    with few, no_kernel:
        _assert_computed_in_the_plane(field, "auto")


def _assert_same_rows_with_gates(field: str) -> None:
    _assert_same_rows(field, "forgetting_attention", **FIELDS["query_bias"].options)


# By function: where its READS are, and a check that it computes a field.
FUNCTIONS: dict[str, tuple[Any, str, Callable[[str], None]]] = {
    "forgetting_attention": (forgetting, "FORGETTING", lambda field: _assert_computed(field, "forgetting_attention")),
    "toeplitz_attention": (toeplitz, "_READS", lambda field: _assert_computed(field, "toeplitz_attention")),
    "alibi_attention_varlen": (varlen, "_READS", _assert_varlen_equals_a_batch),
    "attention_rows": (rows_module, "_READS", _assert_same_rows),
    "attention_rows with log_fgate": (rows_module, "_WITH_GATES", _assert_same_rows_with_gates),
    "head_reach": (api, "_HEAD_REACH", _assert_reach_is_certified),
    "certified_block_mask": (api, "_BLOCK_MASK", _assert_block_mask_is_certified),
    "explain": (explanation, "READS", _assert_explained),
    "invariant=True": (invariant, "READS", _assert_invariant),
    "tokens in space, sorted": (space, "SORTED", lambda field: _assert_computed_in_the_plane(field, "native")),
    "tokens in space, by rows": (space, "BY_ROWS", _assert_computed_by_rows),
}
DECLARED = [
    (name, field) for name, (module, reads, _) in FUNCTIONS.items() for field in sorted(getattr(module, reads).fields)
]


@pytest.mark.parametrize(("function", "field"), DECLARED)
def test_a_function_computes_what_it_declares(function: str, field: str) -> None:
    FUNCTIONS[function][2](field)


@pytest.mark.parametrize(("function", "field"), DECLARED)
def test_a_function_that_no_longer_declares_a_field_refuses_it(
    function: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if field == "dropout_seed":
        pytest.skip("seeds are drawn afterwards")
    module, name, check = FUNCTIONS[function]
    reads = getattr(module, name)
    monkeypatch.setattr(module, name, reads._replace(fields=reads.fields - {field}))
    with pytest.raises(ValueError, match="does not support"):
        check(field)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capped(AttentionSpec[Tensor]):
    """A description with a field that nothing computes."""

    logit_cap: float = 0.0


Capped.PLAIN = plain_fields(Capped)


def capped(*tensors: Tensor, **options: Any) -> Capped:
    return Capped(**vars(make_spec(*tensors, **options)), logit_cap=2.0)


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_a_made_up_field_is_refused_by_every_backend(backend: str) -> None:
    with pytest.raises(ValueError, match=f"backend '{backend}' cannot run this: it does not compute logit_cap"):
        attend(capped(*rows()), *rows(), backend)
    with pytest.raises(ValueError, match=f"backend '{backend}' cannot run this: it does not compute logit_cap"):
        attend(capped(*rows(), window=[3, 4, 3, 4]), *rows(), backend)


@pytest.mark.parametrize("function", [*FUNCTIONS, "context parallelism"])
def test_a_made_up_field_is_refused_by_every_function(function: str) -> None:
    module, name, _ = FUNCTIONS.get(function, (argument_check, "_READS", None))
    reads: Reads = getattr(module, name)
    with pytest.raises(ValueError, match=r"does not support logit_cap; use .*, or omit it"):
        reads.check(capped(*rows()))
    reads.check(Capped(**vars(make_spec(*rows()))))


def test_parts_do_not_forget_a_made_up_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a backend that computes it: merging does not know how to split it."""
    monkeypatch.setattr(BACKENDS["native"], "READS", BACKENDS["native"].READS | {"logit_cap"})
    attend(capped(*rows()), *rows(), "native")
    with pytest.raises(ValueError, match="'native' cannot run this: it does not compute logit_cap"):
        attend(capped(*rows(), window=[3, 4, 3, 4]), *rows(), "native")


@torch.no_grad()
def test_an_option_that_decoding_does_not_read_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries over many known keys: with an option that is not in READS, `alibi_attention` computes the step."""
    monkeypatch.setattr(decoding, "LONG", 0)
    query, key, value = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 3000, 16), torch.randn(1, 2, 3000, 16)
    kept, slopes = [Kept(key, value, first=2999, norms=lambda: Norms.of(key, value))], torch.tensor([0.5, 0.1])
    bias = torch.randn(2, 3000)
    torch.testing.assert_close(
        attend_kept(query, kept, slopes, key_bias=bias), alibi_attention(query, key, value, slopes, key_bias=bias)
    )
    with pytest.raises(TypeError, match="made_up"):
        attend_kept(query, kept, slopes, made_up=1)
    monkeypatch.setattr(decoding, "READS", decoding.READS | {"key_bias"})  # declared, but not computed
    assert (
        float((attend_kept(query, kept, slopes, key_bias=bias) - attend_kept(query, kept, slopes)).abs().max()) == 0.0
    )
