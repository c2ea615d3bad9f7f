"""An encoder in llama.cpp, as its model type jina-bert-v2, called through llama-cpp-python.

Its GELU is the approximation by tanh, from a half-precision table, so hidden states are off by about 1e-3.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from alibi_lab.measure.peers.llama_cpp import opened, write_file

LONGEST = 2**20  # tokens; the model has no limit, but the file format requires one


class LlamaEncoder:
    """The encoder with or without llama.cpp's flash attention. Texts of a batch are sequences, without padding.

    Args:
        room: most tokens of a batch, all of them computed at once.
        texts: most texts of a batch.
    """

    def __init__(self, path: Path, *, room: int, texts: int, threads: int, flash: bool) -> None:
        import llama_cpp

        self._library = llama_cpp
        sizes = {"n_batch": room, "n_ubatch": room, "n_seq_max": texts}
        pooling = {"embedding": True, "pooling_type": llama_cpp.LLAMA_POOLING_TYPE_NONE}
        self._llama = opened(path, room=room, threads=threads, flash=flash, **sizes, **pooling)
        self._batch = llama_cpp.llama_batch_init(room, 0, texts)

    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Token ids [B, T] and their mask, padded on the right -> hidden states [B, T, E], 0 at padding."""
        count = 0
        for text, (row, length) in enumerate(zip(ids.tolist(), mask.sum(1).tolist(), strict=True)):
            for position in range(length):
                self._batch.token[count], self._batch.pos[count] = row[position], position
                self._batch.n_seq_id[count], self._batch.seq_id[count][0] = 1, text
                self._batch.logits[count] = True
                count += 1
        self._batch.n_tokens = count
        context = self._llama._ctx.ctx
        failed = self._library.llama_encode(context, self._batch)
        if failed:
            raise RuntimeError(f"llama.cpp returned {failed} for a batch of {count} tokens")
        width = self._llama.n_embd()
        found = np.ctypeslib.as_array(self._library.llama_get_embeddings(context), shape=(count, width))
        states = torch.zeros(*ids.shape, width)
        states[mask.bool()] = torch.from_numpy(found.copy())
        return states


def write(model: PreTrainedModel, path: Path, precision: str) -> None:
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
    write_file(path, gguf.MODEL_ARCH.JINA_BERT_V2, config, settings, tensors(model), precision)


def tensors(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """llama.cpp's names and the weights. Queries, keys and values are three tensors there, with or without biases."""
    found: list[tuple[str, Tensor]] = []
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        parts = module.split(".")
        inside = ".".join(parts[3:]) if parts[0] == "encoder" else module
        block = f"blk.{parts[2]}." if parts[0] == "encoder" else ""
        if inside == "attention.self.Wqkv":
            thirds = tensor.chunk(3)
            found += [(f"{block}attn_{part}.{kind}", third) for part, third in zip("qkv", thirds, strict=True)]
        else:
            found.append((f"{block}{NAMES[inside]}.{kind}", tensor))
    return found


NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "mlp.gated_layers": "ffn_up",
    "mlp.wo": "ffn_down",
    "mlp.layernorm": "layer_output_norm",
}
