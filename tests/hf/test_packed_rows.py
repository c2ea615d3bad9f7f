"""Rows that hold several texts: every way of saying so gives each text the logits and gradients that it has alone."""

import inspect
import pickle
from collections.abc import Callable

import pytest
import torch
from encoder_oracle import small_encoder
from refusals import assert_refused
from torch import Tensor
from transformers import (
    BloomForSequenceClassification,
    BloomForTokenClassification,
    DataCollatorWithFlattening,
    DynamicCache,
)

from alibi_attn import explain
from alibi_attn.attention import kept
from alibi_attn.attention.backends.native import build
from alibi_attn.hf import (
    ALiBiBertForMaskedLM,
    ALiBiBertForSequenceClassification,
    ALiBiBertModel,
    ALiBiCache,
    patch,
)

pytestmark = pytest.mark.usefixtures("no_gradients")

LENGTHS = [37, 64, 5, 90]
FAMILIES = ["bloom", "mpt", "falcon", "ours"]


every_family = pytest.mark.parametrize("model", FAMILIES, indirect=True)


def segments(lengths=LENGTHS) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


def positions(lengths=LENGTHS) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def blocks(lengths=LENGTHS) -> Tensor:
    ids, at = segments(lengths)[0], torch.arange(sum(lengths))
    return ((ids[:, None] == ids) & (at <= at[:, None]))[None, None]


def bounds(lengths=LENGTHS) -> dict[str, object]:
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    longest = max(lengths)
    return {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}


WAYS = {
    "segment_ids": lambda: {"segment_ids": segments() * 3 - 4},
    "seq_idx": lambda: {"seq_idx": segments().int()},
    "position_ids": lambda: {"position_ids": positions()},
    "position_ids from 1": lambda: {"position_ids": positions() + 1},
    "cu_seq_lens": bounds,
    "mask": lambda: {"attention_mask": blocks()},
    "additive mask": lambda: {"attention_mask": torch.zeros(1).masked_fill(~blocks(), torch.finfo(torch.float32).min)},
    "all": lambda: {"segment_ids": segments(), "position_ids": positions(), **bounds()},
}


@pytest.mark.parametrize("way", WAYS)
@every_family
@torch.enable_grad()
def test_packed_logits_and_gradients_are_those_of_each_text(model, way, tokens):
    ids = tokens(1, sum(LENGTHS))
    alone = [model(part, use_cache=False).logits for part in ids.split(LENGTHS, 1)]
    expected = torch.cat(alone, 1)
    weight = torch.randn_like(expected)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad((expected * weight).sum(), parameters)
    actual = model(ids, use_cache=False, **WAYS[way]()).logits
    found = torch.autograd.grad((actual * weight).sum(), parameters)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
    assert (model(ids, use_cache=False).logits - expected).abs().max() > 1e-3 * expected.abs().max()


@torch.enable_grad()
def test_collated_rows_train_as_texts_alone(build, tokens):
    """The batch of DataCollatorWithFlattening, with and without flash-attn's arguments."""
    texts = [tokens(1, length, seed=length)[0] for length in LENGTHS]
    for family in ("bloom", "mpt"):
        model = build(family, **({"max_seq_len": 512} if family == "mpt" else {}))
        patch(model)
        sums = [model(text[None], labels=text[None], use_cache=False).loss * (len(text) - 1) for text in texts]
        expected = sum(sums) / sum(len(text) - 1 for text in texts)
        for options in ({}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}):
            collate = DataCollatorWithFlattening(**options)
            batch = collate([{"input_ids": text} for text in texts])
            torch.testing.assert_close(model(**batch, use_cache=False).loss, expected, rtol=1e-5, atol=1e-6)
        packed = model(**batch, num_items_in_batch=100, use_cache=False).loss
        torch.testing.assert_close(packed, sum(sums) / 100, rtol=1e-5, atol=1e-6)


