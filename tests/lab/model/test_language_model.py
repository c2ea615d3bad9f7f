"""Facts about the language models that hold for every position method and every architecture."""

import pytest
import torch
import torch.nn.functional as F

from alibi_lab.lab.config import ConfigError, ModelConfig
from alibi_lab.lab.model.attention import LayerCache
from alibi_lab.lab.model.generation import generate
from alibi_lab.lab.model.method_checks import imported_method
from alibi_lab.lab.model.position_method import PositionError
from alibi_lab.lab.model.positions import METHODS
from alibi_lab.recipes.systems import SYSTEMS as EVERY_SYSTEM

TRAINED_LENGTH = 16
ARCHITECTURES = {
    "modern": {},
    "mpt": {"architecture": "mpt"},
    "baevski-auli": {"architecture": "baevski-auli"},
    "adaptive": {"architecture": "baevski-auli", "cutoffs": (8, 24)},
}
BEYOND = [method for method in METHODS if method != "learned"]
RELATIVE = [method for method in METHODS if METHODS[method].relative]
SEGMENTED = [system for system in EVERY_SYSTEM if imported_method(system)(ModelConfig(), TRAINED_LENGTH).segment]
SYSTEMS = [system for system in EVERY_SYSTEM if system not in SEGMENTED]
every_method = pytest.mark.parametrize("method", METHODS)
beyond_methods = pytest.mark.parametrize("method", BEYOND)
every_architecture = pytest.mark.parametrize("fields", ARCHITECTURES.values(), ids=ARCHITECTURES)


def pairs(methods: list[str], systems: list[str] = ()) -> pytest.MarkDecorator:
    """The methods in every architecture, most of them but in the modern one by `make test-all`, and systems in that one."""
    cases = []
    for name, fields in ARCHITECTURES.items():
        for method in [*methods, *(systems if name == "modern" else ())]:
            rare = name != "modern" and method not in ("alibi", "alibi-fox")
            cases.append(pytest.param(method, fields, id=f"{method}-{name}", marks=[pytest.mark.long] * rare))
    return pytest.mark.parametrize(("method", "fields"), cases)


def some_tokens(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(length))


@pairs([*METHODS], [*SYSTEMS, *SEGMENTED])
def test_a_token_changes_what_follows_and_nothing_before_it(tiny_model, method, fields):
    model, tokens = tiny_model(method, **fields), some_tokens(12)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 64
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-6)
    assert ((before[:, 7:] - after[:, 7:]).abs().amax(-1) > 1e-4).all()


@pairs([*METHODS], SYSTEMS)
@pytest.mark.parametrize("chunks", [(), (5, 1, 1, 7)])
def test_cached_pass_equals_full_pass_however_it_is_cut(tiny_model, method, fields, chunks):
    length = TRAINED_LENGTH if method == "learned" else TRAINED_LENGTH + 8
    model, tokens = tiny_model(method, **fields), some_tokens(length)
    caches, chunks = [LayerCache() for _ in model.blocks], (*chunks, length - sum(chunks)) if chunks else 1
    with torch.no_grad():
        parts = [model(part, caches=caches) for part in tokens.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=1e-4, atol=1e-5)


@pairs([*METHODS])
def test_methods_of_one_seed_start_from_the_same_weights(tiny_model, method, fields):
    mine = dict(tiny_model(method, **fields).named_parameters())
    for name, weight in tiny_model("none", **fields).named_parameters():
        assert torch.equal(weight, mine[name])
    assert not torch.equal(mine["blocks.0.q.weight"], tiny_model(method, seed=1, **fields).blocks[0].q.weight)


@pairs(BEYOND, SYSTEMS)
def test_greedy_generation_takes_the_likeliest_token_also_beyond_the_trained_length(tiny_model, method, fields):
    model = tiny_model(method, **fields)
    text = [1, 2, 3]
    new = list(generate(model, text, max_new_tokens=TRAINED_LENGTH + 4, temperature=0))
    for token in new:
        with torch.no_grad():
            assert token == int(model(torch.tensor([text]))[0, -1].argmax())
        text.append(token)


@beyond_methods
def test_a_long_prompt_is_read_in_pieces_of_bounded_size(tiny_model, method, monkeypatch):
    model, prompt, lengths = tiny_model(method), some_tokens(50)[0].tolist(), []
    whole = list(generate(model, prompt, max_new_tokens=5, temperature=0))
    monkeypatch.setattr("alibi_lab.lab.model.generation.PREFILL_TOKENS", 16)
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
def test_generation_refuses_unsupported_arguments(tiny_model, prompt, arguments):
    with pytest.raises(ValueError, match=r"at least one token|max_new_tokens of 1 or more"):
        generate(tiny_model("alibi"), prompt, **{"max_new_tokens": 5, **arguments})


@pairs([*METHODS])
def test_every_parameter_gets_a_gradient(tiny_model, method, fields):
    model, tokens = tiny_model(method, **fields), torch.arange(64).view(4, 16)  # tokens of every band
    model(tokens[:, :-1], targets=tokens[:, 1:]).mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        # The bias of k adds the same number to all scores of a query, which cancels in the softmax.
        assert parameter.grad.abs().sum() > 0 or name.endswith(".k.bias"), name


