"""In JAX too: a backend computes the fields that it declares, and no call has another one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from used_fields import FIELDS, SLOPES, result, rows

from alibi_attn.attention.call.reads import NUMBERED_DROPOUT
from alibi_attn.attention.call.spec import AttentionSpec, plain_fields
from alibi_attn.jax import alibi_attention, attention, explain, explanation, forgetting, forgetting_attention

BACKENDS = [name for name in attention.READS if name != "fused"]  # needs a GPU
PAIRS = [(name, field) for name in BACKENDS for field in sorted(attention.READS[name] - NUMBERED_DROPOUT)]
ROWS = [jnp.asarray(x.transpose(1, 2).numpy()) for x in rows()]


def _array(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_array, x))
    return jnp.asarray(x.numpy()) if isinstance(x, torch.Tensor) else x


def answered(field: str, backend: Any) -> Any:
    """(output, lse) if the call returns lse."""
    options = {name: _array(x) for name, x in FIELDS[field].options.items()}
    if "log_fgate" in options:
        return forgetting_attention(*ROWS, options.pop("log_fgate"), SLOPES, backend=backend, **options)
    if options.get("dropout_p"):
        options["dropout_key"] = jax.random.key(3)
    return alibi_attention(*ROWS, SLOPES, backend=backend, **options)


def assert_computed(field: str, backend: str) -> None:
    drawn = FIELDS[field]
    expected, expected_lse = result(drawn.function, drawn.options, "reference")
    found = answered(field, backend)
    output, lse = found if isinstance(found, tuple) else (found, None)
    np.testing.assert_allclose(np.asarray(output).swapaxes(1, 2), expected, rtol=1e-4, atol=1e-4)
    if expected_lse is not None:
        np.testing.assert_allclose(np.asarray(lse), expected_lse, rtol=1e-4, atol=1e-4)


# Compiling takes most of the time.
COMPILED = [pytest.param(*pair, marks=() if pair[0] == "native" else pytest.mark.long) for pair in PAIRS]


@pytest.mark.parametrize(("backend", "field"), COMPILED)
def test_a_backend_computes_what_it_declares(backend: str, field: str) -> None:
    assert_computed(field, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_drops_the_weights_that_all_drop(backend: str) -> None:
    expected = answered("dropout_p", "dense")
    np.testing.assert_allclose(answered("dropout_p", backend), expected, rtol=1e-4, atol=1e-4)
    plain = alibi_attention(*ROWS, SLOPES, backend=backend)
    assert np.abs(np.asarray(expected - plain)).max() > 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capped(AttentionSpec[jax.Array]):
    """A description with a field that nothing computes."""

    logit_cap: float = 0.0


Capped.PLAIN = plain_fields(Capped)


@pytest.mark.parametrize("backend", attention.Backend.__args__)
def test_a_made_up_field_is_refused(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_spec = attention.make_spec

    def capped(*arrays: Any, **options: Any) -> Capped:
        return Capped(**vars(make_spec(*arrays, **options)), logit_cap=2.0)

    for module in (attention, explanation, forgetting):
        monkeypatch.setattr(module, "make_spec", capped)
    for options in ({}, {"window": [3, 4, 3, 4]}):
        with pytest.raises(ValueError, match=f"'{backend}' cannot run this: it does not compute logit_cap"):
            alibi_attention(*ROWS, SLOPES, backend=backend, **options)
    with pytest.raises(ValueError, match="logit_cap"):
        explain(*ROWS, SLOPES, backend=backend)
    with pytest.raises(ValueError, match="forgetting_attention does not support logit_cap; use alibi_attention"):
        forgetting_attention(*ROWS, jnp.zeros((2, 4, 90)), backend=backend)
