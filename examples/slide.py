"""How do you attend over 20,000 patches of a slide by their distance in the plane, on a laptop, with a class token?

python examples/slide.py                       # forward and one training step; takes minutes on two cores
python examples/slide.py --patches 2000
"""

import argparse
import resource
import time

import torch
from torch import nn

from alibi_attn import alibi_attention


class Layer(nn.Module):
    """A pre-norm encoder layer whose heads attend by distance in the plane; the class token comes first and has distance 0."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.slopes = nn.Parameter(2.0 ** -torch.arange(1.0, num_heads + 1))  # per patch width, trained

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = alibi_attention(q, k, v, self.slopes, causal=False, positions=places, registers=1)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patches", type=int, default=20_000)
    patches = parser.parse_args().patches
    torch.manual_seed(0)
    side = int(patches**0.5) + 1
    places = torch.cartesian_prod(torch.arange(float(side)), torch.arange(float(side)))[:patches]  # in patch widths
    places = torch.cat([places.mean(0, keepdim=True), places])[None]  # the class token's place does not matter
    x = torch.randn(1, patches + 1, 64)
    layers = nn.ModuleList([Layer(64, 4) for _ in range(2)])
    start = time.perf_counter()
    y = x
    for layer in layers:
        y = layer(y, places)
    print(f"forward of {patches:,} patches: {time.perf_counter() - start:.1f} s; peak memory {peak_gib():.2f} GiB")
    y[:, 0].square().mean().backward()
    print(f"training step: {time.perf_counter() - start:.1f} s; peak memory {peak_gib():.2f} GiB")
    print(f"one dense bias would take {4 * patches**2 * 4 / 2**30:.2f} GiB")


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
