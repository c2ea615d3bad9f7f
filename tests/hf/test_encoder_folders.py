"""Encoder folders: read by the names of their weights or refused by name; saved folders load again."""

import json

import pytest
import torch
from encoder_oracle import LAYERS, LAYOUTS, WIDTH, WORDS, config, encode, random_state, small_encoder, write_folder
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertModel,
)

from alibi_attn.hf import (
    ALiBiBertForMaskedLM,
    ALiBiBertForQuestionAnswering,
    ALiBiBertForSequenceClassification,
    ALiBiBertForTokenClassification,
    ALiBiBertModel,
    ALiBiCausalLMConfig,
)
from alibi_attn.hf.readers import checkpoint_files

pytestmark = pytest.mark.usefixtures("no_gradients")

IDS = torch.arange(24).reshape(2, 12) % WORDS
QUERY = "encoder.layer.0.attention.self.query.weight"


CODE = {"gate": "second", "qk_norm": True, "extra_norm": True, "original_layout": "jina-code"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prefix", ["", "bert.", "model."])
@pytest.mark.parametrize("pickled", [False, True])
def test_every_family_is_read_with_every_prefix(layout, prefix, pickled, tmp_path):
    state = random_state(layout, prefix=prefix, head="mlm", pooler=True)
    state[f"{prefix}embeddings.position_ids"] = torch.arange(16)[None]  # buffers that some versions saved
    folder = write_folder(tmp_path / "model", state, config(layout, model_type=None), pickled=pickled)
    model = ALiBiBertModel.from_pretrained(folder, dtype=torch.float64)
    bare = {name.removeprefix(prefix): x for name, x in state.items()}
    truth = encode(bare, layout, IDS, torch.ones_like(IDS))
    torch.testing.assert_close(model(IDS).last_hidden_state, truth, rtol=1e-12, atol=1e-12)
    assert model.config.original_layout == layout
    assert not model.training
    torch.testing.assert_close(model.pooler.dense.weight, bare["pooler.dense.weight"].double())
    words = ALiBiBertForMaskedLM.from_pretrained(folder)
    torch.testing.assert_close(words.cls.predictions.decoder.weight, bare["embeddings.word_embeddings.weight"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kind", "auto"),
    [
        (ALiBiBertModel, AutoModel),
        (ALiBiBertForMaskedLM, AutoModelForMaskedLM),
        (ALiBiBertForSequenceClassification, AutoModelForSequenceClassification),
        (ALiBiBertForTokenClassification, AutoModelForTokenClassification),
        (ALiBiBertForQuestionAnswering, AutoModelForQuestionAnswering),
    ],
)
def test_saved_models_load_in_both_layouts_and_through_auto_classes(layout, kind, auto, tmp_path):
    kinds = {
        "jina-code": CODE,
        "jina": {"gate_act": "relu", "original_layout": "jina"},
        "mosaic": {"original_layout": "mosaic"},
    }
    model = small_encoder(kind, num_labels=3, emb_pooler="mean" if layout != "mosaic" else None, **kinds[layout])
    for parameter in model.parameters():
        parameter.normal_(0.1, 0.2)
    truth = model(IDS)[0]
    model.save_pretrained(tmp_path / "own")
    model.save_pretrained(tmp_path / "theirs", layout="original")
    loaded = [
        kind.from_pretrained(tmp_path / "own"),
        auto.from_pretrained(tmp_path / "own"),
        kind.from_pretrained(tmp_path / "theirs"),
    ]
    for again in loaded:
        assert type(again) is kind
        assert torch.equal(again(IDS)[0], truth)
        assert again.config.emb_pooler == model.config.emb_pooler
    assert AutoConfig.from_pretrained(tmp_path / "own").gate == model.config.gate
    names = set(load_file(tmp_path / "theirs" / "model.safetensors"))
    assert any(QUERY in name for name in names) == (layout != "mosaic")
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["model_type"] == "bert"
    with pytest.raises(FileExistsError, match="never overwritten"):
        model.save_pretrained(tmp_path / "theirs", layout="original")


def test_a_folder_in_a_family_s_names_holds_its_weights_unchanged(tmp_path):
    for layout in LAYOUTS:
        state = random_state(layout, pooler=True)
        model = ALiBiBertModel.from_pretrained(write_folder(tmp_path / layout, state, config(layout)))
        model.save_pretrained(tmp_path / f"{layout} again", layout="original")
        again = load_file(tmp_path / f"{layout} again" / "model.safetensors")
        assert again.keys() == state.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
        said, first = (json.loads((tmp_path / f / "config.json").read_text()) for f in (f"{layout} again", layout))
        if layout != "mosaic":
            assert (said["feed_forward_type"], said["emb_pooler"]) == (first["feed_forward_type"], first["emb_pooler"])


def test_a_bare_model_ignores_a_heads_weights_and_a_missing_head_is_drawn_on_request(tmp_path):
    model = small_encoder()
    model.save_pretrained(tmp_path / "bare")
    fresh = ALiBiBertForSequenceClassification.from_pretrained(tmp_path / "bare", new_head=True, num_labels=5)
    assert fresh.classifier.weight.shape == (5, WIDTH)
    assert torch.equal(fresh.bert.pooler.dense.weight, model.pooler.dense.weight)
    fresh.save_pretrained(tmp_path / "classifier")
    assert torch.equal(ALiBiBertModel.from_pretrained(tmp_path / "classifier")(IDS)[0], model(IDS)[0])
    other = ALiBiBertForSequenceClassification.from_pretrained(tmp_path / "classifier", new_head=True, num_labels=2)
    assert other.classifier.weight.shape == (2, WIDTH)
    with pytest.raises(ValueError, match=r"has classifier\.weight \[5, 48\] where its config needs \[2, 48\]"):
        ALiBiBertForSequenceClassification.from_pretrained(tmp_path / "classifier", num_labels=2)
    small_encoder(pooler=False).save_pretrained(tmp_path / "without pooler")
    with pytest.raises(ValueError, match=r"the weights classifier\.bias, .*pooler\.dense\.weight are missing"):
        ALiBiBertForSequenceClassification.from_pretrained(tmp_path / "without pooler")


def test_the_encoder_of_a_masked_language_model_loads_alone(tmp_path):
    model = small_encoder(ALiBiBertForMaskedLM)
    model.save_pretrained(tmp_path)
    for alone in (
        ALiBiBertModel.from_pretrained(tmp_path),
        AutoModel.from_pretrained(tmp_path, dtype="auto", device_map="cpu"),
    ):
        assert torch.equal(alone(IDS).last_hidden_state, model.bert(IDS).last_hidden_state)
        assert alone(IDS).pooler_output is None
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, new_head=True, num_labels=4)
    assert classifier(IDS).logits.shape == (2, 4)
    options = {"config": model.config, "new_head": True, "num_labels": 3}
    assert ALiBiBertForSequenceClassification.from_pretrained(tmp_path, **options)(IDS).logits.shape == (2, 3)
    assert model.config.num_labels == 2


def _without(name):
    return lambda state, said: state.pop(name)


def _with(name, *shape):
    return lambda state, said: state.update({name: torch.zeros(*shape)})


def _says(**fields):
    return lambda state, said: said.update(fields)


def _integers(state, said):
    state[QUERY] = state[QUERY].long()


def _plain_bert(state, said):
    state.clear()
    from transformers import BertConfig

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 6, "intermediate_size": 40}
    state.update(BertModel(BertConfig(vocab_size=WORDS, **sizes)).state_dict())


