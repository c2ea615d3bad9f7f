"""ALiBiForCausalLM in transformers: caches, padding, chunks, generation, training, compiling, copies, folders."""

import functools

import pytest
import torch
from decoder_checkpoints import NAMES, loaded
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig, StaticCache
from transformers_names import checkpoint_activations

from alibi_attn.hf import ALiBiCache, ALiBiCausalLMConfig, ALiBiForCausalLM

SIZES = {
    "vocab_size": 60,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 64,
}
close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=2e-5)


@pytest.fixture
def load(tmp_path):
    """load("jais") -> the model"""
    return lambda name, **options: loaded(tmp_path, name, **options)[1]


def draw(batch: int, length: int) -> Tensor:
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(length))


def left_padded(lengths: list[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(ids, mask, the rows without padding)"""
    rows, longest = [draw(1, length)[0] for length in lengths], max(lengths)
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (longest - len(row), 0)) for row in rows])
    return ids, mask, rows


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_cached_decoding_equals_the_full_pass(name, load):
    model, ids = load(name), draw(2, 13)
    expected = model(ids, use_cache=False)
    assert expected.past_key_values is None
    output = model(ids[:, :11])
    parts = [output.logits]
    for at in (11, 12):
        output = model(ids[:, at : at + 1], past_key_values=output.past_key_values)
        parts.append(output.logits)
    close(torch.cat(parts, dim=1), expected.logits)
    assert isinstance(output.past_key_values, ALiBiCache)


@torch.no_grad()
@pytest.mark.parametrize("name", ["baichuan2", "btlm", "refact"])
@pytest.mark.parametrize("kind", [ALiBiCache, DynamicCache, StaticCache])
def test_the_checkpoints_numerics_take_every_cache(name, kind, load):
    model, ids = load(name, numerics="checkpoint"), draw(2, 13)
    cache = kind(config=model.config, max_cache_len=16) if kind is StaticCache else kind()
    parts = [model(part, past_key_values=cache).logits for part in ids.split([11, 2], dim=1)]
    close(torch.cat(parts, dim=1), model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("name", ["baichuan", "jais", "mpt-grouped"])
def test_left_padding_equals_none(name, load):
    model = load(name)
    ids, mask, rows = left_padded([5, 17, 11])
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = model.generate(ids, attention_mask=mask, **options)
    for row, together in zip(rows, tokens, strict=True):
        assert together[-4:].tolist() == model.generate(row[None], **options)[0, -4:].tolist()
    logits = model(ids, attention_mask=mask).logits
    for at, row in enumerate(rows):
        close(logits[at, -len(row) :], model(row[None]).logits[0])


@torch.no_grad()
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
    with torch.no_grad():
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
    for wrong, message in (
        ({"output_attentions": True}, "T×S weights.*record_attention"),
        ({"inputs_embeds": torch.zeros(2, 11, 48)}, "exactly one of input_ids and inputs_embeds"),
        ({"attention_mask": torch.ones(2, 11, 11)}, r"must be \[B, S\]"),
        ({"attention_mask": torch.ones(2, 5)}, "covers 5 positions but must cover 11"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, **wrong)
    with pytest.raises(ValueError, match=r"shape \[2, 0\]"):
        model(ids[:, :0])


def test_slopes_by_length_refuse_a_static_cache(load):
    model = load("btlm", about={"alibi_scaling": {"type": "linear", "train_seq_len": 8}})
    with torch.no_grad(), pytest.raises(ValueError, match="which a static cache does not report; use an ALiBiCache"):
        model(draw(1, 9), past_key_values=StaticCache(config=model.config, max_cache_len=30))


@pytest.mark.parametrize("name", ["btlm", "baichuan2"])
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


@torch.no_grad()
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


@torch.no_grad()
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
