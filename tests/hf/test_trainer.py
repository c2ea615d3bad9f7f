"""transformers' Trainer, with and without a LoRA of peft, trains each of our classes and patched models."""

import copy

import pytest
import torch
from decoder_checkpoints import SIZES
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments
from transformers_names import checkpointing_arguments

from alibi_attn.hf import (
    ALiBiBertConfig,
    ALiBiBertForMaskedLM,
    ALiBiBertForQuestionAnswering,
    ALiBiBertForSequenceClassification,
    ALiBiBertForTokenClassification,
    ALiBiCausalLMConfig,
    ALiBiForCausalLM,
    patch,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing.*is deprecated:FutureWarning"
)  # peft calls it
PATCHED = ("bloom", "mpt", "falcon")
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
HEADS = {
    "masked": lambda: ALiBiBertForMaskedLM(ALiBiBertConfig(**SIZES, **OFF)),
    "classes": lambda: ALiBiBertForSequenceClassification(ALiBiBertConfig(**SIZES, **OFF, num_labels=3)),
    "number": lambda: ALiBiBertForSequenceClassification(ALiBiBertConfig(**SIZES, **OFF, num_labels=1)),
    "flags": lambda: ALiBiBertForSequenceClassification(ALiBiBertConfig(**SIZES, **OFF, num_labels=3)),
    "tokens": lambda: ALiBiBertForTokenClassification(ALiBiBertConfig(**SIZES, **OFF, num_labels=3)),
    "answers": lambda: ALiBiBertForQuestionAnswering(ALiBiBertConfig(**SIZES, **OFF)),
}
OWN = (*HEADS, "causal")


def kinds(*short):
    """All kinds; those not listed are variants for the long run."""
    return [pytest.param(kind, marks=[] if kind in short else pytest.mark.long) for kind in OWN + PATCHED]


# The maps that queries, keys and values come from.
MAPS = {"bloom": "query_key_value", "falcon": "query_key_value", "causal": "qkv_proj"}


@pytest.fixture
def make(build):
    def maker(kind):
        torch.manual_seed(0)
        if kind in PATCHED:
            return build(kind)
        return ALiBiForCausalLM(ALiBiCausalLMConfig(**SIZES)) if kind == "causal" else HEADS[kind]()

    return maker


