"""Forgetting Transformers of flash-linear-attention and of the authors, and Step-1, equal their formulas in fp64."""

import copy
import functools
from pathlib import Path

import decoder_oracle
import fox_oracle
import pytest
import torch
from closeness import assert_within
from decoder_checkpoints import Original, step1
from encoder_oracle import write_folder
from huggingface_hub.errors import StrictDataclassError
from refusals import assert_refused
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from alibi_attn.hf import ALiBiCache, ALiBiCausalLMConfig, ALiBiForCausalLM, record_attention

pytestmark = pytest.mark.usefixtures("no_gradients")
AUTHORS = {"model_type": fox_oracle.AUTHORS}
AUTHORS_PRO = {
    **AUTHORS,
    "qk_norm": True,
    "use_output_gate": True,
    "use_output_norm": True,
    "use_k_shift": True,
    "use_v_shift": True,
}
KINDS = {
    "plain": {},
    "pro": {"qk_norm": True, "use_output_gate": True, "qkv_bias": True, "num_kv_heads": 2},
    "authors": AUTHORS,
    "authors-pro": AUTHORS_PRO,
    "authors-first-pro": AUTHORS_PRO
    | {"qk_norm_share_param_across_head": True, "use_v_shift": False, "norm_eps": 1e-2},
    "step1": {},
}
PARTS = ("forget_proj", "q_norm", "gate_proj", "key_shift.proj", "value_shift.proj", "output_norm")
LENGTH = 40


@functools.cache
def made(kind: str) -> tuple[Original, Tensor, Tensor]:
    """The checkpoint, token ids [2, T] and their logits by the formulas."""
    ids = torch.randint(1, 40, (2, LENGTH), generator=torch.Generator().manual_seed(7))
    if kind == "step1":
        files = step1()
        return files, ids, decoder_oracle.logits(files.weights, files.config, ids)
    weights, about = fox_oracle.checkpoint(3, **KINDS[kind])
    return Original(weights, about, {}), ids, torch.stack([fox_oracle.logits(weights, about, row) for row in ids])


@pytest.fixture
def load(tmp_path: Path):
    """load("pro", changes={…}, dtype=…) -> (the model, token ids, their logits)"""

    def loaded(kind: str, *, changes: dict[str, object] | None = None, **options: object):
        files, ids, expected = made(kind)
        folder = write_folder(tmp_path / kind, files.weights, files.config | (changes or {}))
        return ALiBiForCausalLM.from_pretrained(folder, **options), ids, expected

    return loaded


# fp32 against fp64: two layers, each a few hundred roundings of 6e-8.
assert_close = functools.partial(assert_within, share=5e-6)
rich_kinds = pytest.mark.parametrize("kind", ["pro", "authors-pro", "step1"])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_cached_tokens_are_those_of_the_formulas(kind: str, load) -> None:
    model, ids, expected = load(kind)
    assert_close(model(ids).logits, expected)
    for backend in ("auto", "native", "dense") if kind == "step1" else ("auto",):
        exact = load(kind, dtype=torch.float64, backend=backend)[0](ids).logits
        torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-12)
    for cache in (ALiBiCache(), *[DynamicCache()] * (kind == "step1")):
        steps = [model(part, past_key_values=cache).logits for part in ids.split([20, 9, *[1] * 11], dim=1)]
        assert_close(torch.cat(steps, dim=1), expected)
        cache.crop(-15)
        cache.reorder_cache(torch.tensor([1, 0]))
        again = model(ids[[1, 0], 25:], past_key_values=copy.deepcopy(cache)).logits
        assert_close(again, expected[[1, 0], 25:])


@pytest.mark.parametrize("kind", ["pro", "authors-pro"])
def test_other_gates_norms_or_orders_would_be_noticed(kind: str, load) -> None:
    model, ids, expected = load(kind)
    attention = model.layers[1].attention
    owned = {name for name, _ in attention.named_parameters()}
    for changed in (attention.get_parameter(f"{part}.weight") for part in PARTS if f"{part}.weight" in owned):
        kept = changed.clone()
        changed.copy_(kept.roll(1, 0))
        with pytest.raises(AssertionError, match="off by"):
            assert_close(model(ids).logits, expected)
        changed.copy_(kept)
    assert_close(model(ids).logits, expected)


@rich_kinds
def test_padding_and_other_texts_change_nothing(kind: str, load) -> None:
    model, ids, expected = load(kind)
    hidden = 13
    mask = torch.ones(2, LENGTH + hidden, dtype=torch.int64)
    mask[:, :hidden] = 0
    padded = torch.nn.functional.pad(ids, (hidden, 0))
    assert_close(model(padded, attention_mask=mask).logits[:, hidden:], expected)
    tokens = model.generate(padded, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(tokens[:, hidden:], plain)
    texts = torch.arange(2).repeat_interleave(LENGTH)[None]
    assert_close(model(ids.reshape(1, -1), segment_ids=texts).logits[0], expected.flatten(0, 1))


@rich_kinds
@pytest.mark.parametrize("way", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 7}], ids=str)
def test_every_way_of_generating_keeps_gates_with_their_keys(way: dict[str, int], kind: str, load) -> None:
    model, ids, _ = load(kind)
    ids = ids[:1]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    beams = {name: number for name, number in way.items() if name == "num_beams"}
    expected = model.generate(ids, use_cache=False, **options, **beams)
    assert torch.equal(model.generate(ids, **options, **way), expected)


