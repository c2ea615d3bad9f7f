"""ALiBiTransformerBlock: attention and a feed-forward network, each with a norm before it and a residual connection."""

from typing import Never, TypedDict, Unpack

from torch import Tensor, nn

from alibi_attn.attention.call.bias import Slopes
from alibi_attn.attention.call.hints import by_position, hides_unknown
from alibi_attn.attention.call.options import LayerOptions, Window
from alibi_attn.nn.attention import ALiBiAttention
from alibi_attn.nn.cache import KVCache
from alibi_attn.nn.constructor_arguments import checks_names
from alibi_attn.nn.input_checks import check_embeddings


class AttentionOptions(LayerOptions, total=False):
    """The keyword arguments of `ALiBiAttention`, without its dropout."""

    window: Window[Tensor] | None
    slopes: Slopes | None


class ForwardOptions(TypedDict, total=False):
    """The keyword arguments of `ALiBiAttention.forward`."""

    cache: KVCache | None
    key_mask: Tensor | None
    segment_ids: Tensor | None
    prefix_len: Tensor | None
    positions: Tensor | None


class ALiBiTransformerBlock(nn.Module):
    """One pre-norm transformer block, x [B, T, embed_dim] → [B, T, embed_dim].

        x ← x + dropout(attention(norm(x)))
        x ← x + dropout(W₂·dropout(GELU(W₁·norm(x))))

    Args:
        ffn_dim: width of the feed-forward network; default 4·embed_dim.
        dropout_p: of attention weights, activations and both branches, in training only.
        attention: keyword arguments of `ALiBiAttention` (num_kv_heads, bias, causal, window, sinks, registers, slopes,
            learn_slopes, qk_norm, forget_gate); `bias` applies to all linear layers and norms.

    >>> import torch
    >>> block = ALiBiTransformerBlock(embed_dim=64, num_heads=8, num_kv_heads=2)
    >>> block(torch.zeros(2, 10, 64)).shape
    torch.Size([2, 10, 64])

    Source: pre-norm blocks: Baevski & Auli 2019 (arXiv:1809.10853), the model of Press et al. 2022.
    """

    @checks_names(ALiBiAttention)
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        ffn_dim: int | None = None,
        *,
        dropout_p: float = 0.0,
        **attention: Unpack[AttentionOptions],
    ) -> None:
        super().__init__()
        ffn_dim = 4 * embed_dim if ffn_dim is None else ffn_dim
        if ffn_dim < 1:
            raise ValueError(f"ffn_dim is {ffn_dim} but must be at least 1, or None for 4·embed_dim")
        bias = attention.get("bias", False)
        self.attention_norm = nn.LayerNorm(embed_dim, bias=bias)
        self.attention = ALiBiAttention(embed_dim, num_heads, dropout_p=dropout_p, **attention)
        self.ffn_norm = nn.LayerNorm(embed_dim, bias=bias)
        self.ffn = nn.Sequential(
            nn.Linear(embed_dim, ffn_dim, bias=bias),
            nn.GELU(),
            nn.Dropout(dropout_p),
            nn.Linear(ffn_dim, embed_dim, bias=bias),
        )
        self.dropout = nn.Dropout(dropout_p)

    @hides_unknown
    def forward(self, x: Tensor, *more: Never, **options: Unpack[ForwardOptions]) -> Tensor:
        """Same arguments as `ALiBiAttention.forward`; the cache belongs to this block's attention layer."""
        if more:
            raise by_position("ALiBiTransformerBlock", more)
        check_embeddings(x, self.attention.embed_dim)
        x = x + self.dropout(self.attention(self.attention_norm(x), **options))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))