@every_architecture
def test_losses_are_those_of_the_logits(tiny_model, fields):
    model, tokens = tiny_model("alibi", **fields), some_tokens(13)
    logits = model(tokens[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(2, 12)
    torch.testing.assert_close(model(tokens[:, :-1], targets=tokens[:, 1:]), expected)
    torch.testing.assert_close(model(tokens[:, :-1], targets=tokens[:, -3:]), expected[:, -3:])


def test_losses_of_some_rows_at_a_time_are_those_of_all_at_once(tiny_model, monkeypatch):
    found = []
    for rows in (5, 1000):
        model, tokens = tiny_model("alibi"), some_tokens(13)
        monkeypatch.setattr("alibi_lab.lab.model.language_model._LOGITS_AT_ONCE", rows * model.config.vocab_size)
        losses = model(tokens[:, :-1], targets=tokens[:, 1:])
        losses.mean().backward()
        found.append([losses.detach(), *(parameter.grad for parameter in model.parameters())])
    for some, whole in zip(*found, strict=True):
        assert torch.equal(some, whole)


@pairs(RELATIVE)
def test_a_window_is_a_text_cut_short_for_one_layer(tiny_model, method, fields):
    model, tokens = tiny_model(method, num_layers=1, **fields), some_tokens(12, batch=1)
    with torch.no_grad():
        windowed = model(tokens, window=5)
        for i in range(12):
            alone = model(tokens[:, max(0, i - 4) : i + 1])[:, -1]
            torch.testing.assert_close(windowed[:, i], alone, rtol=1e-4, atol=1e-5)
        assert torch.equal(model(tokens, window=12), model(tokens))


@every_method
def test_cached_windows_are_windows(tiny_model, method):
    model, tokens, caches = tiny_model(method), some_tokens(16), [LayerCache(), LayerCache()]
    with torch.no_grad():
        parts = [model(part, caches=caches, window=6) for part in tokens.split((5, 1, 1, 7, 2), dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens, window=6), rtol=1e-4, atol=1e-5)


@pairs(RELATIVE, [system for system in SYSTEMS if imported_method(system).relative])
def test_documents_in_one_row_are_as_if_alone(tiny_model, method, fields):
    model, tokens = tiny_model(method, **fields), some_tokens(12)
    documents = torch.tensor([[0] * 5 + [1] * 7, [7] * 11 + [3]])
    with torch.no_grad():
        together = model(tokens, segment_ids=documents)
        for row, cut in ((0, 5), (1, 11)):
            alone = torch.cat([model(part) for part in tokens[row : row + 1].split((cut, 12 - cut), dim=1)], dim=1)
            torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(together[:, -1], model(tokens)[:, -1], atol=1e-3)


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(RELATIVE)))
def test_methods_that_count_from_the_start_of_a_row_refuse_documents(tiny_model, method):
    with pytest.raises(ConfigError, match=f"{method}.*start of a row.*pass one of {', '.join(RELATIVE)}, or"):
        tiny_model(method)(some_tokens(4), segment_ids=torch.zeros(2, 4, dtype=torch.long))


STRETCHES = [(method, stretch) for method, kind in METHODS.items() for stretch in kind.stretches]


@pytest.mark.parametrize(("method", "stretch"), STRETCHES)
def test_a_stretched_model_has_the_same_weights_and_other_positions(tiny_model, method, stretch):
    model, tokens = tiny_model(method), some_tokens(40)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        plain = model(tokens)
        twin = model.stretched(stretch, 64)
        assert not torch.allclose(twin(tokens), plain, atol=1e-4)
        assert torch.equal(model(tokens), plain)
        caches = [LayerCache() for _ in twin.blocks]
        parts = [twin(part, caches=caches) for part in tokens.split((20, 1, 19), dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), twin(tokens), rtol=1e-4, atol=1e-5)
    assert twin.blocks is model.blocks
    assert twin.embedding is model.embedding
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("fields", [{"architecture": "modern"}, ARCHITECTURES["adaptive"]], ids=["modern", "adaptive"])
def test_activation_checkpointing_changes_neither_losses_nor_gradients(tiny_model, fields):
    dropouts = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1, "softmax_dropout": 0.1}
    found, tokens = [], some_tokens(16)
    for checkpointing in (False, True):
        model = tiny_model("alibi-learned", **fields, **dropouts).train()
        model.activation_checkpointing = checkpointing
        torch.manual_seed(0)
        losses = model(tokens[:, :-1], targets=tokens[:, 1:])
        losses.mean().backward()
        found.append([losses, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(plain, again) for plain, again in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "activation_dropout", "softmax_dropout"])
@pytest.mark.parametrize("method", ["none", "t5", "alibi"])
def test_dropout_is_for_training(tiny_model, method, name):
    model, tokens = tiny_model(method, **ARCHITECTURES["adaptive"], **{name: 0.5}), some_tokens(12)
    torch.manual_seed(0)
    with torch.no_grad():
        assert torch.equal(model(tokens), model(tokens))
        model.train()
        assert not torch.allclose(model(tokens), model(tokens), atol=1e-3)
