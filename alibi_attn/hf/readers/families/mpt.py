"""MPT: softmax(softmax_scale·q·k + m·(j − last)). Positions are indices, and the bias is fp32 in every dtype.

transformers builds the bias for `max_seq_len` keys and fails beyond. It ignores `alibi_bias_max` and `alibi` in the config. A
patched model runs at any length and honors `alibi_bias_max`. `numerics="checkpoint"` has no effect, because m·j is not rounded.
Source: modeling_mpt.py of transformers; llm-foundry's attention.py.
"""

from torch import Tensor, nn
from transformers import MptConfig
from transformers.cache_utils import Cache
from transformers.models.mpt.configuration_mpt import MptAttentionConfig
from transformers.models.mpt.modeling_mpt import MptAttention, MptBlock, MptMLP, MptModel

from alibi_attn.hf.attention import patched_attention
from alibi_attn.hf.attention.patched_attention import AttentionSettings, Numerics
from alibi_attn.hf.readers.families.family import PatchedFamily, StepModules
from alibi_attn.slopes import alibi_slopes


def why_not(config: MptConfig) -> str | None:
    """The reason why it cannot be patched: an option in the config that transformers does not implement; or None."""
    options = _options(config)
    if not options.alibi:
        return (
            "attn_config.alibi is False: such a checkpoint has learned positions, which transformers does not implement "
            "(it adds ALiBi instead)"
        )
    for option in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        if getattr(options, option):
            return f"attn_config.{option} is True, which transformers does not implement"
    return None


def settings(config: MptConfig, *, backend: str, numerics: Numerics) -> AttentionSettings:
    """Slopes up to 2^−alibi_bias_max, and scores times softmax_scale (1/√D by default)."""
    options = _options(config)
    scale = (config.d_model / config.n_heads) ** -0.5 if options.softmax_scale is None else options.softmax_scale
    slopes = alibi_slopes(config.n_heads, bias_max=float(options.alibi_bias_max))
    return AttentionSettings(tuple(slopes.tolist()), scale, backend, numerics)


def forward(
    self: MptAttention,
    hidden_states: Tensor,
    *,
    past_key_values: Cache | None = None,
    attention_mask: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Replaces `MptAttention.forward`."""
    qkv: Tensor = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (patched_attention.by_head(x, self.n_heads) for x in qkv.chunk(3, dim=2))
    assert attention_mask is not None  # MptModel always builds one
    mixed = patched_attention.cached_and_attended(
        self, query, key, value, cache=past_key_values, mask=attention_mask, dropout_p=self.attn_dropout_p
    )
    return self.out_proj(mixed), None


def _options(config: MptConfig) -> MptAttentionConfig:
    assert isinstance(config.attn_config, MptAttentionConfig)  # MptConfig converts it
    return config.attn_config


# `unused` is empty: the bias that the model still builds has no query axis, so it is small.
FAMILY = PatchedFamily(
    name="MPT",
    model=MptModel,
    layer=MptAttention,
    settings=settings,
    forward=forward,
    counts_positions=False,
    why_not=why_not,
    step=StepModules(
        embedding="wte",
        blocks="blocks",
        last_norm="norm_f",
        block=MptBlock,
        attention="attn",
        ffn="ffn",
        ffn_kind=MptMLP,
        norms=("norm_1", "norm_2"),
        qkv="Wqkv",
        out="out_proj",
        up="up_proj",
        activation="act",
        down="down_proj",
        activation_kind=nn.GELU,
        by_head=False,
        unsupported=("attention", "clip_qkv"),
    ),
)
