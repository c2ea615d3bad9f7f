"""The heads of `ALiBiBertModel`: masked language model, classifiers of texts and of tokens, and extractive question answering.

The names of their weights are those of BERT's and Jina's heads.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from alibi_attn.hf.readers.encoder.layers import ALiBiBertPredictions
from alibi_attn.hf.readers.encoder.models import ALiBiBertModel, ALiBiBertPreTrainedModel
from alibi_attn.hf.readers.encoder_config import ALiBiBertConfig

IGNORED = -100  # a label without loss


class ALiBiBertHead(ALiBiBertPreTrainedModel):  # type: ignore[no-untyped-call]
    """The forward pass of heads with labels. Arguments: those of `ALiBiBertModel`, and labels."""

    bert: ALiBiBertModel
    per_token: ClassVar[bool] = True
    output: ClassVar[type[MaskedLMOutput | SequenceClassifierOutput | TokenClassifierOutput]]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> MaskedLMOutput | SequenceClassifierOutput | TokenClassifierOutput:
        """logits, and with labels the mean loss per label. Logits at padding are meaningless.

        Args:
            num_items_in_batch: divides the sum of the losses instead of their number in this batch; the Trainer passes it.
        """
        if segment_ids is not None and not self.per_token:
            raise ValueError(
                "segment_ids has no meaning for a classifier with one result per row; pass one text per row"
            )
        encoded = self.bert(
            input_ids,
            attention_mask,
            token_type_ids,
            inputs_embeds=inputs_embeds,
            segment_ids=segment_ids,
            positions=positions,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        logits = self.logits(encoded)
        loss = None if labels is None else self.loss(logits, labels, num_items_in_batch)
        return self.output(loss=loss, logits=logits, hidden_states=encoded.hidden_states)

    def logits(self, encoded: BaseModelOutputWithPooling) -> Tensor:
        """The logits of the encoder's outputs."""
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
        """Nats per label, for logits [B, T, V] and labels [B, T] with −100 = no loss: all heads but that of texts."""
        scores = logits if logits.dtype == torch.float64 else logits.float()
        labels = labels.to(logits.device).flatten()
        return _mean(functools.partial(F.cross_entropy, scores.flatten(0, 1), labels, ignore_index=IGNORED), num_items)


class ALiBiBertForMaskedLM(ALiBiBertHead):  # type: ignore[no-untyped-call]
    """The encoder with logits [B, T, V] of the vocabulary.

    Arguments: those of `ALiBiBertModel`, and labels [B, T], −100 = no loss.
    """

    output = MaskedLMOutput
    _tied_weights_keys: ClassVar[dict[str, str]] = {  # type: ignore[misc]
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"
    }

    def __init__(self, config: ALiBiBertConfig) -> None:
        super().__init__(config)
        self.bert = ALiBiBertModel(config, add_pooling_layer=False)
        self.cls = nn.ModuleDict({"predictions": ALiBiBertPredictions(config)})  # the names of the weights
        self.post_init()  # type: ignore[no-untyped-call]

    def get_output_embeddings(self) -> nn.Module:
        return self.get_submodule("cls.predictions.decoder")

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.get_submodule("cls.predictions").decoder = new_embeddings

    def logits(self, encoded: BaseModelOutputWithPooling) -> Tensor:
        return self.cls["predictions"](encoded.last_hidden_state)


class ALiBiBertClassifier(ALiBiBertHead):  # type: ignore[no-untyped-call]
    """The encoder with dropout and a linear map to `num_labels` logits, of every token or of the pooled first one."""

    def __init__(self, config: ALiBiBertConfig) -> None:
        super().__init__(config)
        self.bert = ALiBiBertModel(config, add_pooling_layer=not self.per_token)
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(config.hidden_size, len(config.id2label or ()))
        self.post_init()  # type: ignore[no-untyped-call]

    def logits(self, encoded: BaseModelOutputWithPooling) -> Tensor:
        states = encoded.last_hidden_state if self.per_token else encoded.pooler_output
        return self.classifier(self.dropout(states))


