"""A BLOOM in llama.cpp, called through llama-cpp-python.

Its GELU is a half-precision lookup table, so its logits are off by about 1e-5.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import BloomForCausalLM, PreTrainedConfig

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

    config, arch = model.config, gguf.MODEL_ARCH.BLOOM
    settings = {
        "context_length": BATCH,
        "feed_forward_length": 4 * config.hidden_size,
        "head_count_kv": config.n_head,
        "layer_norm_eps": config.layer_norm_epsilon,
        "tokenizer_model": "no_vocab",
    }
    names = gguf.get_tensor_name_map(arch, config.n_layer)
    tensors = []
    for name, tensor in model.transformer.state_dict().items():
        if "query_key_value" in name:  # per head here; llama.cpp has all queries first, then all keys, then all values
            tensor = tensor.unflatten(0, (config.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
        tensors.append((names.get_name(name, try_suffixes=(".weight", ".bias")), tensor))
    write_file(path, arch, config, settings, tensors, precision)


def write_file(
    path: Path, arch: int, config: PreTrainedConfig, settings: dict[str, object], tensors: Named, precision: str
) -> None:
    """Writes a GGUF file; vectors and the types of tokens are in fp32.

    Args:
        arch: gguf's number of the model type.
        config: the model's, of which the sizes are written.
        settings: further values by the name of the writer's `add_` function.
    """
    import gguf

    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    sizes = {"embedding_length": config.hidden_size, "vocab_size": config.vocab_size}
    layers = {"block_count": config.num_hidden_layers, "head_count": config.num_attention_heads}
    for setting, value in (sizes | layers | settings).items():
        getattr(writer, f"add_{setting}")(value)
    for name, tensor in tensors:
        is_matrix = tensor.ndim == 2 and name != "token_types.weight"
        stored = gguf.GGMLQuantizationType[TYPES[precision] if is_matrix else "F32"]
        array = gguf.quants.quantize(tensor.float().contiguous().numpy(), stored)
        writer.add_tensor(name, array, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
