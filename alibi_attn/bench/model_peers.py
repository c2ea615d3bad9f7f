"""Whole models beside a patched BLOOM: llama.cpp and CTranslate2, where `llama_cpp` (and `gguf`) or `ctranslate2` are installed.

The weights are written in each one's own format, fp32, into a folder that is gone afterwards, and both are called as their users
call them. llama.cpp's GELU is a table of half-precision numbers: its logits are off by some 1e-5.
"""

import contextlib
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from transformers import BloomForCausalLM

BATCH = 2048  # tokens of a call, and of a product, that llama.cpp may take at once


class ModelPeer(Protocol):
    """A model of somebody else with the weights of ours."""

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """[V] of the last token, by one pass over all of them."""

    def token(self, tokens: Sequence[int]) -> Callable[[], float]:
        """What takes one more token after these, and returns the seconds of it, however long it is busy otherwise."""


def _needed(*modules: str) -> str | None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} cannot be imported" if missing else None


def why_not() -> dict[str, str | None]:
    """The reason why a peer is left out, or None."""
    llama = _needed("llama_cpp", "gguf")
    return {
        "llama.cpp": llama,
        "llama.cpp, flash attention": llama,
        "CTranslate2": _needed("ctranslate2"),
    }


def installed(say: Callable[[str], None]) -> list[str]:
    """The peers that are here; of the others it is said why they are left out."""
    reasons = why_not()
    for name, reason in reasons.items():
        if reason is not None:
            say(f"{name} is left out: {reason}")
    return [name for name, reason in reasons.items() if reason is None]


@contextlib.contextmanager
def opened(name: str, model: BloomForCausalLM, *, room: int, threads: int) -> Iterator[ModelPeer]:
    """The peer of that name, with the weights of the model and room for so many tokens."""
    with tempfile.TemporaryDirectory(prefix="alibi-attn-") as folder:
        if name == "CTranslate2":
            yield CTranslate2(model, Path(folder), threads=threads)
        else:
            yield LlamaCpp(model, Path(folder), room=room, threads=threads, flash="flash" in name)


class LlamaCpp:
    """llama.cpp by llama-cpp-python: weights and cache in fp32, with its flash attention or without."""

    def __init__(self, model: BloomForCausalLM, folder: Path, *, room: int, threads: int, flash: bool) -> None:
        import llama_cpp

        path = folder / "bloom.gguf"
        write_gguf(model, path)
        fp32 = llama_cpp.GGML_TYPE_F32
        self._llama = llama_cpp.Llama(
            str(path), n_ctx=room, n_batch=BATCH, n_ubatch=BATCH if flash else 512, n_threads=threads, n_threads_batch=threads,
            type_k=fp32, type_v=fp32, flash_attn=flash, verbose=False,
        )  # fmt: skip

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        self._llama.reset()
        self._llama.eval(list(tokens))
        return self._last()

    def token(self, tokens: Sequence[int]) -> Callable[[], float]:
        self.logits(tokens)

        def call() -> float:
            start = time.perf_counter()
            self._llama.eval([tokens[-1]])
            self._last()
            taken = time.perf_counter() - start
            self._llama._ctx.kv_cache_seq_rm(-1, len(tokens), -1)
            self._llama.n_tokens = len(tokens)
            return taken

        return call

    def _last(self) -> np.ndarray:
        pointer = self._llama._ctx.get_logits_ith(-1)
        return np.ctypeslib.as_array(pointer, shape=(self._llama.n_vocab(),)).copy()


class CTranslate2:
    """CTranslate2 in fp32; a token takes what a longer answer takes more than a shorter one."""

    LONGER = 16  # tokens

    def __init__(self, model: BloomForCausalLM, folder: Path, *, threads: int) -> None:
        import ctranslate2

        write_ctranslate2(model, folder)
        self._generator = ctranslate2.Generator(str(folder), compute_type="float32", intra_threads=threads)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        return np.array(self._generator.forward_batch([[_word(token) for token in tokens]]))[0, -1]

    def token(self, tokens: Sequence[int]) -> Callable[[], float]:
        words = [_word(token) for token in tokens]

        def answer(length: int) -> float:
            start = time.perf_counter()
            self._generator.generate_batch(
                [words], max_length=length, min_length=length, include_prompt_in_result=False
            )
            return time.perf_counter() - start

        return lambda: (answer(1 + self.LONGER) - answer(1)) / self.LONGER


def write_gguf(model: BloomForCausalLM, path: Path) -> None:
    """The weights as llama.cpp's converter names and orders them, fp32, without a tokenizer."""
    import gguf

    config, arch = model.config, gguf.MODEL_ARCH.BLOOM
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(BATCH)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(4 * config.hidden_size)
    writer.add_block_count(config.n_layer)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(arch, config.n_layer)
    for name, tensor in model.transformer.state_dict().items():
        if (
            "query_key_value" in name
        ):  # of every head in turn; there all queries come first, then all keys, then all values
            tensor = tensor.unflatten(0, (config.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_ctranslate2(model: BloomForCausalLM, folder: Path) -> None:
    """By CTranslate2's own loader of BLOOM, with made-up words for a tokenizer's."""
    from ctranslate2.converters.transformers import BloomLoader

    spec = BloomLoader().get_model_spec(model)
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = _word(0)
    spec.register_vocabulary([_word(token) for token in range(model.config.vocab_size)])
    spec.validate()
    spec.optimize(quantization=None)
    spec.save(str(folder))


def _word(token: int) -> str:
    return f"<{token}>"
