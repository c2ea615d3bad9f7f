"""The encoders equal their formulas and the outputs of the original code; padding changes nothing."""

import json
from pathlib import Path

import pytest
import torch
from closeness import assert_within
from encoder_oracle import HEADS, LAYOUTS, WIDTH, WORDS, config, encode, random_state, write_folder
from safetensors import safe_open
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers_names import checkpoint_activations

from alibi_attn.hf import ALiBiBertConfig, ALiBiBertForMaskedLM, ALiBiBertForSequenceClassification, ALiBiBertModel
from alibi_attn.hf.readers.encoder import packing

pytestmark = pytest.mark.usefixtures("no_gradients")
DATA = Path(__file__).parent / "data"
RECORDED = {"jina-v2": "jina", "jina-v2-code": "jina-code", "mosaic-dnabert2": "mosaic"}
# Rows of a batch of 12: full, padded right, padded left, one token, tokens in the middle.
MASK = torch.tensor([[1] * 12, [1] * 7 + [0] * 5, [0] * 4 + [1] * 8, [0] * 11 + [1], [0] * 3 + [1] * 5 + [0] * 4])
HOLES = torch.tensor([[1] * 12, [1, 1, 0, 0, 0, 1, 1, 1, 0, 1, 0, 0], [0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1]])


@pytest.fixture
def load(tmp_path):
    """load(layout, class, dtype=…) -> (model, its original state dict)."""

    def loaded(
        layout: str, kind: type = ALiBiBertModel, *, dtype: torch.dtype = torch.float64, head: str = "", **said: object
    ):
        state = random_state(layout, head=head)
        folder = write_folder(tmp_path / f"{layout}-{head}", state, config(layout, **said))
        return kind.from_pretrained(folder, dtype=dtype), state

    return loaded


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(WORDS, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "share"), [(torch.float64, 1e-13), (torch.float32, 3e-6)])
def test_hidden_states_equal_the_formulas(layout, dtype, share, load):
    model, state = load(layout, dtype=dtype)
    ids, types = tokens(5, 12), tokens(5, 12, seed=2) % 2
    for mask in (MASK, MASK[:, :1].expand(5, 12) * 0 + 1):
        assert_within(model(ids, mask, types).last_hidden_state, encode(state, layout, ids, mask, types), share)
    assert_within(model(ids[:3], HOLES).last_hidden_state, encode(state, layout, ids[:3], HOLES), share)
    one = ids[:, :1]
    assert_within(model(one).last_hidden_state, encode(state, layout, one, torch.ones_like(one)), share)


