"""Names that transformers has changed since the oldest release that the package supports."""

from transformers import PreTrainedModel


def checkpoint_activations(model: PreTrainedModel, *options: dict[str, object]) -> None:
    """Turns on activation checkpointing."""
    current = getattr(model, "activation_checkpointing_enable", None)
    (current or model.gradient_checkpointing_enable)(*options)
