"""ALiBiForCausalLM in transformers: caches, padding, chunks, generation, training, compiling, copies, folders."""

import functools

import pytest
import torch
from decoder_checkpoints import NAMES, SIZES, loaded
from refusals import assert_refused
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig, StaticCache
from transformers_names import checkpoint_activations

from alibi_attn.hf import ALiBiCache, ALiBiCausalLMConfig, ALiBiForCausalLM

pytestmark = pytest.mark.usefixtures("no_gradients")
close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=2e-5)


@pytest.fixture
def load(tmp_path):
    """load("jais") -> the model"""
    return lambda name, **options: loaded(tmp_path, name, **options)[1]


def draw(batch: int, length: int) -> Tensor:
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("numerics", ["exact", "checkpoint"])
@pytest.mark.parametrize("name", NAMES)
def test_every_cache_gives_the_full_pass(name, numerics, load):
    model, ids = load(name, numerics=numerics), draw(2, 13)
    expected = model(ids, use_cache=False)
    assert expected.past_key_values is None
    for given in (None, DynamicCache(), StaticCache(config=model.config, max_cache_len=16)):
        cache, parts = given, []
        for part in ids.split([11, 1, 1], dim=1):
            output = model(part, past_key_values=cache)
            cache = output.past_key_values
            parts.append(output.logits)
        assert type(cache) is (ALiBiCache if given is None else type(given))
        close(torch.cat(parts, dim=1), expected.logits)


def test_generation_is_the_argmax_of_full_passes(load):
    model, ids = load("btlm"), draw(2, 9)
    expected = ids
    for _ in range(3):
        expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    options = {"max_new_tokens": 3, "eos_token_id": None, "pad_token_id": 0}
    output = model.generate(ids, do_sample=False, return_dict_in_generate=True, **options)
    assert torch.equal(output.sequences, expected)
    assert isinstance(output.past_key_values, ALiBiCache)
    for other in ({"cache_implementation": "static"}, {"cache_implementation": "dynamic"}, {"use_cache": False}):
        assert torch.equal(model.generate(ids, do_sample=False, **other, **options), expected)


def test_embeddings_in_the_place_of_tokens_and_the_last_logits_only(load):
    model, ids = load("jais"), draw(2, 11)
    expected = model(ids).logits
    close(model(inputs_embeds=model.embed_tokens(ids)).logits, expected)
    close(model(ids, logits_to_keep=3).logits, expected[:, -3:])
    close(model(ids, logits_to_keep=torch.tensor([2, 7])).logits, expected[:, [2, 7]])
    close(model(ids, logits_to_keep=torch.tensor([[2], [7]])).logits, expected[[0, 1], [2, 7]][:, None])
    close(model(ids, logits_to_keep=ids > 20).logits, expected[ids > 20])
    hidden = model(ids, output_hidden_states=True).hidden_states
    assert [tuple(x.shape) for x in hidden] == [(2, 11, 48)] * 3
    assert torch.equal(model(ids, return_dict=False)[0], expected)


def test_unsupported_calls_are_refused(load):
    model, ids = load("jais"), draw(2, 11)
    by_length = load("btlm", about={"alibi_scaling": {"type": "linear", "train_seq_len": 8}})
    static = StaticCache(config=by_length.config, max_cache_len=30)
    assert_refused(
        ("T×S weights.*record_attention", lambda: model(ids, output_attentions=True)),
        ("exactly one of input_ids and inputs_embeds", lambda: model(ids, inputs_embeds=torch.zeros(2, 11, 48))),
        (r"must be \[B, S\]", lambda: model(ids, attention_mask=torch.ones(2, 11, 11))),
        ("covers 5 positions but must cover 11", lambda: model(ids, attention_mask=torch.ones(2, 5))),
        (r"shape \[2, 0\]", lambda: model(ids[:, :0])),
        ("a static cache does not report; use an ALiBi", lambda: by_length(ids, past_key_values=static)),
    )


@pytest.mark.parametrize("name", ["btlm", "baichuan2"])
@torch.enable_grad()
def test_training_with_and_without_checkpointing(name, load):
    model, ids = load(name).train(), draw(2, 20)

    def gradients() -> list[Tensor]:
        output = model(ids, labels=ids)
        shifted = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        close(output.loss, shifted)
        return list(torch.autograd.grad(output.loss, list(model.parameters())))

    expected = gradients()
    checkpoint_activations(model, {"use_reentrant": False})
    for mine, theirs in zip(gradients(), expected, strict=True):
        close(mine, theirs)


def test_dropout_is_for_training_only():
    config = ALiBiCausalLMConfig(**SIZES, residual_dropout=0.5, embedding_dropout=0.5, attention_dropout=0.5)
    model, ids = ALiBiForCausalLM(config), draw(1, 9)
    assert not torch.equal(model.train()(ids).logits, model(ids).logits)
    assert torch.equal(model.eval()(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["jais", "baichuan2"])
def test_a_saved_folder_loads_here_and_by_auto_classes(name, load, tmp_path):
    model, ids = load(name, numerics="checkpoint"), draw(2, 12)
    model.generation_config = GenerationConfig(max_new_tokens=3, pad_token_id=0)
    model.save_pretrained(tmp_path / "saved")
    expected = model(ids).logits
    for cls in (ALiBiForCausalLM, AutoModelForCausalLM):
        again = cls.from_pretrained(tmp_path / "saved")
        assert type(again) is ALiBiForCausalLM
        assert torch.equal(again(ids).logits, expected)
        assert again.generate(ids).shape == (2, 15)
        assert (again.lm_head.weight is again.embed_tokens.weight) == model.config.tie_word_embeddings
    assert AutoConfig.from_pretrained(tmp_path / "saved").slopes == model.config.slopes
    half = ALiBiForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16, numerics="exact", backend="dense")
    assert half.dtype == torch.bfloat16
    assert half.layers[0].attention.alibi_settings.numerics == "exact"
    assert half.layers[0].attention.alibi_settings.backend == "dense"


def test_slopes_stay_in_fp32_when_the_model_is_cast(load):
    model = load("jais")
    before = model.layers[0].attention.alibi_settings.slopes
    assert model.half().bfloat16().layers[0].attention.alibi_settings.slopes == before


def test_it_is_built_without_memory_on_the_meta_device():
    with torch.device("meta"):
        model = ALiBiForCausalLM(ALiBiCausalLMConfig(vocab_size=125696, hidden_size=5120, num_attention_heads=40))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert list(model.buffers()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads is 5 but must be a divisor of 48"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4 but must be a divisor of 6, or None"),
        ({"slopes": [0.5]}, r"slopes is \[0.5\] but must be 6 numbers, or None"),
        ({"norm": "batch"}, "norm is 'batch' but must be one of 'layer', 'rms'"),
        ({"hidden_act": "swish5"}, "hidden_act is 'swish5' but must be an activation of transformers"),
        ({"backend": "fast"}, "backend is 'fast' but must be one of 'auto'"),
        ({"numerics": "rounded"}, "numerics is 'rounded' but must be one of 'exact', 'checkpoint'"),
        ({"alibi_scaling": {"type": "linear"}}, "alibi_scaling is .* but must be None"),
        ({"alibi_scaling": {"type": "linear", "factor": 0.0}}, "alibi_scaling is .* with a positive s"),
        ({"alibi_scaling": {"type": "ntk", "factor": 2.0}}, "alibi_scaling is .* but must be None"),
    ],
)
def test_a_config_that_no_decoder_has_is_refused(options, message):
    with pytest.raises(Exception, match=message):
        ALiBiCausalLMConfig(**{**SIZES, **options})
