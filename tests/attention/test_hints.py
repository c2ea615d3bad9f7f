"""Another library's argument name raises a TypeError that names ours, and signatures do not list it."""

import importlib
import inspect
import re
import subprocess
import sys

import pytest
import torch

import alibi_attn
from alibi_attn import (
    ALiBiAttention,
    ALiBiPositionalBias,
    ALiBiTransformerBlock,
    alibi_attention,
    alibi_attention_varlen,
    alibi_bias,
    explain,
    forgetting_attention,
    toeplitz_attention,
)
from alibi_attn.attention.call.hints import OURS
from alibi_attn.attention.call.options import DEFAULTS
from alibi_attn.lazy import OURS as NAMES

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
    [
        ("max_seq_len", "no maximum length"),
        ("dropout", "dropout_p"),
        ("d_ff", "ffn_dim"),
        ("attention_mask", "key_mask"),
        ("pair_bias", "scaled_dot_product_attention; slopes .* key_bias .* toeplitz_attention"),
        ("coords", "positions"),
        ("windw", None),
    ],
)
def test_an_unknown_argument_names_ours(call, foreign, ours):
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{foreign}'{'; .*' + ours if ours else '$'}"):
        call(**{foreign: None})


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"ALiBiAttention", "ALiBiTransformerBlock"}))
def test_a_bias_names_ours(name):
    """In the constructors of the layers, `bias` is that of the linear layers."""
    with pytest.raises(TypeError, match=r"'bias'; here it is slopes .* key_bias .* toeplitz_attention"):
        CALLS[name](bias=None)


@pytest.mark.parametrize("layer", [ALiBiAttention, ALiBiTransformerBlock])
def test_a_mask_by_position_is_refused(layer):
    with pytest.raises(
        TypeError, match=rf"^{layer.__name__} takes x by position but got a Tensor .*: key_mask \[B, S\]"
    ):
        layer(8, 2)(X[0], torch.ones(2, 4).bool())


@pytest.mark.parametrize("layer", [ALiBiAttention, ALiBiTransformerBlock])
def test_an_unknown_argument_of_a_layer_is_reported_before_a_missing_one(layer):
    with pytest.raises(TypeError, match=rf"^{layer.__name__}\(\) got .* 'd_model'; here it is embed_dim$"):
        layer(d_model=64, nhead=8)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'num_heads'"):
        layer(embed_dim=64)


FOREIGN = {
    "get_alibi_slopes": "from alibi_attn import get_alibi_slopes",
    "visualize_alibi_bias": "from alibi_attn import visualize_alibi_bias",
    "ALiBiMultiHeadAttention": "from alibi_attn.nn import ALiBiMultiHeadAttention",
    "build_alibi_tensor": "import alibi_attn; alibi_attn.build_alibi_tensor",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_name_of_other_code_names_ours(name):
    with pytest.raises(ImportError, match=rf"^alibi_attn(\.nn)? has no '{name}'; here it is {re.escape(NAMES[name])}$"):
        exec(FOREIGN[name])
    package, _, ours = NAMES[name].split("(")[0].rpartition(".")
    assert hasattr(importlib.import_module(package or "alibi_attn"), ours)


def test_an_unknown_name_is_an_attribute_error():
    for package in ("alibi_attn", "alibi_attn.nn"):
        assert not hasattr(importlib.import_module(package), "nothing")


@pytest.mark.parametrize("home", ["hf", "nn", "distributed"])
def test_a_name_of_another_package_names_it(home):
    module = importlib.import_module(f"alibi_attn.{home}")
    for name in set(module.__all__) - set(alibi_attn.__all__):
        with pytest.raises(ImportError, match=rf"^alibi_attn has no '{name}'; here it is alibi_attn\.{home}\.{name}$"):
            getattr(alibi_attn, name)


def test_a_package_that_is_not_imported_is_an_attribute_error_that_says_so():
    code = "import sys, alibi_attn; print('torch' in sys.modules); alibi_attn.hf.patch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n"
    assert (
        "AttributeError: module 'alibi_attn' has no attribute 'hf'; it is a module: import alibi_attn.hf" in done.stderr
    )


def test_a_method_of_other_code_names_ours():
    bias = ALiBiPositionalBias(2)
    with pytest.raises(AttributeError, match=r"here it is bias\(query_len, key_len\)"):
        bias.get_bias_for_kv_cache(1, 4)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        bias.nothing  # noqa: B018
    assert bias(1, 4).shape == (2, 1, 4)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ALiBiAttention(512, 8, 2048),
        lambda: ALiBiTransformerBlock(512, 8, 2048, 1024),
        lambda: ALiBiPositionalBias(8, 2048),
    ],
)
def test_a_maximum_length_by_position_is_named(call):
    with pytest.raises(TypeError, match=r"by position but got .* there is no maximum length"):
        call()


def test_a_number_of_heads_is_no_slope():
    with pytest.raises(TypeError, match=r"is the number 8 .* alibi_bias\(alibi_slopes\(8\), 32\); .* device by name"):
        alibi_bias(8, 32, "cpu")


@pytest.mark.parametrize(
    "function",
    [
        alibi_attention,
        alibi_attention_varlen,
        forgetting_attention,
        ALiBiAttention,
        ALiBiAttention.forward,
        ALiBiTransformerBlock.forward,
        ALiBiPositionalBias,
    ],
)
def test_a_signature_has_no_unknown_arguments(function):
    parameters = inspect.signature(function).parameters
    assert not parameters.keys() & {"more", "unknown"}
    assert OURS.keys() & parameters.keys() <= ({"bias"} if function is ALiBiAttention else set())


def test_the_defaults_are_those_of_the_signature() -> None:
    """They are written twice, for readers' convenience."""
    keywords = [p for p in inspect.signature(alibi_attention).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert {p.name: p.default for p in keywords} == {**DEFAULTS, "invariant": False, "backend": "auto"}