def test_texts_far_longer_than_the_trained_length_equal_the_formulas(load):
    model, state = load("jina", dtype=torch.float32)
    assert model.config.max_position_embeddings == 16
    ids, mask = tokens(2, 700), torch.ones(2, 700, dtype=torch.long)
    mask[1, 450:] = 0
    assert_within(model(ids, mask).last_hidden_state, encode(state, "jina", ids, mask), 3e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_activating_the_wrong_half_is_detected(layout, load):
    model, state = load(layout)
    ids = tokens(1, 12)
    wrong = "first" if layout == "jina-code" else "second"
    mistaken = encode(state, layout, ids, torch.ones_like(ids), activates=wrong)
    with pytest.raises(AssertionError, match="of the largest entry"):
        assert_within(model(ids).last_hidden_state, mistaken, 0.05)


def test_a_gate_of_relu_is_read_from_the_config(load):
    model, state = load("jina", feed_forward_type="reglu")
    ids = tokens(1, 12)
    assert model.config.gate_act == "relu"
    truth = encode(state, "jina", ids, torch.ones_like(ids), act="relu")
    assert_within(model(ids).last_hidden_state, truth, 1e-13)


@pytest.mark.parametrize(("name", "layout"), RECORDED.items())
def test_hidden_states_are_those_of_the_original_modelling_codes(name, layout, tmp_path):
    with safe_open(DATA / f"{name}.safetensors", "pt") as file:
        about, found = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    sizes = {key: int(about[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
    said = config(layout, **sizes, intermediate_size=int(about["intermediate_size"]))
    state = {key.removeprefix("weights."): x for key, x in found.items() if key.startswith("weights.")}
    model = ALiBiBertModel.from_pretrained(write_folder(tmp_path / name, state, said))
    ids, mask, theirs = found["input_ids"], found["attention_mask"], found["last_hidden_state"]
    assert_within(model(ids, mask).last_hidden_state, theirs, 3e-6)
    assert_within(encode(state, layout, ids, mask), theirs, 3e-6)


def test_a_batch_of_padding_alone_is_zeros(load):
    model, _ = load("mosaic")
    assert not model(tokens(2, 5), torch.zeros(2, 5)).last_hidden_state.any()
    mask = torch.tensor([[0] * 5, [1] * 5])
    assert_within(model(tokens(2, 5), mask).last_hidden_state[1:], model(tokens(2, 5)[1:]).last_hidden_state, 1e-13)


def test_padding_is_not_computed(load):
    model, _ = load("jina")
    seen = []
    model.encoder.layer[1].register_forward_hook(lambda _module, inputs, _output: seen.append(tuple(inputs[0].shape)))
    model(tokens(5, 12), MASK)
    model(tokens(3, 12), HOLES)
    model(tokens(3, 12), torch.ones(3, 12))
    assert seen == [(1, int(MASK.sum()), WIDTH), (3, 12, WIDTH), (3, 12, WIDTH)]


def test_a_captured_batch_is_not_packed_and_equals_itself(load, monkeypatch):
    model, _ = load("jina")
    seen, ids = [], tokens(5, 12)
    expected = model(ids, MASK).last_hidden_state
    model.encoder.layer[1].register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].shape[:2]))
    monkeypatch.setattr(packing, "_is_captured", lambda _: True)
    assert_within(model(ids, MASK).last_hidden_state, expected, 1e-13)
    assert seen == [(5, 12)]


def test_a_mask_is_read_twice():
    """On a GPU each read waits for it: the facts of a mask in one, the places of its tokens in another."""
    reads = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.name() in ("aten::_local_scalar_dense", "aten::nonzero"):
                reads.append(function.name())
            return function(*args, **(kwargs or {}))

    with Reads():
        assert packing.packing(MASK, *MASK.shape, may_pack=True).places is not None
    assert reads == ["aten::nonzero"]  # a list of numbers is read without an operation


@torch.enable_grad()
def test_long_packed_rows_are_filled_up_to_a_few_lengths(load):
    model, _ = load("jina")
    seen = []
    model.encoder.layer[1].register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].shape[1]))
    ids = tokens(5, 80)
    for longest in range(50, 80):
        lengths = torch.tensor([longest, 40, 31, 5, 1])
        mask = torch.arange(80) < lengths[:, None]
        with torch.no_grad():
            states = model(ids, mask).last_hidden_state
        assert not states[~mask].any()
    assert set(seen) == {128, 132, 136, 140, 144, 148, 152, 156}
    words = model.embeddings.word_embeddings.weight
    model(ids, mask).last_hidden_state.square().sum().backward()
    together, words.grad = words.grad, None
    for row, length, state in zip(ids, lengths, states, strict=True):
        alone = model(row[:length][None]).last_hidden_state
        assert_within(state[:length], alone[0], 1e-13)
        alone.square().sum().backward()
    assert_within(together, words.grad, 1e-13)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", [MASK, HOLES], ids=["padding", "holes"])
