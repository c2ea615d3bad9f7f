"""The kernels of other systems, run by qemu and Wine: conformance cases, random calls, decoding, dropout, attacks."""

from collections.abc import Iterator

import pytest
import torch
from conformance_emulated import WRONG, attacks_of, cases_of, draws_of
from decoder_oracle import STEP_ERRORS
from emulated_kernels import TARGETS, Emulated, Target, emulating, why_not
from transformers import BloomConfig, BloomForCausalLM

from alibi_attn import alibi_attention
from alibi_attn.attention.backends.native import build, decoding
from alibi_attn.attention.certificate.norms import Norms
from alibi_attn.hf import ALiBiCache, patch

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", params=TARGETS, ids=lambda target: target.name)
def target(request: pytest.FixtureRequest) -> Target:
    reason = why_not(request.param)
    if reason is not None:
        pytest.skip(f"{request.param.name}: {reason}")
    return request.param


@pytest.fixture(scope="module")
def emulated(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    """Every call in this file runs on the emulated system."""
    with emulating(target, tmp_path_factory.mktemp("emulated")) as kernels:
        yield kernels


def test_emulated_kernels_give_the_definition_and_no_attack_breaks_their_certificate(
    emulated: Emulated, target: Target
) -> None:
    before = emulated.calls
    found = cases_of() | draws_of(500, target) | attacks_of(500, target)
    assert not any(found[name] for name in WRONG), found
    assert emulated.calls >= before + 2 * found["cases"], "the cases did not reach the emulated kernels"


@pytest.mark.parametrize("dtype", decoding.DTYPES, ids=str)
def test_emulated_decoding_gives_the_definition(dtype: torch.dtype, emulated: Emulated) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, length, 64).to(dtype) for length in (2, 1000, 1000))
    norms = Norms(decoding.tile_norms(key), decoding.tile_norms(value))
    tolerance, before = torch.finfo(dtype).eps / 32, emulated.calls
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.001])
    output = decoding.decode(
        query, key, value, slopes, norms=norms, visible=None, window=None, scale=0.125, tolerance=tolerance
    )
    assert emulated.calls == before + 1
    exact = alibi_attention(query.double(), key.double(), value.double(), slopes, scale=0.125, backend="reference")
    torch.testing.assert_close(output.double(), exact, atol=4 * torch.finfo(dtype).eps, rtol=4 * torch.finfo(dtype).eps)
    rows, weight = torch.randn(3, 100).to(dtype), torch.randn(50, 100).to(dtype)
    products = rows.double() @ weight.double().mT
    torch.testing.assert_close(
        decoding.linear(rows, weight, None).double(), products, atol=60 * torch.finfo(dtype).eps, rtol=0
    )


@pytest.mark.parametrize("dtype", decoding.DTYPES, ids=str)
def test_emulated_layers_give_the_logits_of_a_whole_pass(dtype: torch.dtype, emulated: Emulated) -> None:
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=128, hidden_size=64, n_head=4, n_layer=2)).eval()
    ids, cache = torch.randint(128, (1, 100)), ALiBiCache()
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, 70:]
        patch(model.to(dtype))
        model(ids[:, :70], past_key_values=cache, use_cache=True)
        before = emulated.calls
        logits = torch.cat([model(ids[:, n : n + 1], past_key_values=cache).logits for n in range(70, 100)], 1)
    assert emulated.calls == before + 2 * 30, "a step is not one call of all layers, and one of the head"
    error = (logits.float() - expected).abs().max() / expected.abs().max()
    assert error <= STEP_ERRORS[dtype], error


@pytest.mark.parametrize(
    "options",
    [
        {"dropout_p": 0.5},
        {"dropout_p": 0.5, "prefix_len": torch.tensor([100])},  # parts, with the numbers of their queries and keys
        {"positions": torch.rand(1, 300, 2, generator=torch.Generator().manual_seed(2)) * 50, "causal": False},
    ],
    ids=["dropout", "dropout in parts", "plane"],
)
def test_emulated_kernels_weigh_keys_as_here(options: dict, emulated: Emulated) -> None:
    def gradient() -> torch.Tensor:
        """Gradient of the summed outputs by the values: one number per key, from its weights."""
        torch.manual_seed(1)
        query, key, value = (torch.randn(1, 2, 300, 16).requires_grad_() for _ in range(3))
        return torch.autograd.grad(alibi_attention(query, key, value, backend="native", **options).sum(), value)[0]

    before = emulated.calls
    there = gradient()
    assert emulated.calls > before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "library", LIBRARY)
        here = gradient()
    torch.testing.assert_close(there, here, atol=1e-5, rtol=1e-5)


LIBRARY = build.library
