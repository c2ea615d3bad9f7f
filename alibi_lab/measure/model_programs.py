"""The programs that run whole models, as one table: ours, `transformers`, and what users would run instead.

A program is opened with the weights of one random model (seed 0); only the BERT has other layers. Read next: `models.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from transformers import BertConfig, BertModel, PreTrainedModel
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5EncoderModel

from alibi_attn.hf import ALiBiBertConfig, ALiBiBertModel, patch
from alibi_attn.nn.linear import quantized
from alibi_lab.measure.peers import onnx_runtime
from alibi_lab.measure.peers.ctranslate2 import CTranslate2
from alibi_lab.measure.peers.dense_encoder import DenseEncoder, Sizes
from alibi_lab.measure.peers.llama_cpp import LlamaCpp, LlamaEncoder, write_encoder

ENCODER, DECODERS, T5 = "encoder", ("bloom", "mpt", "falcon"), "t5"
MODELS = (*DECODERS, T5, ENCODER)
FLOATS, ALL = ("float32", "bfloat16"), ("float32", "bfloat16", "int8", "float8")
OURS, ORIGINAL, DENSE, EAGER = "ours", "transformers", "SDPA + dense bias", "original: dense bias, eager"
UNROUNDED = "transformers, bias in fp32"
LLAMA, FLASH = "llama.cpp", "llama.cpp, flash attention"
# Token ids and mask, both [B, T] -> the last logits [B, V], or states [B, T, E].
Run = Callable[[Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A model to run, and what is measured of it.

    Args:
        batch: lengths of the texts of a batch, or of one cache or prompt; a program has room for them.
        folder: for the files of other programs.
        tokens, rounds, seconds: as in `models`.
    """

    model: str
    sizes: Sizes
    precision: str = "float32"
    device: str = "cpu"
    batch: tuple[int, ...] = (512,)
    threads: int = 1
    folder: Path = Path()
    tokens: int = 1
    rounds: int = 1
    seconds: float = 0.0

    @property
    def room(self) -> int:
        """The longest text."""
        return max(self.batch)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is not quantized; int8 on a CPU keeps fp32."""
        halved = self.precision in ("bfloat16", "float8") or (self.precision == "int8" and self.device == "cuda")
        return torch.bfloat16 if halved else torch.float32

    @property
    def linears(self) -> Literal["int8", "float8"] | None:
        """The precision of linear layers, if it is not that of the rest."""
        kinds: dict[str, Literal["int8", "float8"]] = {"int8": "int8", "float8": "float8"}
        return kinds.get(self.precision)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A way to run a model.

    Args:
        open: the model, ready to run.
        models, precisions: that it has.
        arrays: how many arrays of B·H·T² fp32 numbers it holds at its peak.
        compared: models whose bias it computes as published, so that its outputs are compared.
        most_error: in fp32, where the usual one is too small.
        needs: packages.
    """

    open: Callable[[Setting], Run]
    models: Sequence[str]
    precisions: Sequence[str] = ("float32",)
    arrays: float = 0.0
    compared: Sequence[str] = MODELS
    most_error: float = 0.0
    needs: tuple[str, ...] = ()


def our_encoder(sizes: Sizes, backend: str = "auto") -> ALiBiBertModel:
    """An `ALiBiBertModel` with random weights (seed 0), ready for inference."""
    torch.manual_seed(0)
    fields = sizes.of_transformers | {"initializer_range": sizes.initializer_range}
    return ALiBiBertModel(ALiBiBertConfig(**fields, pooler=False, backend=backend)).train(False)


def ours(setting: Setting) -> Run:
    """A patched decoder or T5 encoder, or an `ALiBiBertModel`, with its linear layers in the precision."""
    if setting.model != ENCODER:
        return Ready(patched(setting))
    encoder: nn.Module = our_encoder(setting.sizes)
    encoder = encoder.to(setting.device, setting.dtype)
    if setting.linears is not None:
        quantized.convert(encoder, kind=setting.linears)
    return Ready(encoder)


def patched(setting: Setting) -> Any:
    """The model of `transformers` with our attention, and its linear layers in the precision."""
    model = original_model(setting).to(setting.device, setting.dtype)
    patch(model, linears=setting.linears)
    return model


def original(setting: Setting) -> Run:
    """The model of `transformers`."""
    return Ready(original_model(setting).to(setting.device, setting.dtype))


def unrounded(setting: Setting) -> Run:
    """The Falcon of `transformers`, which rounds its bias to bf16 in every dtype, with BLOOM's: the same without rounding."""
    run = original(setting)

    def call(ids: Tensor, mask: Tensor) -> Tensor:
        with mock.patch.object(modeling_falcon, "build_alibi_tensor", modeling_bloom.build_alibi_tensor):
            return run(ids, mask)

    return call