@every_family
def test_padded_batches_of_packed_rows(model, tokens):
    """Left and right padding around the texts of a row; positions as `generate` and others fill them in at padding."""
    rows = [[30, 20], [12, 9, 14], [25]]
    ids, mask = tokens(3, 60), torch.zeros(3, 60, dtype=torch.long)
    numbers, at = torch.full((3, 60), 9), torch.zeros(3, 60, dtype=torch.long)
    for row, (lengths, first) in enumerate(zip(rows, [10, 0, 20], strict=True)):
        own = slice(first, first + sum(lengths))
        mask[row, own], numbers[row, own], at[row, own] = 1, segments(lengths)[0], positions(lengths)[0]
    for way in ({"segment_ids": numbers}, {"position_ids": at}, {"position_ids": at.masked_fill(mask == 0, 1)}):
        logits = model(ids, attention_mask=mask, use_cache=False, **way).logits
        for row, lengths in enumerate(rows):
            for part, found in zip(
                ids[row][mask[row] > 0].split(lengths), logits[row][mask[row] > 0].split(lengths), strict=True
            ):
                expected = model(part[None], use_cache=False).logits[0]
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [DynamicCache, ALiBiCache])
@every_family
def test_cached_chunks_and_new_tokens_of_packed_rows(model, kind, tokens):
    ids = tokens(1, sum(LENGTHS))
    expected = torch.cat([model(part, use_cache=False).logits for part in ids.split(LENGTHS, 1)], 1)
    cuts = [80, 23, 1, 1, 70, 1, 1, 19]
    for way in ("segment_ids", "position_ids", "mask"):
        cache, found, start = kind(), [], 0
        for part in ids.split(cuts, 1):
            stop = start + part.shape[1]
            options = {
                "segment_ids": {"segment_ids": segments()[:, :stop]},
                "position_ids": {"position_ids": positions()[:, start:stop]},
                "mask": {"attention_mask": blocks()[:, :, start:stop, :stop]},
            }[way]
            found.append(model(part, past_key_values=cache, use_cache=True, **options).logits)
            start = stop
        torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon"])