@pytest.mark.parametrize("checkpointing", [False, True])
@torch.enable_grad()
def test_gradients_equal_those_of_the_formulas(layout, mask, checkpointing, load):
    model, state = load(layout, hidden_dropout_prob=0.0)
    model.train()
    if checkpointing:
        checkpoint_activations(model)
    ids = tokens(len(mask), 12)
    weights = torch.randn(len(mask), 12, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (model(ids, mask).last_hidden_state * weights).sum().backward()
    leaves = {name: x.double().requires_grad_() for name, x in state.items()}
    (encode(leaves, layout, ids, mask) * weights).sum().backward()
    words = model.embeddings.word_embeddings.weight.grad
    assert_within(words, leaves["embeddings.word_embeddings.weight"].grad, 1e-12)
    for n, layer in enumerate(model.encoder.layer):
        at = f"encoder.layer.{n}.attention.self."
        names = (
            [f"{at}Wqkv.weight"] if layout == "mosaic" else [f"{at}{part}.weight" for part in ("query", "key", "value")]
        )
        truth = torch.cat([leaves[name].grad for name in names])
        assert_within(layer.attention.self.Wqkv.weight.grad, truth, 1e-12)
        gated = f"encoder.layer.{n}.mlp." + ("up_gated_layer" if layout == "jina-code" else "gated_layers") + ".weight"
        assert_within(layer.mlp.gated_layers.weight.grad, leaves[gated].grad, 1e-12)


def test_dropout_acts_in_training_only(load):
    model, _ = load("mosaic", attention_probs_dropout_prob=0.2)
    ids, seen = tokens(5, 12), []
    model.encoder.layer[0].register_forward_hook(lambda _module, inputs, _output: seen.append(tuple(inputs[0].shape)))
    still = model(ids, MASK).last_hidden_state
    assert torch.equal(still, model(ids, MASK).last_hidden_state)
    model.train()
    first = model(ids, MASK).last_hidden_state
    # Attention with dropout builds all scores of a row: a packed row would be too long.
    assert seen[-1] == (5, 12, WIDTH)
    assert first.isfinite().all()
    assert not torch.equal(first, still)
    assert not first[~MASK.bool()].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_without_a_graph_break_it_is_the_same(layout, load):
    model, state = load(layout)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids = tokens(5, 12)
    assert_within(compiled(ids, MASK).last_hidden_state, encode(state, layout, ids, MASK), 1e-13)


def test_bf16_and_autocast_are_near(load):
    model, state = load("mosaic", dtype=torch.bfloat16)
    ids = tokens(2, 12)
    truth = encode(state, "mosaic", ids, torch.ones_like(ids))
    found = model(ids).last_hidden_state
    assert found.dtype == torch.bfloat16
    assert_within(found, truth, 0.05)
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert_within(model(ids).last_hidden_state, truth, 0.05)


@torch.enable_grad()
def test_the_head_of_words_is_dense_activation_norm_and_tied_decoder(load):
    model, state = load("jina", ALiBiBertForMaskedLM, head="mlm")
    ids = tokens(2, 12)
    labels = torch.where(ids % 3 == 0, ids, -100)
    found = model(ids, labels=labels)
    x = encode(state, "jina", ids, torch.ones_like(ids))
    state = {name: x.double() for name, x in state.items()}
    x = x @ state["cls.predictions.transform.dense.weight"].T + state["cls.predictions.transform.dense.bias"]
    norm = [state[f"cls.predictions.transform.LayerNorm.{kind}"] for kind in ("weight", "bias")]
    x = torch.nn.functional.layer_norm(torch.nn.functional.gelu(x), (WIDTH,), *norm, eps=1e-12)
    logits = x @ state["embeddings.word_embeddings.weight"].T + state["cls.predictions.bias"]
    assert_within(found.logits, logits, 1e-13)
    scored = labels != -100
    expected = -logits.log_softmax(-1)[scored].gather(-1, labels[scored][:, None]).mean()
    torch.testing.assert_close(found.loss, expected)
    for count in (7, torch.tensor(7)):
        part = model(ids, labels=labels, num_items_in_batch=count).loss
        torch.testing.assert_close(part, expected * scored.sum() / 7)
    found.loss.backward()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_classifier_reads_the_first_token_after_the_padding(load):
    model, state = load("jina", ALiBiBertForSequenceClassification, head="classifier", num_labels=2)
    ids = tokens(5, 12)
    found = model(ids, MASK, labels=torch.tensor([0, 1, 1, 0, 1]))
    hidden = encode(state, "jina", ids, MASK)
    first = torch.stack([row[mask.bool()][0] for row, mask in zip(hidden, MASK, strict=True)])
    state = {name: x.double() for name, x in state.items()}
    pooled = torch.tanh(first @ state["pooler.dense.weight"].T + state["pooler.dense.bias"])
    logits = pooled @ state["classifier.weight"].T + state["classifier.bias"]
    assert_within(found.logits, logits, 1e-13)
    torch.testing.assert_close(found.loss, torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 1, 0, 1])))