EMBEDDED, TYPES = "embeddings.word_embeddings.weight", "embeddings.token_type_embeddings.weight"
NO_ALIBI = "position embeddings, so it does not use ALiBi"
BROKEN = [
    (_without(QUERY), rf"the weights {QUERY} are missing; its config.json and weights must come from one checkpoint$"),
    (_without(EMBEDDED), f"the weights {EMBEDDED} are missing"),
    (_without(TYPES), f"the weights {TYPES} are missing"),
    (_with("encoder.layer.1.mlp.more.weight", 3), "it has unexpected weights encoder.layer.1.mlp.more.weight"),
    (_with("adapter.weight", 3), r"unexpected weights adapter\.weight; if they are a head, remove them: without a"),
    (_with("encoder.layer.3.mlp.wo.bias", WIDTH), "has num_hidden_layers 2 but the tensors have 3"),
    (_with(f"bert.{EMBEDDED}", WORDS, WIDTH), f"it has unexpected weights bert.{EMBEDDED}"),
    (_with(QUERY, WIDTH, 7), rf"has {QUERY} \[48, 7\], .* where its config needs \[144, 48\] in all"),
    (_integers, rf"holds {QUERY} as torch.int64: quantized weights are not supported"),
    (_with("embeddings.position_embeddings.weight", 16, WIDTH), NO_ALIBI),
    (_plain_bert, NO_ALIBI),
    (_says(hidden_size=96), "config.json has hidden_size 96 but the tensors have 48"),
    (_says(num_hidden_layers=12), "config.json has num_hidden_layers 12 but the tensors have 2"),
    (_says(vocab_size=WORDS + 8), f"config.json has vocab_size {WORDS + 8} but the tensors have {WORDS}"),
    (_says(num_attention_heads=None), "has no num_attention_heads, which the tensors do not determine"),
    (_says(num_attention_heads=5), "hidden_size is 48 but must be a multiple of num_attention_heads, 5"),
    (_says(num_attention_heads="six"), "num_attention_heads is 'six' but must be a positive integer"),
    (_says(feed_forward_type="original"), "has feed_forward_type 'original' but must have 'geglu' or 'reglu'"),
    (_says(alibi_scaling=2), "alibi_scaling = 2 but only 1"),
    (_says(is_decoder=True), "only plain encoders are supported"),
    (_says(hidden_act=[1]), "is invalid|hidden_act is"),
    (_says(id2label=7), "is invalid"),
    (_says(num_labels=10**9), "num_labels is 1000000000 but must be an integer from 1 to 1000000"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_mismatched_weights_are_refused_by_name(change, message, tmp_path):
    state, said = random_state("jina"), config("jina")
    change(state, said)
    folder = write_folder(tmp_path / "model", state, said)
    with pytest.raises(ValueError, match=message) as raised:
        ALiBiBertModel.from_pretrained(folder)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_padded_vocabulary_is_taken_from_the_tensors(tmp_path):
    folder = write_folder(tmp_path / "padded", random_state("mosaic"), config("mosaic", vocab_size=WORDS - 3))
    assert ALiBiBertModel.from_pretrained(folder).config.vocab_size == WORDS


def test_tied_words_must_be_equal(tmp_path):
    state = random_state("mosaic", prefix="bert.", head="mlm")
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"].clone()
    folder = write_folder(tmp_path / "tied", state, config("mosaic"))
    assert ALiBiBertForMaskedLM.from_pretrained(folder).cls.predictions.decoder.bias.any()
    state["cls.predictions.decoder.weight"][0, 0] += 1
    write_folder(tmp_path / "tied", state, config("mosaic"))
    untied = r"decoder\.weight is not embeddings\.word_embeddings\.weight; set tie_word_embeddings"
    with pytest.raises(ValueError, match=untied):
        ALiBiBertForMaskedLM.from_pretrained(folder)
    write_folder(tmp_path / "tied", state, config("mosaic", tie_word_embeddings=False))
    apart = ALiBiBertForMaskedLM.from_pretrained(folder)
    assert torch.equal(apart.cls.predictions.decoder.weight, state["cls.predictions.decoder.weight"])


def test_a_wrong_config_in_a_folder_that_we_wrote_is_one_sentence(tmp_path):
    """`test_checkpoint_files.py` damages the files."""
    small_encoder().save_pretrained(tmp_path)
    for wrong in ({"gate": 3}, {"hidden_size": "wide"}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "alibi-bert", **wrong}))
        with pytest.raises(ValueError, match=r"is invalid|does not hold a checkpoint of ALiBiBert|missing"):
            ALiBiBertModel.from_pretrained(tmp_path)


