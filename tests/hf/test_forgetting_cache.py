"""A Forgetting Transformer that drops keys while it generates: the logits of a full cache, from fewer keys."""

import copy
import functools
from pathlib import Path

import fox_oracle
import pytest
import torch
from closeness import assert_within
from encoder_oracle import write_folder
from refusals import assert_refused
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM

from alibi_attn.hf import ALiBiCache, ALiBiCausalLMConfig, ALiBiForCausalLM, patch
from alibi_attn.hf.readers.decoder.forgetting import score_bound

pytestmark = pytest.mark.usefixtures("no_gradients")
PRO = {"qk_norm": True, "use_output_gate": True, "num_kv_heads": 3}
PROMPT = 300
OPTIONS = {"do_sample": False, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ALiBiForCausalLM:
    folder = tmp_path_factory.mktemp("fox")
    return ALiBiForCausalLM.from_pretrained(write_folder(folder / "fox", *fox_oracle.checkpoint(3, **PRO)))


def texts(batch: int = 2, length: int = PROMPT) -> Tensor:
    return torch.randint(1, 40, (batch, length), generator=torch.Generator().manual_seed(7))


assert_close = functools.partial(assert_within, share=5e-6)


def assert_forgot(cache: ALiBiCache, tokens: int, least: int) -> None:
    """Every key head has dropped at least this many tokens, and holds the others."""
    assert cache.get_seq_length() == tokens
    for kept, forgotten in zip(cache.kept, cache.forgotten, strict=True):
        assert len(kept) == 3
        assert [a + b for a, b in zip(kept, forgotten, strict=True)] == [tokens] * 3
        assert min(forgotten) >= least


@pytest.mark.parametrize("chunks", [[100] * 4, [320, *[1] * 80]], ids=["chunks", "tokens"])
def test_chunks_give_the_logits_of_one_pass(chunks: list[int], model: ALiBiForCausalLM) -> None:
    ids, cache = texts(length=400), ALiBiCache(forget=True)
    parts = [model(part, past_key_values=cache).logits for part in ids.split(chunks, dim=1)]
    assert_close(torch.cat(parts, dim=1), model(ids).logits)
    assert_forgot(cache, 400, least=60)


def test_a_larger_tolerance_drops_more_and_is_noticed(model: ALiBiForCausalLM) -> None:
    """With small scores the bound is nearly tight, so that a tolerance of a half must change the logits."""
    small = copy.deepcopy(model)
    for layer in small.layers:
        for norm in (layer.attention.q_norm, layer.attention.k_norm):
            norm.weight.mul_(0.1)
    ids, caches = texts(length=200), [ALiBiCache(forget=True), ALiBiCache(forget=True, tolerance=0.5)]
    logits = [[small(part, past_key_values=cache).logits for part in ids.split(100, dim=1)][1] for cache in caches]
    expected = small(ids).logits[:, 100:]
    assert_close(logits[0], expected)
    assert min(caches[1].forgotten[0]) > max(caches[0].forgotten[0]) > 0
    with pytest.raises(AssertionError, match="off by"):
        assert_close(logits[1], expected)


def test_slopes_that_fp32_rounds_down_are_its_own() -> None:
    """The default slopes of 12 heads: attention computes with them in fp32."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 12, "intermediate_size": 64}
    config = ALiBiCausalLMConfig(**sizes, vocab_size=40, forget_gate=True, head_norm_eps=1e-5)
    ids, cache, ours = texts(1, 200), ALiBiCache(forget=True), ALiBiForCausalLM(config).eval()
    parts = [ours(part, past_key_values=cache).logits for part in ids.split(100, dim=1)]
    assert_close(torch.cat(parts, 1), ours(ids).logits)
    assert min(cache.forgotten[0]) > 0


def test_the_memory_of_dropped_keys_is_returned(model: ALiBiForCausalLM) -> None:
    ids, cache, full = texts(length=1500), ALiBiCache(forget=True), ALiBiCache()
    for part in (ids, ids[:, :1]):
        model(part, past_key_values=cache)
        model(part, past_key_values=full)
    assert cache.nbytes < sum(layer.store.nbytes for layer in full.layers) / 3


def test_padding_on_the_left_is_dropped_first(model: ALiBiForCausalLM) -> None:
    rows, hidden = [texts()[0], texts()[1, :280]], torch.tensor([0, 20])
    ids = torch.stack([torch.nn.functional.pad(row, (PROMPT - len(row), 0)) for row in rows])
    mask = (torch.arange(PROMPT) >= hidden[:, None]).long()
    for chunk in (None, 16):  # with a chunk that is all padding
        cache = ALiBiCache(forget=True)
        given = {"attention_mask": mask, "past_key_values": cache, "max_new_tokens": 70, **OPTIONS}
        found = model.generate(ids, prefill_chunk_size=chunk, **given)
        for at, row in enumerate(rows):
            alone = model.generate(row[None], attention_mask=torch.ones(1, len(row)), max_new_tokens=70, **OPTIONS)
            assert torch.equal(found.sequences[at, hidden[at] :], alone.sequences[0])
            assert_close(torch.stack(found.logits)[:, at], torch.stack(alone.logits)[:, 0])
        assert_forgot(cache, PROMPT + 69, least=60)
    padded = torch.nn.functional.pad(texts(1, 9), (200, 0))
    seen = (torch.arange(209) >= 200).long()[None]
    cache = ALiBiCache(forget=True, tolerance=0.0)  # only what is hidden
    model(padded, attention_mask=seen, past_key_values=cache)
    model(texts(1, 1), attention_mask=torch.nn.functional.pad(seen, (0, 1), value=1), past_key_values=cache)
    assert cache.forgotten == [(200,) * 3] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_score_exceeds_the_bound_and_one_nearly_reaches_it(dtype: torch.dtype, model: ALiBiForCausalLM) -> None:
    """Along the axis of the largest weights."""
    attention = copy.deepcopy(model.layers[0].attention).to(dtype)
    norms, size = (attention.q_norm, attention.k_norm), attention.config.head_dim
    for norm in norms:
        norm.weight[3] = -norm.weight.abs().max() - 1  # the same feature of the first query and key head
    axis = torch.zeros(1, 1, size, dtype=dtype).index_fill(2, torch.tensor(3), 100.0)
    query, key = (norm(axis.repeat(1, 1, norm.num_heads))[0, 0, :size].float() for norm in norms)
    score, bound = float(query @ key) * size**-0.5, score_bound(attention, size)
    assert score <= bound <= 1.03 * score


def test_what_cannot_forget_is_refused(model: ALiBiForCausalLM, tmp_path: Path) -> None:
    ids = texts(length=90)
    plain = ALiBiForCausalLM.from_pretrained(write_folder(tmp_path / "fox", *fox_oracle.checkpoint(3)))
    bloom = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=50)).eval()
    lookup = {"past_key_values": ALiBiCache(forget=True), "prompt_lookup_num_tokens": 3, "max_new_tokens": 5}

    def called(one: torch.nn.Module, **given: object) -> object:
        return one(ids, past_key_values=ALiBiCache(forget=True), **given)

    assert_refused(
        (r"needs normalized queries and keys \(qk_norm\)", lambda: called(plain)),
        ("is for models with forget gates", lambda: called(bloom)),
        ("return to fewer tokens, as assisted generation", lambda: model.generate(ids[:1], **lookup)),
        ("holds one text per row", lambda: called(model, segment_ids=torch.arange(90).expand(2, -1) // 50)),
        ("prefix_len and positions do not exist", lambda: called(model, prefix_len=torch.tensor([3, 4]))),
        (r"tolerance is 1.0 but is a share of", lambda: ALiBiCache(forget=True, tolerance=1.0)),
    )
    patch(bloom)
    assert_refused(("is for models with forget gates", lambda: called(bloom)))


@pytest.mark.parametrize("wrong", ["hole", "right", "changed", "shown"])
def test_masks_other_than_one_left_padding_are_refused(wrong: str, model: ALiBiForCausalLM) -> None:
    ids, mask = texts(length=90), torch.ones(2, 90, dtype=torch.int64)
    mask[1, :10] = 0
    cache = ALiBiCache(forget=True)
    if wrong in ("changed", "shown"):
        model(ids[:, :80], attention_mask=mask[:, :80], past_key_values=cache)
        mask[1, :10] = 1
        mask[1, : 5 if wrong == "changed" else 0] = 0
        ids = ids[:, 80:]
    else:
        mask[0, 30 if wrong == "hole" else 89] = 0
    with pytest.raises(ValueError, match="hides tokens that are not padding on the left, or that earlier calls saw"):
        model(ids, attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("held", [20, 200])
def test_an_interrupted_pass_is_taken_back_or_noticed(held: int, model: ALiBiForCausalLM) -> None:
    """Tokens that some layers hold are dropped, as long as no key has been forgotten for them."""
    ids, more, cache = texts(length=held), texts(length=held + 20)[:, held:], ALiBiCache(forget=True)
    model(ids, past_key_values=cache)
    hook = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(more, past_key_values=cache)
    hook.remove()
    if held > 100:
        assert any(cache.forgotten[0])
        message = r"the layers of this cache hold \[200, 220\] tokens, because a forward pass was"
        assert_refused((message, lambda: model(more, past_key_values=cache)))
        cache.reset()
        model(ids, past_key_values=cache)
    whole = model(torch.cat([ids, more], 1)).logits
    assert_close(model(more, past_key_values=cache).logits, whole[:, held:])
