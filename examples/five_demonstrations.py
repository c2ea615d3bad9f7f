"""Five first questions about ALiBi: shapes, longer texts, decoding, parameters, and what it looks like.

python examples/five_demonstrations.py                   # prints four of them, in a few seconds
python examples/five_demonstrations.py --png heads.png   # and draws the fifth: the picture of the heads
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from alibi_attn import ALiBiAttention, ALiBiTransformerBlock, KVCache
from alibi_lab.report import plot_alibi_bias


def text(batch: int, length: int) -> torch.Tensor:
    """Synthetic text [B, T]: each token is the sum of the two before it modulo 16, so order matters."""
    tokens = torch.randint(16, (batch, length))
    for at in range(2, length):
        tokens[:, at] = tokens[:, at - 2 : at].sum(1) % 16
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--png", type=Path, help="save the picture of the heads here")
    png = parser.parse_args().png
    torch.manual_seed(0)
    attention, x = ALiBiAttention(embed_dim=64, num_heads=8), torch.randn(2, 10, 64)
    print(f"1. Shapes: {list(x.shape)} in, {list(attention(x).shape)} out; a longer x needs no change.")

    blocks = [ALiBiTransformerBlock(32, 8) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(16, 32), *blocks, nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        tokens = text(32, 32)
        optimizer.zero_grad()
        cross_entropy(model(tokens[:, :-1])[:, 1:].flatten(0, 1), tokens[:, 2:].flatten()).backward()
        optimizer.step()
    for length in (32, 64, 256):
        right = (model(tokens := text(64, length)).argmax(-1)[:, 1:-1] == tokens[:, 2:]).float().mean().item()
        print(f"2. Trained at 32 tokens; right at {length}: {right:.1%} (chance is 6.2%)")

    cache, x = KVCache(), torch.randn(1, 40, 64)
    steps = [attention(part, cache=cache) for part in x.split([35, 1, 1, 1, 1, 1], dim=1)]
    difference = (torch.cat(steps, dim=1) - attention(x)).abs().max()
    print(f"3. A prompt and five cached steps differ from one full pass by {difference:.1e} at most.")
    count = sum(weight.numel() for weight in attention.parameters())
    print(f"4. Parameters of the layer: {count:,}; of its four linear layers: {4 * 64 * 64:,}. ALiBi adds none.")

    if png is not None:
        plot_alibi_bias(8, 256).savefig(png, dpi=150)
    print(f"5. The picture of the heads: {png or 'pass --png heads.png to save it'}")


if __name__ == "__main__":
    main()