@torch.enable_grad()
def test_a_reranker_of_one_label_has_one_score(load, tmp_path):
    state = random_state("jina", head="classifier", prefix="bert.", labels=1)
    said = config("jina", id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    model = ALiBiBertForSequenceClassification.from_pretrained(write_folder(tmp_path / "one", state, said))
    found = model(tokens(3, 12), labels=torch.randn(3))
    assert found.logits.shape == (3, 1)
    assert model.config.problem_type == "regression"
    found.loss.backward()


WRONG = [
    ({"input_ids": torch.zeros(3, dtype=torch.long)}, r"input_ids has shape \[3\] but must be \[B, T\]"),
    ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, r"input_ids has shape \[1, 0\]"),
    ({}, "pass exactly one of input_ids and inputs_embeds"),
    ({"inputs_embeds": torch.zeros(1, 2, 7)}, "inputs_embeds has width 7 but hidden_size is 48"),
    ({"input_ids": torch.tensor([[1, WORDS]])}, rf" has values from 1 to {WORDS} but must be in \[0, {WORDS}\)"),
    ({"input_ids": torch.tensor([[1, -1]])}, "input_ids has values from -1 to 1"),
    ({"token_type_ids": torch.tensor([[0, 2]])}, r"token_type_ids has values from 0 to 2 .* \[0, 2\)"),
    ({"token_type_ids": torch.tensor([0, 1])}, r"token_type_ids has shape \[2\]"),
    ({"attention_mask": torch.ones(2, 2)}, r"attention_mask has shape \[2, 2\] but must be \[B, T\] = \[1, 2\]"),
    ({"attention_mask": torch.tensor([[0.0, -1e4]])}, "values other than 0 and 1"),
    ({"output_attentions": True}, "T×T weights, .*record_attention"),
    ({"input_ids": [[1, 2]]}, "input_ids is a list but must be a tensor"),
    ({"input_ids": torch.ones(1, 2)}, r"input_ids is torch\.float32 but must be int64 or int32"),
    ({"token_type_ids": torch.zeros(1, 2)}, r"token_type_ids is torch\.float32 but must be int64 or int32"),
    ({"attention_mask": [[1, 1]]}, "attention_mask is a list but must be a tensor"),
    ({"inputs_embeds": torch.zeros(1, 2, 48).long()}, "inputs_embeds is torch.int64 but must have a floating"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_wrong_input_is_refused_at_the_door(changes, message, load):
    model, _ = load("mosaic")
    given = changes if not changes or "inputs_embeds" in changes else {"input_ids": torch.tensor([[1, 2]]), **changes}
    with pytest.raises((ValueError, TypeError), match=message):
        model(**given)


def test_word_embeddings_may_be_given(load):
    model, _ = load("mosaic")
    ids = tokens(5, 12)
    given = model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=MASK).last_hidden_state
    assert torch.equal(given, model(ids, MASK).last_hidden_state)
    assert torch.equal(model(ids, return_dict=False)[0], model(ids).last_hidden_state)
    states = model(ids, MASK, output_hidden_states=True).hidden_states
    assert len(states) == 3
    assert torch.equal(states[-1], given)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 50}, "hidden_size is 50 but must be a multiple of num_attention_heads, 12"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0 but must be a positive integer"),
        ({"gate": "third"}, "gate is 'third' but must be one of 'first', 'second'"),
        ({"hidden_dropout_prob": 1.5}, r"hidden_dropout_prob is 1.5 but must be a probability in \[0, 1\)"),
        ({"hidden_act": "gelou"}, "hidden_act is 'gelou'"),
        ({"layer_norm_eps": -1.0}, "layer_norm_eps is -1.0"),
    ],
)
def test_a_config_that_makes_no_model_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ALiBiBertConfig(**fields)


def test_no_memory_is_taken_on_the_meta_device_and_nothing_is_quadratic():
    with torch.device("meta"):
        model = ALiBiBertModel(ALiBiBertConfig(max_position_embeddings=10**6))
    assert all(x.is_meta for x in model.parameters())
    assert list(model.buffers()) == []
    # Jina v2 base: its file of float16 has 20,616 bytes more than twice that.
    assert sum(x.numel() for x in model.parameters()) == 137_368_320
    assert json.loads(model.config.to_json_string())["num_attention_heads"] == 2 * HEADS
