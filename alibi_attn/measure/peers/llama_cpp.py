"""A BLOOM in llama.cpp, called through llama-cpp-python.

Its GELU is a half-precision lookup table, so its logits are off by about 1e-5.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from transformers import BloomForCausalLM

BATCH = 2048  # most tokens per call and per matrix product


class LlamaCpp:
    """A BLOOM with weights and cache in fp32, with or without llama.cpp's flash attention."""

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
            seconds = time.perf_counter() - start
            self._llama._ctx.kv_cache_seq_rm(-1, len(tokens), -1)
            self._llama.n_tokens = len(tokens)
            return seconds

        return call

    def _last(self) -> np.ndarray:
        pointer = self._llama._ctx.get_logits_ith(-1)
        return np.ctypeslib.as_array(pointer, shape=(self._llama.n_vocab(),)).copy()


def write_gguf(model: BloomForCausalLM, path: Path) -> None:
    """Writes the weights in fp32 with the names and order of llama.cpp's converter, without a tokenizer."""
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
        if "query_key_value" in name:  # per head here; llama.cpp has all queries first, then all keys, then all values
            tensor = tensor.unflatten(0, (config.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
