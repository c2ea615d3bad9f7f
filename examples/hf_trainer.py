"""How do these layers train with the Trainer of transformers, and with Lightning?

python examples/hf_trainer.py               # on a file of Python's own library, byte by byte; half a minute

Trainer wants a module whose forward returns a dict with the loss. In Lightning call the same module in `training_step`
of a LightningModule and return its loss; nothing else is specific to these layers.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

from alibi_attn import ALiBiTransformerBlock


class LanguageModel(nn.Module):
    """Bytes [B, T] → {"loss", "logits" [B, T, 256]}; no position embeddings, no maximum length."""

    def __init__(self, width: int = 64, num_heads: int = 8, layers: int = 2) -> None:
        super().__init__()
        blocks = [ALiBiTransformerBlock(width, num_heads) for _ in range(layers)]
        self.layers = nn.Sequential(nn.Embedding(256, width), *blocks, nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(input_ids)
        return {"loss": cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:]), "logits": logits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="a file to train and test on")
    parser.add_argument("--steps", type=int, default=300, help="training steps of 4,096 bytes (default 300)")
    options = parser.parse_args()
    torch.manual_seed(0)

    def rows(text: Tensor, length: int) -> list[dict[str, Tensor]]:
        return [{"input_ids": row, "labels": row} for row in text.unfold(0, length, length)]

    text = torch.tensor(list(options.text.read_bytes()))
    training, held_out = text.tensor_split([len(text) * 7 // 8])
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=64, per_device_eval_batch_size=4,
            learning_rate=3e-3, logging_strategy="no", save_strategy="no", report_to="none", use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(LanguageModel(), settings, train_dataset=rows(training, 64))
        trainer.train()
        for length in (64, 1024):
            loss = trainer.evaluate(rows(held_out, length))["eval_loss"]
            print(f"trained at 64 bytes, read {length:5,} at once: {loss:.2f} nats per byte")


if __name__ == "__main__":
    main()
