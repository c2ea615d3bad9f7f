"""Loads a decoder with ALiBi of any supported family: patched if transformers builds it, otherwise as `ALiBiForCausalLM`.

Read next: `folder_check.py`.
"""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from alibi_attn.hf.patching.patching import patch
from alibi_attn.hf.readers import checkpoint_files, folder_check, tokenizer_files
from alibi_attn.hf.readers.decoder.loading import BUILT_BY_TRANSFORMERS
from alibi_attn.hf.readers.decoder.model import ALiBiForCausalLM


def load_decoder(folder_or_id: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model with its head, in evaluation mode, and its tokenizer.

    Args:
        folder_or_id: a folder, or a repository on the Hugging Face Hub.

    Raises:
        FileNotFoundError: neither, or the folder has no weights or no tokenizer.
        ValueError: a damaged file, weights that do not fit the config, or as `ALiBiForCausalLM.from_pretrained` and `patch`.
    """
    folder = checkpoint_files.resolve(folder_or_id)
    about = checkpoint_files.read_config(folder)
    checkpoint_files.weights(folder)  # which must exist
    tokenizer = tokenizer_files.load(folder)  # before the weights are read
    if about.get("model_type") in BUILT_BY_TRANSFORMERS:
        model = folder_check.load(folder)
        patch(model)
    else:
        model = ALiBiForCausalLM.from_pretrained(folder)
    model.config.name_or_path = folder_or_id
    return model, tokenizer
