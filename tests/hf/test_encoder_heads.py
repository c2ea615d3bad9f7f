"""Heads of encoders: those that a folder has and a class lacks, and the reverse; logits and losses equal their formulas."""

import pytest
import torch
from encoder_oracle import LAYOUTS, WIDTH, WORDS, config, encode, random_state, write_folder
from torch.nn import functional as F

from alibi_attn.hf import (
    ALiBiBertForMaskedLM,
    ALiBiBertForQuestionAnswering,
    ALiBiBertForSequenceClassification,
    ALiBiBertForTokenClassification,
    ALiBiBertModel,
)

LENGTH = 12
IDS = torch.arange(3 * LENGTH).reshape(3, LENGTH) % WORDS
MASK = torch.tensor([[1] * 12, [1] * 7 + [0] * 5, [0] * 4 + [1] * 8])
# Heads of published folders that none of our classes has, next to one that a class has.
OTHERS = {
    "linear.weight": (16, WIDTH),
    "dense.weight": (WIDTH, WIDTH),
    "lm_head.bias": (WORDS,),
    "head.0.norm.weight": (WIDTH,),
}
HEADS = {
    ALiBiBertForTokenClassification: ("classifier", 3),
    ALiBiBertForQuestionAnswering: ("qa_outputs", 2),
}


def folder_with(folder, layout, prefix="bert.", **more):
    """A checkpoint with more weights, and the same weights without prefix."""
    draw = torch.Generator().manual_seed(5)
    state = random_state(layout, prefix=prefix)
    state |= {name: torch.randn(*shape, generator=draw) for name, shape in more.items()}
    state |= {"head.steps": torch.tensor([7])} if prefix else {}
    write_folder(folder, state, config(layout))
    return folder, {name.removeprefix(prefix): x for name, x in state.items()}


