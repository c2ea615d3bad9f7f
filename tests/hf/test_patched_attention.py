"""Each family's variants: MPT's options and length, Falcon's scaled bias, rounding in BLOOM and Falcon, errors."""

import math

import pytest
import torch
from refusals import assert_refused
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, StaticCache
from transformers_names import checkpoint_activations

from alibi_attn import alibi_bias, alibi_slopes
from alibi_attn.hf import patch

pytestmark = pytest.mark.usefixtures("no_gradients")
FAMILIES = ["bloom", "mpt", "falcon"]


def attention_by_hand(layer: torch.nn.Module, x: Tensor, family: str, slopes: Tensor, scale: float) -> Tensor:
    """softmax(scale·q·k − m·|i − j|)·v of one layer in fp64, before the output map, from its weights; x: [1, T, E]."""
    heads = 6
    if family == "mpt":
        fused = x.double() @ layer.Wqkv.weight.double().T
        if layer.clip_qkv:
            fused = fused.clamp(-layer.clip_qkv, layer.clip_qkv)
        query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in fused.chunk(3, dim=-1))
    else:
        linear = layer.query_key_value
        fused = x.double() @ linear.weight.double().T + linear.bias.double()
        query, key, value = fused.unflatten(-1, (heads, 3, -1)).permute(3, 0, 2, 1, 4)
    bias = alibi_bias(slopes.double(), x.shape[1], dtype=torch.float64)
    return ((scale * query @ key.mT + bias).softmax(-1) @ value).transpose(1, 2).flatten(2)


def layer_output(model: torch.nn.Module, layer: torch.nn.Module, ids: Tensor, output_map: str) -> tuple[Tensor, Tensor]:
    """Returns (the layer's input, the input of its output map)."""
    seen = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: seen.update(x=args[0])),
        layer.get_submodule(output_map).register_forward_pre_hook(lambda _, args: seen.update(mixed=args[0])),
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    return seen["x"], seen["mixed"]


OF_MPT = ({}, {"alibi_bias_max": 4}, {"softmax_scale": 0.7}, {"clip_qkv": 0.3})


@pytest.mark.parametrize(("family", "attention"), [("bloom", {}), ("falcon", {}), *(("mpt", x) for x in OF_MPT)])
def test_by_default_each_layer_is_its_formula_in_fp64(family, attention, build, tokens):
    model = build(family, **({"max_seq_len": 400, "attention": attention} if family == "mpt" else {}))
    slopes = torch.as_tensor(alibi_slopes(6, bias_max=attention.get("alibi_bias_max", 8.0)))
    with patch(model) as handle:
        layer = model.get_submodule(handle.layers[0])
        x, mixed = layer_output(model, layer, tokens(1, 400), "out_proj" if family == "mpt" else "dense")
    slopes, scale = slopes / (math.sqrt(8) if family == "falcon" else 1.0), attention.get("softmax_scale", 8**-0.5)
    expected = attention_by_hand(layer, x, family, slopes, scale)
    torch.testing.assert_close(mixed.double(), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


def test_mpt_runs_beyond_max_seq_len(build, tokens):
    short, ids = build("mpt", max_seq_len=16), tokens(2, 40)
    long = build("mpt", max_seq_len=64)
    long.load_state_dict(short.state_dict())
    with pytest.raises(RuntimeError, match="must match"):
        short(ids)
    with patch(short):
        torch.testing.assert_close(short(ids).logits, long(ids).logits, rtol=1e-4, atol=1e-5)
        assert torch.equal(
            short.generate(ids, max_new_tokens=9, do_sample=False),
            long.generate(ids, max_new_tokens=9, do_sample=False),
        )


def test_falcon_is_its_sdpa_path_and_not_its_eager_one(build, tokens):
    model, ids = build("falcon"), tokens(2, 30)
    expected = model(ids).logits
    model.config._attn_implementation = "eager"
    eager = model(ids).logits
    assert (eager - expected).abs().max() > 1e-3  # transformers adds the bias twice
    with patch(model, numerics="checkpoint"):
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(model(ids).logits, eager)


@pytest.mark.parametrize("family", ["bloom", "falcon"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_checkpoints_rounding_is_that_of_the_unpatched_model(family, side, build, tokens):
    """In bf16, where m·j loses digits beyond 256 positions; the rows exceed one block, and include padding."""
    model, ids, mask = build(family).bfloat16(), tokens(2, 700), torch.ones(2, 700, dtype=torch.long)
    mask[1, slice(0, 5) if side == "left" else slice(695, None)] = 0
    expected = model(ids, attention_mask=mask).logits.float()
    seen = mask.bool()
    with patch(model, numerics="checkpoint"):
        rounded = (model(ids, attention_mask=mask).logits.float() - expected)[seen].abs()
    with patch(model):
        exact = (model(ids, attention_mask=mask).logits.float() - expected)[seen].abs()
    assert rounded.mean() < 0.05 * exact.mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_with_holes_give_the_models_own_logits(family, build, tokens):
    model, ids, mask = build(family), tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, 4:7] = 0
    expected = model(ids, attention_mask=mask).logits[mask.bool()]
    with patch(model, numerics="checkpoint"):
        torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask.bool()], expected, rtol=1e-4, atol=1e-5)
    with patch(model):
        if family == "falcon":  # its own slopes are rounded to bf16; positions are counted over the visible tokens
            alone = [model(row[seen.bool()][None]).logits[0] for row, seen in zip(ids, mask, strict=True)]
            expected = torch.cat(alone)
        torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask.bool()], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("reentrant", "backend"),
    [(None, "auto"), (False, "auto"), (True, "auto"), (False, "banded")],
    ids=["plain", "checkpointed", "reentrant", "banded"],
)
@torch.enable_grad()
def test_gradients_are_those_of_the_unpatched_model(family, reentrant, backend, build, tokens):
    model, ids = build(family), tokens(2, 25)
    numerics = "checkpoint" if family == "falcon" else "exact"
    if reentrant is not None:
        checkpoint_activations(model, {"use_reentrant": reentrant})
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0

    def gradients() -> list[Tensor | None]:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients()
    with patch(model, backend=backend, numerics=numerics):
        actual = gradients()
    for mine, theirs in zip(actual, expected, strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5 * float(theirs.abs().max() + 1e-3))


