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
