"""Small checkpoints of published decoders, with the outputs of the original code (tests/hf/data), as folders."""

import dataclasses
import json
from pathlib import Path

import torch
from encoder_oracle import write_folder
from safetensors import safe_open
from torch import Tensor

from alibi_attn.hf import ALiBiForCausalLM

DATA = Path(__file__).parents[2] / "hf" / "data"
SIZES = {"vocab_size": 60, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 64}
NAMES = ("baichuan", "baichuan2", "jais", "btlm", "mpt-grouped", "mpt-biases", "refact")


@dataclasses.dataclass
class Original:
    """Weights by their original names, the config, and the original code's inputs and outputs (`logits`, …)."""

    weights: dict[str, Tensor]
    config: dict[str, object]
    numbers: dict[str, Tensor]

    def write(self, folder: Path) -> Path:
        """A checkpoint folder."""
        return write_folder(folder, self.weights, self.config)


def original(name: str) -> Original:
    with safe_open(DATA / f"{name}.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is not a dict)
        config = json.loads(file.metadata()["config"])
    weights = {key.removeprefix("weights."): tensor for key, tensor in tensors.items() if key.startswith("weights.")}
    numbers = {key: tensor for key, tensor in tensors.items() if not key.startswith("weights.")}
    return Original(weights, config, numbers)


def step1() -> Original:
    """A Step-1 with shared key heads, of the weights of a Baichuan."""
    files = original("baichuan")
    sizes = {name: files.config[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "rms_norm_eps")}
    sizes |= {name: files.config[name] for name in ("intermediate_size", "num_hidden_layers")}
    for n in range(2):
        at = f"model.layers.{n}.self_attn."
        q, k, v = files.weights.pop(f"{at}W_pack.weight").chunk(3)
        files.weights |= {f"{at}q_proj.weight": q, f"{at}k_proj.weight": k[:16], f"{at}v_proj.weight": v[:16]}
    about = {"model_type": "step1", "architectures": ["Step1ForCausalLM"], "num_attention_groups": 2, **sizes}
    return Original(files.weights, {**about, "max_seq_len": 128, "tie_word_embeddings": False}, {})


def choices(name: str) -> dict[str, bool]:
    """Options that `from_pretrained` needs, because these vocabulary sizes are not the published ones."""
    return {"normalized_head": name == "baichuan2"} if name.startswith("baichuan") else {}


def loaded(
    folder: Path, name: str, *, about: dict[str, object] | None = None, **options: object
) -> tuple[Original, ALiBiForCausalLM]:
    """The files and the model of one checkpoint, with changes to its config if given."""
    files = original(name)
    files.config |= about or {}
    return files, ALiBiForCausalLM.from_pretrained(files.write(folder / name), **{**choices(name), **options})


def seen(numbers: dict[str, Tensor], logits: Tensor) -> Tensor:
    """[tokens, V]: the logits of tokens that are not padding."""
    return logits[numbers["attention_mask"].to(torch.bool)]
