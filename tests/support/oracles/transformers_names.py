"""Names that transformers has changed since the oldest release that the package supports."""

import dataclasses

from transformers import PreTrainedModel, TrainingArguments


def checkpoint_activations(model: PreTrainedModel, *options: dict[str, object]) -> None:
    """Turns on activation checkpointing."""
    current = getattr(model, "activation_checkpointing_enable", None)
    (current or model.gradient_checkpointing_enable)(*options)


def checkpointing_arguments(reentrant: bool) -> dict[str, object]:
    """The TrainingArguments that turn it on."""
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    kind = "activation" if "activation_checkpointing" in names else "gradient"
    return {f"{kind}_checkpointing": True, f"{kind}_checkpointing_kwargs": {"use_reentrant": reentrant}}