# BLOOM's own activation makes torch instantiate an autograd function while it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "model", ["bloom", "falcon", "ours", pytest.param("mpt", marks=pytest.mark.long)], indirect=True
)
def test_it_compiles_without_a_break_and_counts_positions_over_a_later_hole(model, tokens):
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    model.config.use_cache = False
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for hole in (slice(0), slice(4, 6)):
        mask[0, hole] = 0
        expected = model(ids, attention_mask=mask).logits[mask.bool()]
        actual = compiled(ids, attention_mask=mask).logits[mask.bool()]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_the_error_for_an_unsupported_model_names_the_supported_ones(build):
    gpt2, bloom = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9)), build("bloom")
    assert_refused(
        ("supported are the whole models of BLOOM, MPT, Falcon with alibi=True", lambda: patch(gpt2)),
        ("nothing to patch", lambda: patch(bloom.transformer.h[0])),
        ("rotary positions", lambda: patch(build("falcon", alibi=False))),
        (r"attn_config\.alibi is False", lambda: patch(build("mpt", attention={"alibi": False}))),
        (r"attn_config\.prefix_lm is True", lambda: patch(build("mpt", attention={"prefix_lm": True}))),
        ("backend is 'fast' but must be 'auto' or one of", lambda: patch(bloom, backend="fast")),
        ('is \'rounded\' but must be "exact" or "checkpoint"', lambda: patch(bloom, numerics="rounded")),
    )
    assert_refused(("model is a str", lambda: patch("bloom-560m")), error=TypeError)


def test_patched_twice_and_undone_twice(build):
    model = build("mpt")
    with patch(model) as handle:
        assert_refused(("is patched already; call undo", lambda: patch(model)))
        handle.undo()
    assert_refused(("already been undone", handle.undo))
    patch(model).undo()
    model.transformer.blocks[1].attn.forward = lambda *_: None
    assert_refused((r"at blocks\.1\.attn whose forward was already replaced", lambda: patch(model)))
    assert not hasattr(model.transformer.blocks[0].attn, "alibi_settings")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patched_model_refuses_unsupported_calls(family, build, tokens):
    model, ids = build(family), tokens(2, 10)
    one, seen, whole = ids[:, :1], torch.ones(2, 10), type(model.transformer).forward
    other = build(family, **{"n_heads" if family == "mpt" else "num_attention_heads": 3})(ids, use_cache=True)
    with patch(model):
        cache, static = model(ids, use_cache=True).past_key_values, StaticCache(config=model.config, max_cache_len=20)
        model(ids, attention_mask=seen, past_key_values=static)
        assert_refused(
            (r"requests the T×S weights.*record_attention.*undo\(\) on", lambda: model(ids, output_attentions=True)),
            (r"the input has shape \[2, 0\] but must be \[B, T\] with T ≥ 1", lambda: model(ids[:, :0])),
            (r"\[2, 1, 10\] but must be \[B, S\] in a patched", lambda: model(ids, attention_mask=seen[:, None])),
            ("attention_mask has 3 rows but the batch has 2", lambda: model(ids, attention_mask=torch.ones(3, 10))),
            ("values other than 0 and 1", lambda: model(ids, attention_mask=seen * -1e9)),
            (r"a bool mask \[B, R, 1, S\]; call the whole model", lambda: whole(model.transformer, ids)),
            ("covers 1 p.* must cover 11", lambda: model(one, attention_mask=seen[:, :1], past_key_values=cache)),
            ("covers 10 positions but must cover 11", lambda: model(one, attention_mask=seen, past_key_values=static)),
        )
        with pytest.raises((ValueError, RuntimeError), match=r"[Ss]izes|must"):
            model(one, past_key_values=other.past_key_values)
        model.config.is_causal = False
        assert_refused(("is causal with one sequence per row", lambda: model(ids)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_read_in_chunks_generates_the_same(family, build, tokens):
    model, ids, mask = build(family), tokens(2, 50), torch.ones(2, 50, dtype=torch.long)
    mask[1, :20] = 0  # its first chunk is padding only
    asked = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "use_cache": True}
    with patch(model):
        expected = model.generate(ids, **asked)
        assert torch.equal(model.generate(ids, prefill_chunk_size=16, **asked), expected)


@pytest.mark.parametrize("family", ["bloom", "falcon"])
@pytest.mark.parametrize("numerics", ["exact", "checkpoint"])
def test_attention_dropout_drops_in_training_only(family, numerics, build, tokens):
    model, ids = build(family, attention_dropout=0.5), tokens(2, 20)
    patch(model, numerics=numerics)
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)