@pytest.mark.parametrize("name", ["forget_proj.bias", *(f"{part}.weight" for part in PARTS)])
@torch.enable_grad()
def test_gradients_are_those_of_differences(name: str, load) -> None:
    model, ids, _ = load("authors-pro", dtype=torch.float64)
    name = f"layers.0.attention.{name}"

    def loss(weight: Tensor) -> Tensor:
        output = torch.func.functional_call(model, {name: weight}, ids, {"use_cache": False})
        return output.logits.logsumexp(-1).square().mean()

    assert torch.autograd.gradcheck(loss, model.get_parameter(name), eps=1e-5, atol=1e-8, rtol=1e-6, fast_mode=True)


@rich_kinds
def test_a_saved_model_is_read_again(kind: str, load, tmp_path: Path) -> None:
    model, ids, expected = load(kind)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_close(again(ids).logits, expected)
    half, *_ = load(kind, dtype=torch.bfloat16)
    assert (half(ids).logits.double() - expected).abs().max() < 0.1 * expected.abs().max()


@torch.enable_grad()
def test_a_step1_trains_and_its_attention_is_recorded(load) -> None:
    model, ids, _ = load("step1")
    model(ids, labels=ids).loss.backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in model.parameters())
    with torch.no_grad(), record_attention(model, rows=[-1]) as passes:
        model(ids)
    torch.testing.assert_close(passes[0][0].sum(-1), torch.ones(2, 6, 1))


def test_llama_with_the_names_of_step1_is_not_taken_for_it(load) -> None:
    assert_refused(
        ("does not hold a checkpoint of Baichuan-13B", lambda: load("step1", changes={"model_type": "llama"}))
    )


def test_what_the_gates_and_the_root_do_not_support_is_refused(load, tmp_path: Path) -> None:
    (model, ids, _), (root, *_), (shifted, *_) = load("plain"), load("step1"), load("authors-pro")
    prefix, fixed = torch.tensor([3, 4]), StaticCache(config=root.config, max_cache_len=60)
    files, forgets = ALiBiCache(tmp_path / "files"), ALiBiCache(forget=True)
    no_prefix = "prefix_len and positions do not"

    def recorded() -> None:
        with record_attention(model, rows=[3]):
            model(ids)

    assert_refused(
        ("forget gates need an ALiBiCache, which .* is a Dynamic", lambda: model(ids, past_key_values=DynamicCache())),
        (f"{no_prefix} exist for a model with forget gates", lambda: model(ids, prefix_len=prefix)),
        (f"{no_prefix} exist for a model with a bias by the root", lambda: root(ids, prefix_len=prefix)),
        ("gates", lambda: model(ids, past_key_values=files)),
        ("do not support forget gates", recorded),
        ("does not store keys before their shift; use ALiBiCache", lambda: shifted(ids, past_key_values=forgets)),
        ("the text, which a static cache does not report", lambda: root(ids, past_key_values=fixed)),
        ("window_size = 16 but only None is supported", lambda: load("plain", changes={"window_size": 16})),
        ("use_rope = True but only .* is supported", lambda: load("authors", changes={"use_rope": True})),
        ("fgate_type = 'bias_only' but only", lambda: load("authors", changes={"fgate_type": "bias_only"})),
        ("ogate_act = 'silu' but only .* is", lambda: load("authors", changes={"ogate_act": "silu"})),
    )
    assert_refused(
        ("key_shift is True but must be False without forget_gate", lambda: ALiBiCausalLMConfig(key_shift=True)),
        ("root_bias", lambda: ALiBiCausalLMConfig(root_bias=True, alibi_scaling={"type": "linear", "factor": 2.0})),
        error=StrictDataclassError,
    )


def test_the_width_of_the_feed_forward_is_the_originals(tmp_path: Path) -> None:
    """256·⌈(2/3)·4·48/256⌉ = 256 by default."""
    weights, about = fox_oracle.checkpoint(3, intermediate_size=256)
    del about["intermediate_size"]
    model = ALiBiForCausalLM.from_pretrained(write_folder(tmp_path / "fox", weights, about))
    assert model.config.intermediate_size == 256


@pytest.mark.parametrize("others", [{}, {"score.weight": torch.ones(2, 48)}], ids=["complete", "with-a-head"])
@pytest.mark.parametrize("missing", [None, "model.layers.1.attn.k_proj.shift_proj.weight"])
def test_folders_with_more_heads_and_fewer_weights(others: dict, missing: str | None, tmp_path: Path, caplog) -> None:
    files, ids, expected = made("authors-pro")
    stored = {name: x for name, x in files.weights.items() if name != missing}
    folder = write_folder(tmp_path / "fox", stored | others, files.config)
    if missing is None:
        assert_close(ALiBiForCausalLM.from_pretrained(folder)(ids).logits, expected)
        assert ["score.weight" in line for line in caplog.messages if "another head" in line] == [True] * len(others)
    else:
        with pytest.raises(ValueError, match=rf"is not the FoX that .*: the weights {missing} are missing"):
            ALiBiForCausalLM.from_pretrained(folder)