def test_the_checkpoints_numbers_restart_with_each_text(family, build, tokens):
    model, ids = build(family, **({"max_seq_len": 512} if family == "mpt" else {})), tokens(1, sum(LENGTHS))
    expected = torch.cat([model(part, use_cache=False).logits for part in ids.split(LENGTHS, 1)], 1)
    with patch(model, numerics="checkpoint"):
        found = model(ids, segment_ids=segments(), use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rounding", ["positions", "counts", "distances"])
def test_our_decoder_rounds_each_text_as_alone(rounding, build, tokens):
    model = build("ours", numerics="checkpoint", checkpoint_rounding=rounding).bfloat16()
    ids = tokens(1, sum(LENGTHS))
    expected = torch.cat([model(part, use_cache=False).logits for part in ids.split(LENGTHS, 1)], 1)
    found = model(ids, position_ids=positions(), use_cache=False).logits
    assert (found - expected).abs().max() <= 2**-7 * expected.abs().max()


@every_family
def test_arguments_that_mean_nothing_here_are_refused(model, tokens):
    ids, one = tokens(2, 10), tokens(1, 10)
    several, two, square = segments([3, 3, 4]).expand(2, -1), torch.tensor([0, 4, 10]), torch.ones(2, 1, 10, 10)
    apart = "sequence_id, which has no effect in this model; texts in one row are told apart by segment_ids"
    blocks_only = "is not a causal block for each text: see row 0, token 0"

    def called(ids: Tensor, **options: object) -> Callable[[], object]:
        return lambda: model(ids, use_cache=False, **options)

    assert_refused(
        (apart, called(ids, sequence_id=several)),
        ("head_mask, which has no effect", called(ids, head_mask=torch.ones(2, 6))),
        ("token_type_ids, which has no effect", called(ids, token_type_ids=several)),
        (r"has shape \[2, 9\] but must be \[B, S\] = \[2, 10\]", called(ids, segment_ids=several[:, :9])),
        ("segment_ids returns to an earlier text", called(ids, segment_ids=several % 2)),
        ("tell texts apart differently", called(ids, segment_ids=several, seq_idx=several // 2)),
        ("restart within a text", called(ids, segment_ids=several // 2, position_ids=positions([3, 3, 4]))),
        ("position_ids jump ahead within a text", called(ids, position_ids=torch.arange(10)[None] * 2)),
        (r"position_ids has shape \[1, 9\]", called(ids, position_ids=torch.arange(9)[None])),
        ("needs one row without a cache", called(ids, cu_seq_lens_q=two)),
        ("adds numbers other than 0", called(ids, attention_mask=square)),
        (blocks_only, called(ids, attention_mask=square.bool())),
        (r"must be \[B, 1, T, S\]", called(ids, attention_mask=square.expand(-1, 6, -1, -1).bool())),
        ("end with T = 10", called(one, cu_seq_lens_q=torch.tensor([0, 4, 9]))),
        ("cu_seq_lens_q and cu_seq_lens_k differ", called(one, cu_seq_lens_q=two, cu_seq_lens_k=two // 3 * 3)),
        ("max_length_q is 5 but a text has 6", called(one, cu_seq_lens_q=two, max_length_q=5)),
        ("cu_seq_lens_q must be", called(one, max_length_q=5)),
    )
    assert_refused(("must hold integers", called(ids, segment_ids=several.float())), error=TypeError)
    harmless = {"token_type_ids": several * 0, "head_mask": None, "output_router_logits": False}
    assert torch.equal(called(ids, **harmless, num_items_in_batch=3)().logits, called(ids)().logits)


@every_family
def test_positions_after_cached_tokens(model, tokens):
    ids, cache = tokens(2, 20), DynamicCache()
    model(ids[:, :15], past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="position_ids jump ahead"):
        model(ids[:, 15:16], past_key_values=cache, use_cache=True, position_ids=torch.tensor([[17]]))


COMPILED = [  # each family and each way; `make test-all` compiles all pairs
    pytest.param(family, way, marks=[pytest.mark.long] * (number % 3 != row % 3))
    for row, family in enumerate(FAMILIES)
    for number, way in enumerate(("segment_ids", "position_ids", "cu_seq_lens"))
]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("model", "way"), COMPILED, indirect=["model"])
def test_compiled_code_reads_segments(model, way, tokens):
    ids, options = tokens(1, sum(LENGTHS)), WAYS[way]()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = model(ids, use_cache=False, **options).logits
    torch.testing.assert_close(compiled(ids, use_cache=False, **options).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(build.why_not() is not None, reason=f"counts scores of the native backend: {build.why_not()}")
@every_family
def test_no_score_is_computed_across_texts(model, tokens, monkeypatch):
    """Texts that fill whole tiles: every layer computes as many scores as for each text alone, but for the groups of 16 keys in
    which a block may end elsewhere, because the extremes of norms are those of the whole row."""
    lengths = [64, 192, 128]
    ids, counts = tokens(1, sum(lengths)), []
    attend = kept.alibi_attention

    def counted(*args, **options):
        counts.append(int(explain(*args, **{**options, "backend": "native"}).scores.sum()))
        return attend(*args, **options)

    monkeypatch.setattr(kept, "alibi_attention", counted)
    model(ids, segment_ids=segments(lengths), use_cache=False)
    packed = counts[:]
    counts.clear()
    model(ids, use_cache=False)
    assert counts[0] > 1.2 * packed[0]  # those across texts
    counts.clear()
    for part in ids.split(lengths, 1):
        model(part, use_cache=False)
    alone = [sum(counts[layer::2]) for layer in range(2)]
    assert all(abs(both - each) <= 0.02 * each for both, each in zip(packed, alone, strict=True)), (packed, alone)


@pytest.mark.parametrize("with_mask", [False, True])
def test_encoders_keep_texts_of_a_row_apart(with_mask, tokens):
    ids, numbers, mask = tokens(2, 50), torch.tensor([[4] * 20 + [4 - 9] * 30, [7] * 35 + [8] * 15]), None
    if with_mask:
        mask = torch.ones(2, 50, dtype=torch.long)
        mask[0, 40:], mask[1, :3] = 0, 0
    for kind, name in ((ALiBiBertModel, "last_hidden_state"), (ALiBiBertForMaskedLM, "logits")):
        model = small_encoder(kind, vocab_size=60)
        found = model(ids, mask, segment_ids=numbers)[name]
        for row in range(2):
            seen = torch.ones(50).bool() if mask is None else mask[row].bool()
            for number in numbers[row].unique():
                of_text = seen & (numbers[row] == number)
                expected = model(ids[row][of_text][None])[name][0]
                torch.testing.assert_close(found[row][of_text], expected, rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match=r"segment_ids has shape \[2, 49\]"):
            model(ids, mask, segment_ids=numbers[:, :49])
    with pytest.raises(ValueError, match="segment_ids has no meaning for a classifier"):
        small_encoder(ALiBiBertForSequenceClassification, vocab_size=60)(ids, segment_ids=numbers)


def test_other_heads(build, tokens):
    """A token classifier keeps texts apart; one result per row has no texts to keep apart."""
    config = build("bloom").config
    ids = tokens(1, sum(LENGTHS))
    labels = BloomForTokenClassification(config).eval()
    with patch(labels):
        expected = torch.cat([labels(part).logits for part in ids.split(LENGTHS, 1)], 1)
        torch.testing.assert_close(labels(ids, segment_ids=segments()).logits, expected, rtol=1e-4, atol=1e-5)
        assert "segment_ids" in inspect.signature(labels.forward).parameters
        pickle.loads(pickle.dumps(labels))(ids, segment_ids=segments())
    whole = BloomForSequenceClassification(config).eval()
    with patch(whole), pytest.raises(ValueError, match="has one result per row"):
        whole(ids, segment_ids=segments())