def test_a_config_cannot_change_how_transformers_loads(tmp_path):
    small_encoder().save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    said |= {
        "attn_implementation": "owner/kernel",
        "transformers_weights": "../x.safetensors",
        "dtype": 7,
        "auto_map": {"A": "b"},
    }
    (tmp_path / "config.json").write_text(json.dumps(said))
    model = ALiBiBertModel.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "auto_map")


@pytest.mark.parametrize("kind", ["bloom", "falcon", "mpt", "baichuan", "jais", ALiBiCausalLMConfig.model_type])
def test_a_decoder_is_named_with_what_reads_it(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ValueError, match=rf"holds a decoder \({kind}\).*alibi eval-text"):
        ALiBiBertModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name", ["", "checkpoints/alibi/seed-0-1", "checkpoints/alibi/seed-0-1/step-00000002", ":alibi"]
)
def test_a_model_of_the_lab_is_named_with_the_command_that_tests_it(name, tmp_path):
    step = tmp_path / "n" / "checkpoints" / "alibi" / "seed-0-1" / "step-00000002"
    step.mkdir(parents=True)
    (step / "config.json").write_text('{"schema": 3}')
    folder = f"{tmp_path / 'n'}{name if name.startswith(':') else f'/{name}'}"
    with pytest.raises(ValueError, match=r"was trained by alibi run; test it with alibi eval, or .* alibi export"):
        checkpoint_files.resolve(folder)
    (tmp_path / "n" / "config.json").write_text('{"model_type": "bloom"}')
    assert checkpoint_files.resolve(tmp_path / "n") == tmp_path / "n"


