"""Facts about the language model that hold for every position method."""

import pytest
import torch

from alibi_attn.lab.model import generate
from alibi_attn.lab.positions import METHODS, PositionError
from alibi_attn.nn import KVCache

TRAINED_LENGTH = 16
every_method = pytest.mark.parametrize("method", METHODS)
beyond_methods = pytest.mark.parametrize("method", [method for method in METHODS if method != "learned"])


def some_tokens(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(length))


@every_method
def test_a_token_changes_nothing_before_it(tiny_model, method):
    model, tokens = tiny_model(method), some_tokens(12)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 64
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)
    assert ((before[:, 7:] - after[:, 7:]).abs().amax(-1) > 1e-4).all()


@every_method
@pytest.mark.parametrize("chunks", [(16,), (1,) * 16, (5, 1, 1, 7, 2)])
def test_cached_pass_equals_full_pass_however_it_is_cut(tiny_model, method, chunks):
    model, tokens = tiny_model(method), some_tokens(16)
    caches = [KVCache() for _ in model.blocks]
    with torch.no_grad():
        parts = [model(part, caches=caches) for part in tokens.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=1e-4, atol=1e-5)


@every_method
def test_methods_of_one_seed_start_from_the_same_weights(tiny_model, method):
    mine, reference = dict(tiny_model(method).named_parameters()), dict(tiny_model("none").named_parameters())
    for name, weight in reference.items():
        assert torch.equal(weight, mine[name])
    assert not torch.equal(mine["blocks.0.q.weight"], tiny_model(method, seed=1).blocks[0].q.weight)


@every_method
def test_methods_differ(tiny_model, method):
    if method != "none":
        tokens = some_tokens(12)
        assert not torch.allclose(tiny_model(method)(tokens), tiny_model("none")(tokens), atol=1e-3)


@beyond_methods
def test_greedy_generation_takes_the_likeliest_token_also_beyond_the_trained_length(tiny_model, method):
    model = tiny_model(method)
    text = [1, 2, 3]
    new = list(generate(model, text, max_new_tokens=2 * TRAINED_LENGTH, temperature=0))
    for token in new:
        with torch.no_grad():
            assert token == int(model(torch.tensor([text]))[0, -1].argmax())
        text.append(token)


@beyond_methods
def test_a_long_prompt_is_read_in_pieces_of_bounded_size(tiny_model, method, monkeypatch):
    model, prompt, lengths = tiny_model(method), some_tokens(50)[0].tolist(), []
    whole = list(generate(model, prompt, max_new_tokens=5, temperature=0))
    monkeypatch.setattr("alibi_attn.lab.model.PREFILL_TOKENS", 16)
    hook = model.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    assert list(generate(model, prompt, max_new_tokens=5, temperature=0)) == whole
    hook.remove()
    assert lengths == [16, 16, 16, 2, 1, 1, 1, 1]


def test_learned_positions_refuse_to_generate_beyond_the_trained_length(tiny_model):
    model = tiny_model("learned")
    assert len(list(generate(model, [1, 2, 3], max_new_tokens=14))) == 14  # the last new token is never an input
    with pytest.raises(PositionError, match="end at the trained length, 16; ask for at most 14 new tokens"):
        generate(model, [1, 2, 3], max_new_tokens=15)
    with pytest.raises(PositionError, match="end at the trained length, 16"):
        model(some_tokens(17))


def test_generation_is_a_function_of_the_seed(tiny_model):
    model = tiny_model("alibi")
    first, again, other = (list(generate(model, [5], max_new_tokens=20, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other
    greedy = list(generate(model, [5], max_new_tokens=20, temperature=0))
    assert list(generate(model, [5], max_new_tokens=20, top_k=1)) == greedy


@pytest.mark.parametrize(
    ("prompt", "arguments"),
    [
        ([], {}),
        ([64], {}),
        ([-1], {}),
        ([1], {"max_new_tokens": 0}),
        ([1], {"temperature": -0.1}),
        ([1], {"top_k": 0}),
    ],
)
def test_generation_refuses_what_it_cannot_do(tiny_model, prompt, arguments):
    with pytest.raises(ValueError, match=r"at least one token|max_new_tokens of 1 or more"):
        generate(tiny_model("alibi"), prompt, **{"max_new_tokens": 5, **arguments})


@every_method
def test_every_parameter_gets_a_gradient(tiny_model, method):
    model, tokens = tiny_model(method), some_tokens(16)
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())
