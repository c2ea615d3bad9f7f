"""The saved state of llama.cpp, which `llama-cli --prompt-cache` writes and reads, called through cyllama."""

import functools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import BloomForCausalLM

from alibi_lab.measure.peers.llama_cpp import BATCH, write_gguf
from alibi_lab.measure.timing import elapsed_ms

NEEDS = ("cyllama", "gguf")  # packages
FP32 = 0  # ggml's number of the type
WARM = 9  # tokens after the first one; their median is a warm token


class LlamaState:
    """A BLOOM with weights and cache in fp32 and flash attention.

    Args:
        room: the most tokens in the cache.
    """

    def __init__(self, model: BloomForCausalLM, folder: Path, *, room: int, threads: int) -> None:
        from cyllama.llama import llama_cpp

        path = folder / "bloom.gguf"
        write_gguf(model, path)
        self._library, self._vocabulary = llama_cpp, model.config.vocab_size
        params = llama_cpp.LlamaContextParams()
        params.n_ctx, params.n_batch, params.n_ubatch = room, BATCH, BATCH
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = FP32
        params.flash_attn_type = 1
        llama_cpp.disable_logging()
        # cyllama 0.2.18 reads n_vocab for logits.
        named = type("Named", (llama_cpp.LlamaModel,), {"n_vocab": self._vocabulary})
        self._context = llama_cpp.LlamaContext(named(str(path), llama_cpp.LlamaModelParams()), params)

    def read(self, tokens: Sequence[int]) -> None:
        """Passes the tokens through the model, into an empty cache."""
        self._context.kv_cache_clear()
        for start in range(0, len(tokens), BATCH):
            self._decode(tokens[start : start + BATCH], start)

    def save(self, path: Path, tokens: Sequence[int]) -> None:
        """Saves the state after these tokens, which were read before."""
        if not self._context.save_state_file(str(path), list(tokens)):
            raise RuntimeError(f"llama.cpp cannot save its state to {path}")

    def load(self, path: Path, token: int) -> tuple[np.ndarray, float, float]:
        """(A saved state's logits after a token, milliseconds with loading, median milliseconds of a token after it)."""
        self._context.kv_cache_clear()
        start = time.perf_counter()
        length = len(self._context.load_state_file(str(path), self._context.n_ctx))
        logits = self._decode([token], length)
        first = (time.perf_counter() - start) * 1e3
        decodings = (functools.partial(self._decode, [token], length + 1 + at) for at in range(WARM))
        return logits, first, statistics.median(map(elapsed_ms, decodings))

    def _decode(self, tokens: Sequence[int], start: int) -> np.ndarray:
        self._context.decode(self._library.llama_batch_get_one(list(tokens), start))
        return np.array(self._context.get_logits(), np.float32)  # of the last token, the only one requested
