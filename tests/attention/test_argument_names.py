"""Another library's argument name raises a TypeError that names ours, and signatures do not list it."""

import inspect

import pytest
import torch

from alibi_attn import (
    ALiBiAttention,
    ALiBiPositionalBias,
    ALiBiTransformerBlock,
    alibi_attention,
    alibi_attention_varlen,
    explain,
    forgetting_attention,
    toeplitz_attention,
)
from alibi_attn.attention.argument_names import OURS, PYTORCH_DEFAULTS

X = torch.zeros(1, 2, 4, 8)
CALLS = {
    "alibi_attention": lambda **other: alibi_attention(X, X, X, **other),
    "alibi_attention_varlen": lambda **other: alibi_attention_varlen(X[0], X[0], X[0], torch.tensor([0, 2]), **other),
    "forgetting_attention": lambda **other: forgetting_attention(X, X, X, X[..., 0], **other),
    "toeplitz_attention": lambda **other: toeplitz_attention(X, X, X, torch.zeros(2, 4), **other),
    "explain": lambda **other: explain(X, X, X, **other),
    "ALiBiAttention": lambda **other: ALiBiAttention(8, 2, **other),
    "forward": lambda **other: ALiBiAttention(8, 2)(X[0], **other),
    "ALiBiTransformerBlock": lambda **other: ALiBiTransformerBlock(8, 2, **other),
    "ALiBiPositionalBias": lambda **other: ALiBiPositionalBias(2, **other),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("foreign", "ours"),
    [("max_seq_len", "no maximum length"), ("dropout", "dropout_p"), ("attention_mask", "key_mask"), ("windw", None)],
)
def test_an_unknown_argument_names_ours(call, foreign, ours):
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{foreign}'{'; .*' + ours if ours else '$'}"):
        call(**{foreign: None})


@pytest.mark.parametrize("layer", [ALiBiAttention, ALiBiTransformerBlock])
def test_an_unknown_argument_of_a_layer_is_reported_before_a_missing_one(layer):
    with pytest.raises(TypeError, match=rf"^{layer.__name__}\(\) got .* 'd_model'; here it is embed_dim$"):
        layer(d_model=64, nhead=8)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'num_heads'"):
        layer(embed_dim=64)


@pytest.mark.parametrize(
    "function",
    [
        alibi_attention,
        alibi_attention_varlen,
        forgetting_attention,
        ALiBiAttention,
        ALiBiAttention.forward,
        ALiBiPositionalBias,
    ],
)
def test_a_signature_has_no_unknown_arguments(function):
    parameters = inspect.signature(function).parameters
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    assert not OURS.keys() & parameters.keys()


def test_the_defaults_are_those_of_the_signature() -> None:
    """They are written twice, for readers' convenience."""
    keywords = [p for p in inspect.signature(alibi_attention).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert {p.name: p.default for p in keywords} == {**PYTORCH_DEFAULTS, "backend": "auto"}