def rows(kind, count=8):
    """Examples of two lengths, with another number of labels in each."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for at in range(count):
        ids = torch.randint(3, 60, (9,), generator=draw)
        mask = torch.ones_like(ids)
        mask[6 + at % 4 :] = 0
        labels = torch.where((torch.arange(9) % (2 + at % 3) == 0) & mask.bool(), ids, -100)
        if kind == "classes":
            labels = torch.tensor(at % 3)
        elif kind == "number":
            labels = torch.tensor(at / 7)
        elif kind == "flags":
            labels = torch.tensor([at % 2, at % 3 == 0, 1.0])
        elif kind == "tokens":
            labels = torch.where(labels == -100, labels, labels % 3)
        answer = {"start_positions": torch.tensor(at % 3), "end_positions": torch.tensor(at % 3 + 2)}
        found.append({"input_ids": ids, "attention_mask": mask} | (answer if kind == "answers" else {"labels": labels}))
    return found


def trainer(model, kind, folder, *, batch=2, accumulated=2, **options):
    given = TrainingArguments(
        folder,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulated,
        num_train_epochs=1,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        seed=3,
        **{"save_strategy": "no", **options},
    )
    return Trainer(model, given, train_dataset=rows(kind), eval_dataset=rows(kind, 4))


def logits(model, kind):
    batch = {name: torch.stack([row[name] for row in rows(kind)]) for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return model.eval()(**batch)[0]


@pytest.mark.parametrize("kind", OWN + PATCHED)
def test_accumulated_batches_train_as_one_large_batch(kind, make, tmp_path):
    """Each batch has another number of labels, so means of means would differ."""
    model = make(kind)
    if kind in PATCHED:
        patch(model)
    other = copy.deepcopy(model)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trainer(model, kind, tmp_path, batch=2, accumulated=2).train()
    trainer(other, kind, tmp_path, batch=4, accumulated=1).train()
    moved = {name: weight - before[name] for name, weight in model.named_parameters()}
    for name, weight in other.named_parameters():
        torch.testing.assert_close(moved[name], weight - before[name], rtol=1e-4, atol=1e-6)
    assert max(float(x.detach().abs().max()) for x in moved.values()) > 1e-3


@pytest.mark.parametrize("kind", kinds("masked", "number", "tokens", "answers", "causal", "bloom"))
def test_an_epoch_is_evaluated_and_what_it_saves_loads(kind, make, tmp_path):
    model = make(kind)
    if kind in PATCHED:
        patch(model)
    training = trainer(
        model, kind, tmp_path, eval_strategy="epoch", save_strategy="epoch", per_device_eval_batch_size=3
    )
    training.train()
    (loss,) = [one["eval_loss"] for one in training.state.log_history if "eval_loss" in one]
    batch = {name: torch.stack([row[name] for row in rows(kind, 4)]) for name in rows(kind, 1)[0]}
    if kind in ("classes", "number", "flags", "answers"):  # means of three texts and of one
        with torch.no_grad():
            assert loss == pytest.approx(float(model.eval()(**batch).loss), rel=1e-4)
    assert loss > 0
    again = type(model).from_pretrained(tmp_path / "checkpoint-2").eval()
    if kind in PATCHED:
        patch(again)
    assert torch.equal(logits(again, kind), logits(model, kind))


def adapted(model, kind):
    torch.manual_seed(5)
    settings = LoraConfig(r=4, target_modules=[MAPS.get(kind, "Wqkv")], init_lora_weights=False)
    return get_peft_model(model, settings)


CASES = [
    pytest.param(
        kind, first, how, marks=[] if how is None and kind in ("classes", "causal", "bloom") else pytest.mark.long
    )
    for kind in OWN + PATCHED
    for first in ((True, False) if kind in PATCHED else (False,))
    for how in (None, True, False)
]


@pytest.mark.parametrize(("kind", "first", "reentrant"), CASES)
def test_a_lora_trains_as_that_of_an_unpatched_model_and_merges(kind, first, reentrant, make, tmp_path):
    """`first`: the model is patched before the adapter is added, else after it."""
    options = {"save_strategy": "epoch"}
    if reentrant is not None:
        options |= checkpointing_arguments(reentrant)
    plain = adapted(make(kind), kind)
    before = [weight.clone() for weight in plain.parameters() if weight.requires_grad]
    trainer(plain, kind, tmp_path / "plain").train()
    after = [weight for weight in plain.parameters() if weight.requires_grad]
    assert not any(torch.equal(weight, old) for weight, old in zip(after, before, strict=True))
    model = make(kind)
    handle = patch(model) if first else None
    lora = adapted(model, kind)
    if kind in PATCHED and not first:
        handle = patch(lora)
    trainer(lora, kind, tmp_path / "lora", **options).train()
    for (name, weight), expected in zip(lora.named_parameters(), plain.parameters(), strict=True):
        assert weight.requires_grad == ("lora_" in name)
        torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-5)
    expected = logits(lora, kind)
    again = PeftModel.from_pretrained(make(kind), tmp_path / "lora" / "checkpoint-2")
    if kind in PATCHED:
        patch(again)
    torch.testing.assert_close(logits(again, kind), expected, rtol=1e-5, atol=1e-5)
    lora.merge_adapter()
    torch.testing.assert_close(logits(lora, kind), expected, rtol=1e-4, atol=1e-5)
    lora.unmerge_adapter()
    torch.testing.assert_close(logits(lora, kind), expected, rtol=1e-4, atol=1e-5)
    merged = lora.merge_and_unload()
    torch.testing.assert_close(logits(merged, kind), expected, rtol=1e-4, atol=1e-5)
    if handle is not None:
        handle.undo()
        torch.testing.assert_close(logits(merged, kind), logits(plain, kind), rtol=1e-3, atol=1e-4)