def close(found, truth):
    torch.testing.assert_close(found, truth, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_heads_that_a_class_lacks_are_named_once_and_ignored(layout, tmp_path, caplog):
    more = {**OTHERS, "qa_outputs.weight": (2, WIDTH), "qa_outputs.bias": (2,)}
    folder, state = folder_with(tmp_path / "model", layout, **more)
    found = ALiBiBertModel.from_pretrained(folder, dtype=torch.float64)
    close(found(IDS).last_hidden_state, encode(state, layout, IDS, torch.ones_like(IDS)))
    (line,) = [record.getMessage() for record in caplog.records if "another head" in record.getMessage()]
    assert all(name in line for name in (*more, "head.steps", str(folder)))
    caplog.clear()
    answers = ALiBiBertForQuestionAnswering.from_pretrained(folder)
    assert torch.equal(answers.qa_outputs.weight, state["qa_outputs.weight"])
    (line,) = [record.getMessage() for record in caplog.records if "another head" in record.getMessage()]
    assert "qa_outputs" not in line


@pytest.mark.parametrize("others", [{}, OTHERS])
@pytest.mark.parametrize("kind", [ALiBiBertForMaskedLM, ALiBiBertForSequenceClassification, *HEADS])
def test_a_missing_head_is_drawn_on_request_whatever_other_heads_there_are(kind, others, tmp_path):
    folder, state = folder_with(tmp_path / "model", "jina", **others)
    with pytest.raises(ValueError, match=r" weights (classifier|qa_outputs|cls)\..* are missing; pass new_head=True"):
        kind.from_pretrained(folder)
    words = kind.from_pretrained(folder, new_head=True).get_input_embeddings().weight
    assert torch.equal(words, state["embeddings.word_embeddings.weight"])


@pytest.mark.parametrize("new_head", [False, True])
def test_the_body_stays_complete_whatever_heads_there_are(new_head, tmp_path):
    _, state = folder_with(tmp_path / "more", "jina", **{**OTHERS, "bert.adapter.weight": (3,)})
    missing, both = "encoder.layer.1.mlp.wo.bias", r"its config\.json and weights must come from"
    state = {f"bert.{name}": x for name, x in state.items() if name.startswith(("emb", "enc")) and name != missing}
    write_folder(tmp_path / "less", state | {"linear.weight": torch.ones(2)}, config("jina"))
    for name, message in (("more", r"unexpected weights adapter\.weight"), ("less", f"weights {missing} are missing")):
        with pytest.raises(ValueError, match=f"{message}; {both}"):
            ALiBiBertModel.from_pretrained(tmp_path / name, new_head=new_head)


def test_heads_are_not_told_from_a_body_without_a_prefix(tmp_path):
    folder, _ = folder_with(tmp_path / "model", "mosaic", "", **OTHERS, **{"qa_outputs.weight": (2, WIDTH)})
    message = (
        r"unexpected weights dense\.weight, head.*, lm_head\.bias; if they are a head, remove them: without a prefix"
    )
    with pytest.raises(ValueError, match=message) as raised:
        ALiBiBertModel.from_pretrained(folder)
    assert "qa_outputs" not in str(raised.value)  # a head that one of our classes has


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", HEADS)
def test_logits_of_tokens_are_a_map_of_hidden_states(kind, layout, tmp_path):
    name, labels = HEADS[kind]
    more = {f"{name}.weight": (labels, WIDTH), f"{name}.bias": (labels,)}
    folder, state = folder_with(tmp_path / "model", layout, **more)
    model = kind.from_pretrained(folder, dtype=torch.float64)
    state = {key: x.double() for key, x in state.items()}
    truth = encode(state, layout, IDS, MASK) @ state[f"{name}.weight"].T + state[f"{name}.bias"]
    output, seen = model(IDS, MASK), MASK.bool()
    found = output.logits if "logits" in output else torch.stack((output.start_logits, output.end_logits), dim=-1)
    close(found[seen], truth[seen])
    with pytest.raises(AssertionError):
        close(found[seen], truth.flip(-1)[seen])


def test_the_loss_of_token_labels_is_their_mean_and_of_a_given_number(tmp_path):
    folder, _ = folder_with(tmp_path / "model", "jina", **{"classifier.weight": (3, WIDTH), "classifier.bias": (3,)})
    model = ALiBiBertForTokenClassification.from_pretrained(folder, dtype=torch.float64)
    labels = torch.where(MASK.bool() & (IDS % 4 != 0), IDS % 3, -100)
    output, scored = model(IDS, MASK, labels=labels), labels != -100
    terms = -output.logits.log_softmax(-1)[scored].gather(-1, labels[scored][:, None])
    close(output.loss, terms.mean())
    close(model(IDS, MASK, labels=labels, num_items_in_batch=7).loss, terms.sum() / 7)
    assert model.config.num_labels == 3


def test_no_answer_is_at_padding_and_those_outside_the_text_have_no_loss(tmp_path):
    folder, _ = folder_with(tmp_path / "model", "jina", **{"qa_outputs.weight": (2, WIDTH), "qa_outputs.bias": (2,)})
    model = ALiBiBertForQuestionAnswering.from_pretrained(folder, dtype=torch.float64)
    starts, ends = torch.tensor([1, 0, 5]), torch.tensor([3, 6, LENGTH])
    output = model(IDS, MASK, start_positions=starts, end_positions=ends)
    for logits in (output.start_logits, output.end_logits):
        assert (logits[~MASK.bool()] == torch.finfo(torch.float64).min).all()
    alone = model(IDS[1:2, :7])  # the second text without its padding
    close(output.start_logits[1, :7], alone.start_logits[0])
    first = torch.stack([-row.log_softmax(-1)[at] for row, at in zip(output.start_logits, starts, strict=True)])
    last = torch.stack([-row.log_softmax(-1)[at] for row, at in zip(output.end_logits[:2], ends, strict=False)])
    close(output.loss, (first.mean() + last.mean()) / 2)
    output.loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)
    nowhere = torch.full((3,), LENGTH)
    assert model(IDS, MASK, start_positions=nowhere, end_positions=nowhere).loss == 0
    theirs = F.cross_entropy(output.start_logits, starts) + F.cross_entropy(
        output.end_logits, ends, ignore_index=LENGTH
    )
    close(output.loss, theirs / 2)  # as transformers computes it
