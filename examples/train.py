"""Does a model trained on short texts still work on long ones?

python examples/train.py                    # on a file of Python's own library, byte by byte; half a minute
python examples/train.py --text novel.txt
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from alibi_attn import ALiBiTransformerBlock


def language_model(width: int, num_heads: int, layers: int) -> nn.Module:
    """Bytes [B, T] → scores of the next byte [B, T, 256]; no position embeddings, no maximum length."""
    blocks = [ALiBiTransformerBlock(width, num_heads) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(256, width), *blocks, nn.LayerNorm(width), nn.Linear(width, 256))


def loss(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Mean loss in nats per byte, of every byte but the first: text [B, T + 1]."""
    return cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="a file to train and test on")
    parser.add_argument("--length", type=int, default=64, help="bytes per training text (default 64)")
    parser.add_argument("--steps", type=int, default=300, help="training steps of 4,096 bytes (default 300)")
    options = parser.parse_args()
    torch.manual_seed(0)

    text = torch.tensor(list(options.text.read_bytes()))
    training, held_out = text.tensor_split([len(text) * 7 // 8])
    model = language_model(width=64, num_heads=8, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(options.steps):
        starts = torch.randint(len(training) - options.length, (4096 // options.length, 1))
        optimizer.zero_grad()
        loss(model, training[starts + torch.arange(options.length + 1)]).backward()
        optimizer.step()

    for length in (options.length * factor for factor in (1, 4, 16, 64)):
        whole = held_out[: (len(held_out) - 1) // length * length + 1]
        if len(whole) > 1:
            texts = whole.unfold(0, length + 1, length)
            with torch.no_grad():
                print(
                    f"trained at {options.length} bytes, read {length:5,} at once: {loss(model, texts):.2f} nats per byte"
                )


if __name__ == "__main__":
    main()
