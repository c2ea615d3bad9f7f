"""The encoders that `alibi bench embedding` measures, as one table: ours, and what users would run instead.

All have the weights of `our_encoder` except the BERT, which has other layers. Read next: `embedding.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from alibi_attn.hf import ALiBiBertConfig, ALiBiBertModel
from alibi_attn.nn import quantized
from alibi_lab.measure.peers import llama_encoder, missing, onnx_runtime
from alibi_lab.measure.peers.bert import plain_bert
from alibi_lab.measure.peers.dense_encoder import DenseEncoder, Sizes

OURS, ORIGINAL, SDPA, BERT = "ours", "original: dense bias, eager", "SDPA + dense bias", "BERT, SDPA, no bias"
ONNX, LLAMA, FLASH = "ONNX Runtime", "llama.cpp", "llama.cpp, flash attention"


Batches = Sequence[Sequence[int]]
Build = Callable[..., nn.Module]
Opened = Callable[[Tensor, Tensor], Any]


@dataclasses.dataclass(frozen=True)
class Place:
    """What a measurement needs in its own process: `folder` holds the models of other programs.

    Args:
        rounds, repeats, seconds: processes per encoder and batch, and most passes and seconds in one of them.
    """

    folder: Path
    build: Build
    sizes: Sizes
    threads: int
    rounds: int = 1
    repeats: int = 1
    seconds: float = 0.0


class Open(Protocol):
    """Opens the encoder for batches of texts of these lengths. Unless `checked`, it may have any weights."""

    def __call__(self, place: Place, precision: str, batches: Batches, *, checked: bool) -> Opened: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """An encoder that is measured: (token ids [B, T], mask [B, T]) -> hidden states [B, T, E].

    Args:
        short: its name in metrics.
        open: opens it for some batches.
        arrays: how many arrays of B·H·T² fp32 numbers it holds at its peak.
        biased: whether it computes ALiBi, so that its hidden states are compared with ours.
        error: the largest error of its hidden states in fp32, where the usual one is too small, with the reason next to it.
        write: (place, precision) writes the file that `open` opens.
        needs: packages that it needs.
    """

    short: str
    open: Open
    precision: str = "float32"
    arrays: float = 0
    biased: bool = True
    error: float = 0.0
    write: Callable[[Place, str], None] | None = None
    needs: tuple[str, ...] = ()


def our_encoder(sizes: Sizes, backend: str = "auto") -> ALiBiBertModel:
    """An `ALiBiBertModel` with random weights (seed 0), ready for inference."""
    torch.manual_seed(0)
    fields = sizes.of_transformers | {"initializer_range": sizes.initializer_range}
    config = ALiBiBertConfig(**fields, pooler=False, backend=backend)
    return ALiBiBertModel(config).train(False)


def inputs(batch: Sequence[int], sizes: Sizes) -> tuple[Tensor, Tensor]:
    """(token ids, mask) of random texts of these lengths, padded on the right."""
    shape = (len(batch), max(batch))
    ids = torch.randint(1, sizes.vocabulary, shape, generator=torch.Generator().manual_seed(sum(batch)))
    mask = (torch.arange(shape[1]) < torch.tensor(batch)[:, None]).long()
    return ids * mask, mask


def why_not(name: str) -> str | None:
    """Why an encoder cannot be measured here, or None."""
    return missing(ENCODERS[name].needs)


class _States(nn.Module):
    """A model of `transformers` as a function to hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden: Tensor = self.model(ids, mask).last_hidden_state
        return hidden


def _ours(place: Place, precision: str, batches: Batches, **_: bool) -> Opened:
    model = place.build(place.sizes)
    if precision == "int8":
        quantized.convert(model)
    return _States(model.bfloat16() if precision == "bfloat16" else model)


def _dense(place: Place, precision: str, batches: Batches, *, eager: bool, checked: bool) -> Opened:
    torch.manual_seed(0)
    peer = DenseEncoder(place.sizes, max(map(max, batches)), eager=eager).train(False)
    if checked:
        peer.take(our_encoder(place.sizes).state_dict())
    return peer.to(getattr(torch, precision))


def _bert(place: Place, precision: str, batches: Batches, **_: bool) -> Opened:
    torch.manual_seed(0)
    return _States(plain_bert(place.sizes, max(map(max, batches))).to(getattr(torch, precision)))


def _write_onnx(place: Place, precision: str) -> None:
    onnx_runtime.write(our_encoder(place.sizes, "dense"), place.folder / f"{precision}.onnx", precision)


def _onnx(place: Place, precision: str, batches: Batches, **_: bool) -> Opened:
    return onnx_runtime.OnnxRuntime(place.folder / f"{precision}.onnx", threads=place.threads)


def _write_llama(place: Place, precision: str) -> None:
    llama_encoder.write(our_encoder(place.sizes), place.folder / f"{precision}.gguf", precision)


def _llama(place: Place, precision: str, batches: Batches, *, flash: bool, **_: bool) -> Opened:
    path, room, texts = place.folder / f"{precision}.gguf", max(map(sum, batches)), max(map(len, batches))
    return llama_encoder.LlamaEncoder(path, room=room, texts=texts, threads=place.threads, flash=flash)


def plain(name: str) -> str:
    """The name of an encoder without its precision."""
    return name.removesuffix(f", {ENCODERS[name].precision}")


def _in(precisions: tuple[str, ...], name: str, short: str, **fields: Any) -> dict[str, Encoder]:
    """The same encoder in several precisions; float32 is not in the name."""
    return {
        name if precision == "float32" else f"{name}, {precision}": Encoder(short=short, precision=precision, **fields)
        for precision in precisions
    }


ALL, FLOATS = ("float32", "bfloat16", "int8"), ("float32", "bfloat16")
_ONNX = {"open": _onnx, "write": _write_onnx, "arrays": 4, "needs": ("onnx", "onnxscript", "onnxruntime")}
# llama.cpp's GELU is an approximation from a table of half-precision numbers.
_LLAMA = {"write": _write_llama, "needs": ("llama_cpp", "gguf"), "error": 1e-2}
ENCODERS: Mapping[str, Encoder] = {
    **_in(ALL, OURS, "ours", open=_ours),
    **_in(FLOATS, ORIGINAL, "original", open=partial(_dense, eager=True), arrays=5),
    **_in(FLOATS, SDPA, "sdpa_dense_bias", open=partial(_dense, eager=False), arrays=3),
    **_in(FLOATS, BERT, "bert_no_bias", open=_bert, biased=False),
    **_in(("float32", "int8"), ONNX, "onnx_runtime", **_ONNX),
    **_in(ALL, LLAMA, "llama_cpp", open=partial(_llama, flash=False), arrays=2, **_LLAMA),
    **_in(ALL, FLASH, "llama_cpp_flash", open=partial(_llama, flash=True), **_LLAMA),
}