def original_model(setting: Setting) -> Any:
    """The same with random weights (seed 0), in fp32."""
    torch.manual_seed(0)
    sizes, named = setting.sizes, setting.sizes.of_transformers
    plain: Any = dict.fromkeys(("multi_query", "parallel_attn", "new_decoder_architecture"), False)
    made: dict[str, Callable[[], PreTrainedModel]] = {
        "bloom": lambda: transformers.BloomForCausalLM(transformers.BloomConfig(**named)),
        "mpt": lambda: transformers.MptForCausalLM(transformers.MptConfig(**named, max_seq_len=max(setting.room, 512))),
        "falcon": lambda: transformers.FalconForCausalLM(
            transformers.FalconConfig(**named, **plain, alibi=True, bias=True)
        ),
        "t5": lambda: T5EncoderModel(T5Config(**named, d_kv=sizes.width // sizes.heads, d_ff=sizes.inner)),
    }
    return made[setting.model]().requires_grad_(False).train(False)


class Ready(nn.Module):
    """A model as a function of tokens and mask to its hidden states, or of a decoder to the logits of the last token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        kind = type(self.model).__name__
        if kind.endswith("ForCausalLM"):
            return self.model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        return self.model(ids, attention_mask=None if kind.startswith("T5") else mask).last_hidden_state


def dense(setting: Setting, *, eager: bool) -> Run:
    """The arithmetic of the remote code of encoders."""
    peer = DenseEncoder(setting.sizes, setting.room, eager=eager).train(False)
    peer.take(our_encoder(setting.sizes).state_dict())
    return peer.to(setting.device, setting.dtype)


def bert(setting: Setting) -> Run:
    """A BERT with learned positions, no bias, and no gate in the feed-forward part."""
    torch.manual_seed(0)
    options = {"attn_implementation": "sdpa", "initializer_range": setting.sizes.initializer_range}
    config = BertConfig(**(setting.sizes.of_transformers | options), max_position_embeddings=setting.room)
    return Ready(BertModel(config, add_pooling_layer=False).train(False).to(setting.device, setting.dtype))


def onnx(setting: Setting) -> Run:
    path = setting.folder / f"{setting.precision}.onnx"
    if not path.exists():
        onnx_runtime.write(our_encoder(setting.sizes, "dense"), path, setting.precision)
    return onnx_runtime.OnnxRuntime(path, threads=setting.threads)


def llama(setting: Setting, *, flash: bool) -> Run:
    path = setting.folder / f"{setting.precision}.gguf"
    if not path.exists():
        write_encoder(our_encoder(setting.sizes), path, setting.precision)
    texts = len(setting.batch)
    return LlamaEncoder(path, room=setting.room * texts, texts=texts, threads=setting.threads, flash=flash)


def of_program(setting: Setting, *, name: str) -> Run:
    """A BLOOM in llama.cpp or CTranslate2."""
    program = opened(name, setting)
    return lambda ids, mask: torch.from_numpy(program.logits(ids[0].tolist()))[None]


def opened(name: str, setting: Setting) -> LlamaCpp | CTranslate2:
    """One of `BLOOMS` with the weights of the model, written to the folder in the program's format."""
    model = original_model(setting)
    options: Any = {"threads": setting.threads, "precision": setting.precision}
    if name == "CTranslate2":
        return CTranslate2(model, setting.folder, **options)
    return LlamaCpp(model, setting.folder, room=setting.room, flash="flash" in name, **options)


_ONNX = ("onnx", "onnxscript", "onnxruntime")
_GGUF = ("llama_cpp", "gguf")
# Other programs that run a whole BLOOM, called the way their users do, and the packages that they need.
BLOOMS = {"llama.cpp": _GGUF, "llama.cpp, flash attention": _GGUF, "CTranslate2": ("ctranslate2",)}
# llama.cpp's GELU is an approximation from a table of half-precision numbers.
_LLAMA: dict[str, Any] = {"models": (ENCODER,), "precisions": ALL[:3], "needs": _GGUF, "most_error": 1e-2}
PROGRAMS: Mapping[str, Program] = {
    OURS: Program(open=ours, models=MODELS, precisions=ALL),
    ORIGINAL: Program(
        open=original, models=(*DECODERS, T5), precisions=FLOATS, arrays=4.5, compared=("bloom", "mpt", T5)
    ),
    UNROUNDED: Program(open=unrounded, models=("falcon",), arrays=4.5),
    EAGER: Program(open=functools.partial(dense, eager=True), models=(ENCODER,), precisions=FLOATS, arrays=5),
    DENSE: Program(open=functools.partial(dense, eager=False), models=(ENCODER,), precisions=FLOATS, arrays=3),
    "BERT, SDPA, no bias": Program(open=bert, models=(ENCODER,), precisions=FLOATS, compared=()),
    "ONNX Runtime": Program(open=onnx, models=(ENCODER,), precisions=("float32", "int8"), arrays=4, needs=_ONNX),
    LLAMA: Program(open=functools.partial(llama, flash=False), arrays=2, **_LLAMA),
    FLASH: Program(open=functools.partial(llama, flash=True), **_LLAMA),
    **{
        f"{name}, BLOOM": Program(
            open=functools.partial(of_program, name=name), models=("bloom",), needs=needs, arrays=2, most_error=1e-3
        )
        for name, needs in BLOOMS.items()
    },
}
# What the others are compared with, in fp32, while it fits.
TRUTH = {**dict.fromkeys((*DECODERS, T5), ORIGINAL), "falcon": UNROUNDED, ENCODER: DENSE}