class ALiBiBertForSequenceClassification(ALiBiBertClassifier):  # type: ignore[no-untyped-call]
    """The encoder with logits [B, num_labels] of the pooled first token: classifiers, and Jina's rerankers (one label).

    Arguments: those of `ALiBiBertModel`, and labels, [B] integers, or numbers [B] or [B, num_labels]. `config.problem_type`
    selects the loss; if it is None, transformers' rules infer it from the labels.
    """

    per_token, output = False, SequenceClassifierOutput

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
        """Cross-entropy, binary cross-entropy or squared error of logits [B, num_labels].

        `config.problem_type` selects it. If it is None, one label is "regression", integers are "single_label_classification" and
        other labels "multi_label_classification", as in transformers; the config then keeps it.
        """
        labels, config = labels.to(logits.device), self.config
        if config.problem_type is None:
            is_index = labels.dtype in (torch.int64, torch.int32)
            config.problem_type = "single_label_classification" if is_index else "multi_label_classification"
            if logits.shape[-1] == 1:
                config.problem_type = "regression"
        if config.problem_type == "single_label_classification":
            loss = functools.partial(F.cross_entropy, logits, labels.flatten(), ignore_index=IGNORED)
        elif config.problem_type == "regression":
            loss = functools.partial(F.mse_loss, logits, labels.reshape(logits.shape).to(logits.dtype))
        else:
            loss = functools.partial(F.binary_cross_entropy_with_logits, logits, labels.to(logits.dtype))
        return _mean(loss, num_items)


class ALiBiBertForTokenClassification(ALiBiBertClassifier):  # type: ignore[no-untyped-call]
    """The encoder with logits [B, T, num_labels] of every token.

    Arguments: those of `ALiBiBertModel`, and labels [B, T], −100 = no loss.
    """

    output = TokenClassifierOutput


class ALiBiBertForQuestionAnswering(ALiBiBertPreTrainedModel):  # type: ignore[no-untyped-call]
    """The encoder with two logits of every token: whether an answer starts there, and whether it ends there."""

    accepts_loss_kwargs = False  # every batch has one answer per row, so means of means are means

    def __init__(self, config: ALiBiBertConfig) -> None:
        super().__init__(config)
        self.bert = ALiBiBertModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        positions: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> QuestionAnsweringModelOutput:
        """start_logits and end_logits [B, T], the dtype's minimum at padding, and with both positions the mean loss.

        Args:
            start_positions, end_positions: [B] integers, the first and the last token of the answer. Those outside [0, T) have no
                loss.
        """
        encoded = self.bert(
            input_ids,
            attention_mask,
            token_type_ids,
            inputs_embeds=inputs_embeds,
            positions=positions,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        logits = self.qa_outputs(encoded.last_hidden_state)
        if attention_mask is not None:
            logits = logits.masked_fill(~attention_mask.bool()[..., None], torch.finfo(logits.dtype).min)
        start_logits, end_logits = logits.unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = (_answer_loss(start_logits, start_positions) + _answer_loss(end_logits, end_positions)) / 2
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start_logits, end_logits=end_logits, hidden_states=encoded.hidden_states
        )


def _answer_loss(logits: Tensor, at: Tensor) -> Tensor:
    """Nats per row: logits [B, T] of where an answer starts or ends, and the true positions [B]; outside [0, T) = no loss."""
    at = at.to(logits.device).flatten()
    scores = logits if logits.dtype == torch.float64 else logits.float()
    inside = (at >= 0) & (at < logits.shape[1])
    losses = F.cross_entropy(scores, at.masked_fill(~inside, IGNORED), ignore_index=IGNORED, reduction="sum")
    return losses / inside.sum().clamp(min=1)


def _mean(loss: Callable[..., Tensor], num_items: Tensor | int | None) -> Tensor:
    """The mean loss; or with the number of labels in all batches of one step, the sum divided by it.

    transformers' Trainer passes that number and then does not divide by the number of batches, so accumulated gradients are
    those of one large batch.
    """
    if num_items is None:
        return loss(reduction="mean")
    total = loss(reduction="sum")
    return total / (num_items.to(total.device) if isinstance(num_items, Tensor) else num_items)


HEADS: dict[Any, type[ALiBiBertPreTrainedModel]] = {  # of transformers -> ours
    AutoModelForMaskedLM: ALiBiBertForMaskedLM,
    AutoModelForSequenceClassification: ALiBiBertForSequenceClassification,
    AutoModelForTokenClassification: ALiBiBertForTokenClassification,
    AutoModelForQuestionAnswering: ALiBiBertForQuestionAnswering,
}
for auto, head in HEADS.items():
    auto.register(ALiBiBertConfig, head)