def test_originals_in_half_precision_become_single_unless_asked(tmp_path):
    state = {name: x.half() for name, x in random_state("jina").items()}
    folder = write_folder(tmp_path / "half", state, config("jina", torch_dtype="float16"))
    assert ALiBiBertModel.from_pretrained(folder).dtype == torch.float32
    assert ALiBiBertModel.from_pretrained(folder, dtype="auto").dtype == torch.float16
    assert ALiBiBertModel.from_pretrained(folder, dtype=torch.bfloat16).dtype == torch.bfloat16
    small_encoder().bfloat16().save_pretrained(tmp_path / "own")
    assert ALiBiBertModel.from_pretrained(tmp_path / "own").dtype == torch.bfloat16


def test_a_model_goes_back_into_the_folder_that_it_came_from(tmp_path):
    model = small_encoder()
    model.save_pretrained(tmp_path)
    again = ALiBiBertModel.from_pretrained(tmp_path)
    again.save_pretrained(tmp_path)
    assert torch.equal(ALiBiBertModel.from_pretrained(tmp_path)(IDS)[0], model(IDS)[0])


@pytest.mark.parametrize(
    ("fields", "layout", "message"),
    [
        ({}, "bert", "layout is 'bert' but must be 'own', 'original' or one of 'mosaic', 'jina-code', 'jina'"),
        ({}, "jina-code", "layout 'jina-code' has no names for a model with gate='first'"),
        (CODE, "jina", "layout 'jina' has no names for a model with gate='second'"),
        ({"gate_act": "relu"}, "mosaic", "has GELU in its gates but gate_act is 'relu'"),
        ({"qkv_bias": False}, "mosaic", "qkv_bias=False"),
        ({}, "original", "was not read from an original; pass 'own' or one of 'mosaic'"),
    ],
)
def test_a_layout_that_cannot_hold_the_model_is_refused_and_nothing_written(fields, layout, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        small_encoder(**fields).save_pretrained(tmp_path / "new", layout=layout)
    assert not list(tmp_path.iterdir())
