"""Loads a decoder with ALiBi of any supported family: patched if transformers builds it, otherwise as `ALiBiForCausalLM`."""

from transformers import AutoModelForCausalLM, PreTrainedModel

from alibi_attn.hf import checkpoint_files
from alibi_attn.hf.decoder.loading import PATCHED
from alibi_attn.hf.decoder.model import ALiBiForCausalLM
from alibi_attn.hf.patching import patch


def load_decoder(folder_or_id: str) -> PreTrainedModel:
    """The model with its head, in evaluation mode.

    Args:
        folder_or_id: a folder, or a repository on the Hugging Face Hub.

    Raises:
        FileNotFoundError: neither, or the folder has no weights.
        ValueError: as `ALiBiForCausalLM.from_pretrained` and `patch`.
    """
    folder = checkpoint_files.resolve(folder_or_id)
    if checkpoint_files.read_config(folder).get("model_type") not in PATCHED:
        return ALiBiForCausalLM.from_pretrained(folder_or_id)
    checkpoint_files.check_weights(folder)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder_or_id).eval()  # type: ignore[no-untyped-call]
    patch(model)
    return model
