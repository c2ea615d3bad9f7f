"""Loads a decoder with ALiBi of any supported family: patched if transformers builds it, otherwise as `ALiBiForCausalLM`.

Read next: `folder_check.py`.
"""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

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
    checkpoint_files.check_weights(folder)
    tokenizer = tokenizer_files.load(folder)  # before the weights are read
    if about.get("model_type") in BUILT_BY_TRANSFORMERS:
        model = _of_transformers(folder)
        patch(model)
    else:
        model = ALiBiForCausalLM.from_pretrained(folder)
    model.config.name_or_path = folder_or_id
    return model, tokenizer


def _of_transformers(folder: Path) -> PreTrainedModel:
    with folder_check.one_sentence(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    folder_check.check_sizes(folder, config)
    with folder_check.one_sentence(folder):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, output_loading_info=True, trust_remote_code=False
        )
    model: PreTrainedModel = loaded[0]
    folder_check.check_names(folder, loaded[1])
    return model.eval()  # type: ignore[no-untyped-call]
