"""Sentence embeddings: an encoder with its tokenizer and pooling, as plain objects or as a SentenceTransformer.

Only `sentence_transformer` imports sentence-transformers. Read before: `pooling_config.py`; next: `embedding.py`, for many texts.
"""

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from alibi_attn.attention.call.hints import hides_unknown, unknown_argument
from alibi_attn.hf.embedding import pooling_config
from alibi_attn.hf.embedding.pooling_config import PoolingConfig
from alibi_attn.hf.readers import checkpoint_files, tokenizer_files
from alibi_attn.hf.readers.encoder.models import ALiBiBertModel
from alibi_attn.nn.device import checked_device
from alibi_attn.nn.linear import quantized
from alibi_attn.nn.linear.quantized import Kind

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

LONGEST = 8192  # tokens, if neither the folder nor the tokenizer has a limit; ALiBi itself has none
_NO_LIMIT = 2**30  # tokenizers without a limit report a larger number


@dataclasses.dataclass(frozen=True)
class Sentences:
    """An encoder with everything needed to embed texts.

    Args:
        model: the encoder, in evaluation mode.
        folder: the pooling settings of its folder.
        max_seq_length: longer texts are cut to this number of tokens, special ones included.
    """

    model: ALiBiBertModel
    tokenizer: PreTrainedTokenizerBase
    folder: PoolingConfig
    max_seq_length: int


def load(
    folder_or_id: str | os.PathLike[str],
    *,
    max_seq_length: int | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | None = None,
    **hub: Any,
) -> Sentences:
    """Loads encoder, tokenizer and pooling from a folder or a repository of the hub. Code in it is never run.

    Args:
        max_seq_length: default: the folder's, else the tokenizer's, else 8,192.
        dtype: as in `ALiBiBertModel.from_pretrained`; or "int8" or "float8" for linear layers (`nn/linear/quantized.py`).
        device: where the model of an "int8" or "float8" dtype runs, which is converted there; the default is the CPU.
        hub: revision, cache_dir, token and local_files_only of `checkpoint_files.resolve`.

    Raises:
        OSError: neither a folder nor a repository, or missing files.
        ValueError: a damaged file, or an unsupported model or pooling.
    """
    place = checkpoint_files.resolve(folder_or_id, **hub)
    settings = pooling_config.read(place)
    if kind := quantized_kind(dtype):
        device, dtype = checked_place(kind, device or "cpu")
    model, _ = ALiBiBertModel.from_folder(settings.encoder, dtype=dtype)
    if kind:
        quantized.convert(model.to(device).encoder, kind=kind)
    model.config.name_or_path = str(folder_or_id)
    if settings.width not in (None, model.config.hidden_size):
        raise ValueError(
            f"{place} pools vectors of width {settings.width} but its model has {model.config.hidden_size}"
        )
    tokenizer = tokenizer_files.load(settings.encoder)
    known = tokenizer.model_max_length if tokenizer.model_max_length < _NO_LIMIT else LONGEST
    if max_seq_length is not None and type(max_seq_length) is not int:
        raise TypeError(f"max_seq_length is {max_seq_length!r} but must be an integer")
    longest = settings.max_seq_length or known if max_seq_length is None else max_seq_length
    least = tokenizer.num_special_tokens_to_add() + 1
    if longest < least:
        raise ValueError(
            f"max_seq_length is {longest} but must be at least {least}: one token of text and {least - 1} special ones"
        )
    return Sentences(model, tokenizer, settings, longest)


def unpacked(model: "SentenceTransformer | str | os.PathLike[str]") -> Sentences:
    """The parts of a SentenceTransformer that holds one of our encoders, or those that `load` reads from a folder.

    Raises:
        TypeError: neither of the two.
        ValueError: modules other than the encoder, a pooling and a normalization.
    """
    if isinstance(model, str | os.PathLike):
        return load(model)
    modules: list[Any] = list(model) if isinstance(model, torch.nn.Sequential) else []
    encoder = getattr(modules[0], "auto_model", None) if modules else None
    if not isinstance(encoder, ALiBiBertModel):
        raise TypeError(
            f"model is a {type(model).__name__} but must be a folder, or what alibi_attn.hf.sentence_transformer returned"
        )
    kinds = [type(module).__name__ for module in modules[1:]]
    if kinds not in (["Pooling"], ["Pooling", "Normalize"]):
        raise ValueError(
            f"the model continues with {', '.join(kinds) or 'nothing'}; supported are Pooling and Normalize"
        )
    settings = PoolingConfig(
        encoder=Path(encoder.config.name_or_path or "."),
        pooling=modules[1].pooling_mode,
        normalize=len(kinds) == 2,
        default_prompt_name=model.default_prompt_name,
        truncate_dim=model.truncate_dim,
    )
    encoder.eval()  # type: ignore[no-untyped-call]
    return Sentences(encoder, modules[0].tokenizer, settings, model.max_seq_length or LONGEST)


