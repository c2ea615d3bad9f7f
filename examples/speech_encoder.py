"""How does a speech encoder like data2vec 2 attend: symmetric on a line, with ten tokens without a bias and learned scales?

python examples/speech_encoder.py
"""

import torch
from torch import nn

from alibi_attn import alibi_attention, alibi_slopes

TOKENS = 10  # extra tokens in front, which every frame attends to as if they were next to it


class Attention(nn.Module):
    """Symmetric ALiBi whose published slopes are multiplied by one learned scale per head."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(num_heads))
        self.register_buffer("slopes", torch.tensor(alibi_slopes(num_heads), dtype=torch.float32))

    def forward(self, x: torch.Tensor, key_mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        slopes = self.slopes * self.scale.clamp(min=0.0)
        out = alibi_attention(q, k, v, slopes, causal=False, registers=TOKENS, key_mask=key_mask)
        return self.out(out.transpose(1, 2).flatten(2))


def main() -> None:
    torch.manual_seed(0)
    layer, extra = Attention(64, 8), nn.Parameter(torch.randn(TOKENS, 64))
    frames = torch.randn(2, 1500, 64)
    key_mask = torch.arange(TOKENS + 1500) < TOKENS + torch.tensor([[1500], [900]])  # the second recording is shorter
    x = torch.cat([extra.expand(2, -1, -1), frames], 1)
    out = layer(x, key_mask)
    out[:, TOKENS:].square().mean().backward()
    print(
        f"output {list(out.shape)}; gradients of the scales: {', '.join(f'{g:.1e}' for g in layer.scale.grad.tolist())}"
    )
    later = torch.cat([x[:, :TOKENS], x[:, TOKENS:].roll(700, 1)], 1)  # the same frames, 700 places later
    shift = (layer(later, torch.ones_like(key_mask)) - layer(x, torch.ones_like(key_mask)))[:, 0].abs().max()
    print(f"the first extra token sees every frame at the same distance: moving them changes it by {shift:.1e}")


if __name__ == "__main__":
    main()
