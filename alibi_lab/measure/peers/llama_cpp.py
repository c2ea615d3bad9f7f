"""llama.cpp: a BLOOM and an encoder (its model type jina-bert-v2) through llama-cpp-python, and saved states through cyllama.

A BLOOM's GELU is a half-precision lookup table, so its logits are off by about 1e-5. An encoder's is the approximation by tanh,
from such a table, so hidden states are off by about 1e-3. `llama-cli --prompt-cache` writes and reads saved states.
"""

import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import BloomForCausalLM, PreTrainedConfig, PreTrainedModel

from alibi_lab.measure.peers.dense_encoder import separated
from alibi_lab.measure.timing import elapsed_ms

LONGEST = 2**20  # tokens of an encoder; the model has no limit, but the file format requires one
WARM = 9  # tokens after the first one after a saved state; their median is a warm token
STATE_NEEDS = ("cyllama", "gguf")  # packages of `LlamaState`
BATCH = 2048  # most tokens per call and per matrix product
READS = "import llama_cpp, sys; llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False).eval([0] * 64)"


class LlamaCpp:
    """A BLOOM with or without llama.cpp's flash attention. The cache is in fp32, or for other weights in fp16, its default."""

    def __init__(
        self, model: BloomForCausalLM, folder: Path, *, room: int, threads: int, flash: bool, precision: str = "float32"
    ) -> None:
        import llama_cpp

        path = folder / f"bloom-{precision}.gguf"
        if not path.exists():
            write_gguf(model, path, precision)
        if precision == "int8":
            require_that_it_survives(path)
        kept = llama_cpp.GGML_TYPE_F32 if precision == "float32" else llama_cpp.GGML_TYPE_F16
        batch = {"n_batch": BATCH, "n_ubatch": BATCH if flash else 512}
        self._llama = opened(path, room=room, threads=threads, flash=flash, type_k=kept, type_v=kept, **batch)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        self._llama.reset()
        self._llama.eval(list(tokens))
        return self._last()

    def several(self, tokens: Sequence[int], count: int) -> Callable[[], float]:
        self.logits(tokens)

        def call() -> float:
            start = time.perf_counter()
            for _ in range(count):
                self._llama.eval([tokens[-1]])
                self._last()
            seconds = time.perf_counter() - start
            self._llama._ctx.kv_cache_seq_rm(-1, len(tokens), -1)
            self._llama.n_tokens = len(tokens)
            return seconds / count

        return call

    def _last(self) -> np.ndarray:
        pointer = self._llama._ctx.get_logits_ith(-1)
        return np.ctypeslib.as_array(pointer, shape=(self._llama.n_vocab(),)).copy()


def opened(path: Path, *, room: int, threads: int, flash: bool, **options: Any) -> Any:
    """A model in llama.cpp with room for this many tokens."""
    import llama_cpp

    options |= {"n_ctx": room, "n_threads": threads, "n_threads_batch": threads, "flash_attn": flash}
    return llama_cpp.Llama(str(path), verbose=False, **options)


class Crash(RuntimeError):
    """llama.cpp ends the process that calls it."""


def require_that_it_survives(path: Path) -> None:
    """Reads 64 tokens in a process of its own, because a crash here would end the benchmark; raises Crash.

    Its products of int8 by AMX end in an illegal instruction on some machines, also without torch (docs/log.md).
    """
    done = subprocess.run([sys.executable, "-c", READS, str(path)], capture_output=True, check=False)
    if done.returncode:
        raise Crash(f"it ended its process with exit status {done.returncode} when it read 64 tokens")


Named = Iterable[tuple[str, Tensor]]
TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}  # of weight matrices, by precision


def write_gguf(model: BloomForCausalLM, path: Path, precision: str = "float32") -> None:
    """Writes the weights with the names and order of llama.cpp's converter, without a tokenizer."""
    import gguf

    config = model.config
    settings = {
        "context_length": BATCH,
        "feed_forward_length": 4 * config.hidden_size,
        "head_count_kv": config.n_head,
        "layer_norm_eps": config.layer_norm_epsilon,
        "tokenizer_model": "no_vocab",
    }
    tensors = model.transformer.state_dict()
    for name in [name for name in tensors if "query_key_value" in name]:
        # Per head here; llama.cpp has all queries first, then all keys, then all values.
        tensors[name] = tensors[name].unflatten(0, (config.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
    write_file(path, gguf.MODEL_ARCH.BLOOM, config, settings, tensors.items(), precision)


def write_file(
    path: Path, arch: int, config: PreTrainedConfig, settings: dict[str, object], tensors: Named, precision: str
) -> None:
    """Writes a GGUF file; vectors and the types of tokens are in fp32.

    Args:
        arch: gguf's number of the model type, which has llama.cpp's names of the tensors.
        config: the model's, of which the sizes are written.
        settings: further values by the name of the writer's `add_` function.
    """
    import gguf

    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    sizes = {"embedding_length": config.hidden_size, "vocab_size": config.vocab_size}
    layers = {"block_count": config.num_hidden_layers, "head_count": config.num_attention_heads}
    for setting, value in (sizes | layers | settings).items():
        getattr(writer, f"add_{setting}")(value)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for original, tensor in tensors:
        name = names.get_name(original, try_suffixes=(".weight", ".bias"))
        is_matrix = tensor.ndim == 2 and name != "token_types.weight"
        stored = gguf.GGMLQuantizationType[TYPES[precision] if is_matrix else "F32"]
        array = gguf.quants.quantize(tensor.float().contiguous().numpy(), stored)
        writer.add_tensor(name, array, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaEncoder:
    """The encoder with or without llama.cpp's flash attention. Texts of a batch are sequences, without padding.

    Args:
        room: most tokens of a batch, all of them computed at once.
        texts: most texts of a batch.
    """

    def __init__(self, path: Path, *, room: int, texts: int, threads: int, flash: bool) -> None:
        import llama_cpp

        sizes = {"n_batch": room, "n_ubatch": room, "n_seq_max": texts}
        pooling = {"embedding": True, "pooling_type": llama_cpp.LLAMA_POOLING_TYPE_NONE}
        self._llama = opened(path, room=room, threads=threads, flash=flash, **sizes, **pooling)

    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Token ids [B, T] and their mask, padded on the right -> hidden states [B, T, E], 0 at padding."""
        batch, context = self._llama._batch, self._llama._ctx
        batch.reset()
        for text, (row, length) in enumerate(zip(ids.tolist(), mask.sum(1).tolist(), strict=True)):
            batch.add_sequence(row[:length], text, logits_all=True)
        context.encode(batch)
        width = self._llama.n_embd()
        found = np.ctypeslib.as_array(context.get_embeddings(), shape=(batch.n_tokens(), width))
        states = torch.zeros(*ids.shape, width)
        states[mask.bool()] = torch.from_numpy(found.copy())
        return states


def write_encoder(model: PreTrainedModel, path: Path, precision: str) -> None:
    """Writes the weights with the names of llama.cpp's converter, without a tokenizer; vectors are in fp32."""
    import gguf

    config = model.config
    settings: dict[str, object] = {
        "context_length": LONGEST,
        "feed_forward_length": config.intermediate_size,
        "layer_norm_eps": config.layer_norm_eps,
        "causal_attention": False,
        "pooling_type": gguf.PoolingType.NONE,
        "token_type_count": 2,
        "tokenizer_model": "none",
    }
    write_file(path, gguf.MODEL_ARCH.JINA_BERT_V2, config, settings, separated(model.state_dict()), precision)


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
        params.type_k = params.type_v = 0  # ggml's number of fp32
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