@hides_unknown
def sentence_transformer(
    folder_or_id: str | os.PathLike[str],
    *,
    normalize: bool = False,
    max_seq_length: int | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    **ignored: Any,
) -> "SentenceTransformer":
    """An encoder with ALiBi as a `sentence_transformers.SentenceTransformer`, for encoding, similarity and training.

        vector of a text = (h_1 + … + h_n) / n, the mean of its tokens' hidden states

    Use it for one vector per text. `late_chunks` gives one per passage, `ALiBiBertModel` the hidden states.

    A common mistake: loading the repository with `SentenceTransformer` itself, which builds a plain BERT with random position
    embeddings. And texts beyond `max_seq_length` are cut without a message.

    Pooling is read from the folder (modules.json, 1_Pooling); the default is the mean. After `import alibi_attn.hf`, a
    folder written by `save` also loads with `SentenceTransformer(folder)`.

    Args:
        normalize: scale vectors to length 1; False leaves it to the folder.
        max_seq_length: longer texts are cut. Default: the folder's or the tokenizer's, else 8,192; ALiBi has no limit.
            `config.max_position_embeddings` is raised to it: our models ignore that field, but sentence-transformers reads it
            as a limit when it loads a folder.
        dtype: as in `ALiBiBertModel.from_pretrained`; or, for inference, "int8" (a CPU with VNNI instructions, or an NVIDIA GPU
            from compute capability 8.0) or "float8" (a GPU from 8.9) for linear layers, and fp32 on a CPU or bf16 on a GPU for
            attention. Such a model cannot be saved.
        device: as in SentenceTransformer; default a GPU if available.
        revision, cache_dir, token, local_files_only: for the hub.

    Arguments without effect in `ALiBiBertModel.from_pretrained`, such as trust_remote_code, have none here.

    Raises:
        ImportError: sentence-transformers is not installed.
        OSError: neither a folder nor a repository, or missing files.
        ValueError: a damaged file, or an unsupported device, model, module or pooling; the message names it.

    >>> from alibi_attn.hf import sentence_transformer
    >>> model = sentence_transformer("jinaai/jina-embeddings-v2-base-en", normalize=True)  # doctest: +SKIP
    >>> model.encode(["How far does a head look?"], batch_size=4).shape  # doctest: +SKIP
    (1, 768)
    """
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer import modules
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "sentence_transformers":
            raise
        raise ImportError(
            'sentence_transformer needs sentence-transformers 6; install it with: pip install ".[embed]" in a clone'
        ) from error
    if unknown := [name for name in ignored if name not in checkpoint_files.IGNORED]:
        raise unknown_argument("sentence_transformer", unknown)
    if kind := quantized_kind(dtype):
        device, dtype = checked_place(kind, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    elif device is not None:
        checked_device(device)
    loaded = load(
        folder_or_id, max_seq_length=max_seq_length, dtype=dtype, revision=revision, cache_dir=cache_dir, token=token,
        local_files_only=local_files_only,
    )  # fmt: skip
    settings, config = loaded.folder, loaded.model.config
    config.max_position_embeddings = max(config.max_position_embeddings, loaded.max_seq_length)
    # modules.Transformer loads with AutoModel: config and tokenizer from a temporary folder, the weights from memory.
    with tempfile.TemporaryDirectory() as ours:
        config.save_pretrained(ours)
        loaded.tokenizer.save_pretrained(ours)
        transformer = modules.Transformer(
            ours,
            model_kwargs={"state_dict": loaded.model.state_dict(), "dtype": loaded.model.dtype},
            processor_kwargs={"model_max_length": loaded.max_seq_length},
        )
    transformer.config.name_or_path = str(folder_or_id)
    if kind:
        transformer.auto_model.requires_grad_(False)
        quantized.convert(transformer.auto_model.to(device).encoder, kind=kind)
    chain: list[torch.nn.Module] = [
        transformer,
        modules.Pooling(config.hidden_size, settings.pooling, include_prompt=settings.include_prompt),
    ]
    if normalize or settings.normalize:
        chain.append(modules.Normalize())
    return SentenceTransformer(
        modules=chain,
        device=device,
        prompts=settings.prompts,
        default_prompt_name=settings.default_prompt_name,
        similarity_fn_name=settings.similarity,  # type: ignore[arg-type]
        truncate_dim=settings.truncate_dim,
    )


def quantized_kind(dtype: torch.dtype | str | None) -> Kind | None:
    """What linear layers are to be in, if not in a dtype of the whole model."""
    if dtype in ("int8", torch.int8):
        return "int8"
    return "float8" if dtype in ("float8", torch.float8_e4m3fn) else None


def checked_place(kind: Kind, device: str) -> tuple[str, torch.dtype]:
    """The device of such a model, and the dtype of its other layers.

    Raises:
        ValueError: this machine does not have the device, or the device no such products.
    """
    place = checked_device(device)
    quantized.check_supported(kind, place)
    return device, torch.float32 if place.type == "cpu" else torch.bfloat16
