"""The options of a decoder with ALiBi; each family of checkpoints is one combination of them. Read next: `model.py`."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from alibi_attn.attention.run.dispatch import BACKENDS
from alibi_attn.hf.readers.inputs import check, check_choice
from alibi_attn.slopes import alibi_slopes

NORMS = ("layer", "rms")
ROUNDINGS = ("none", "positions", "counts", "distances")


@strict
class ALiBiCausalLMConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """A pre-norm decoder with ALiBi. The last two fields select how to compute; all others describe the weights.

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads: V, E, layers and H.
        num_key_value_heads: K, which divides H; None for H.
        intermediate_size: the width of the feed-forward.
        hidden_act, gated: W_down·act(W_up·x), or gated: W_down·(act(W_gate·x)·(W_up·x)).
        norm, norm_bias, norm_eps: "layer" (with or without a bias) or "rms".
        attention_bias, output_bias, ffn_bias: whether q, k and v, the attention's output and the feed-forward have biases.
        qk_norm: queries and keys are normalized over all heads together, before they are split.
        head_norm_eps: the ε of RMS norms of queries and keys in each head; None for no such norms.
        forget_gate, output_gate: of the Forgetting Transformer: a gate per head and token scales the weights of all earlier keys;
            a gate per feature scales the output of attention.
        key_shift, value_shift: with forget gates: keys or values are mixed with those of the token before, by a gate per head.
        output_norm: an RMS norm of attention's output in each head, before the output gate.
        clip_qkv: queries, keys and values are clamped to ±clip_qkv; None for no clamp.
        attention_scale: the factor of q·k; None for 1/√D.
        scale_by_inverse_layer: divide that factor by (layer + 1), layers counted from 0.
        slopes: m for each of the H heads, as actually subtracted per token of distance; None for the published ones.
        alibi_scaling: None, {"type": "linear", "factor": s} to divide slopes by s, or {"type": "linear",
            "train_seq_len": L} to divide them by S/L with S > L keys (arXiv:2310.13017).
        root_bias: scores lose m·√(i − j) in place of m·(i − j).
        embedding_scale, logit_scale: factors of the embeddings and of the logits.
        normalized_head: divide each row of the head by its length, in every forward pass.
        embedding_dropout, residual_dropout, attention_dropout: in training only.
        checkpoint_rounding: how biases round with numerics="checkpoint": as m·j ("positions"), m·(j + 1) ("counts") or
            m·|i − j| ("distances") in the model's dtype, or "none" if the original computes them in fp32.
        trained_length: the length of the training texts in tokens; not a limit.
        source: the family of the weights, for readers of the config.
        numerics: "exact" or "checkpoint", as for `alibi_attn.hf.patch`.
        backend: of `alibi_attention`.

    Raises:
        ValueError: invalid or inconsistent values.
    """

    model_type = "alibi_causal_lm"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (transformers' own name and type)

    vocab_size: int = 50257
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    intermediate_size: int = 3072
    hidden_act: str = "silu"
    gated: bool = True
    norm: str = "rms"
    norm_bias: bool = False
    norm_eps: float = 1e-6
    attention_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    head_norm_eps: float | None = None
    forget_gate: bool = False
    output_gate: bool = False
    key_shift: bool = False
    value_shift: bool = False
    output_norm: bool = False
    clip_qkv: float | None = None
    attention_scale: float | None = None
    scale_by_inverse_layer: bool = False
    slopes: list[float] | None = None
    alibi_scaling: dict[str, Any] | None = None
    root_bias: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    normalized_head: bool = False
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    checkpoint_rounding: str = "none"
    trained_length: int | None = None
    source: str | None = None
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    numerics: str = "exact"
    backend: str = "auto"

    def validate_architecture(self) -> None:
        """Called by transformers when a config is created or loaded."""
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            check(name, getattr(self, name), getattr(self, name) > 0, "a number of at least 1")
        heads, shared = self.num_attention_heads, self.key_heads
        check("num_attention_heads", heads, self.hidden_size % heads == 0, f"a divisor of {self.hidden_size}")
        check("num_key_value_heads", shared, shared > 0 and heads % shared == 0, f"a divisor of {heads}, or None")
        check("slopes", self.slopes, self.slopes is None or len(self.slopes) == heads, f"{heads} numbers, or None")
        check("hidden_act", self.hidden_act, self.hidden_act in ACT2FN, "an activation of transformers")
        check("clip_qkv", self.clip_qkv, self.clip_qkv is None or self.clip_qkv > 0, "positive, or None")
        check_choice("norm", self.norm, NORMS)
        check_choice("checkpoint_rounding", self.checkpoint_rounding, ROUNDINGS)
        check_choice("numerics", self.numerics, ("exact", "checkpoint"))
        check_choice("backend", self.backend, ("auto", *BACKENDS))
        check("qk_norm", self.qk_norm, not (self.qk_norm and self.head_norm_eps), "False with head_norm_eps")
        for name in ("key_shift", "value_shift"):
            shift = getattr(self, name)
            check(name, shift, not shift or self.forget_gate, "False without forget_gate")
        excluded = self.forget_gate or self.alibi_scaling is not None
        check("root_bias", self.root_bias, not (self.root_bias and excluded), "False with forget_gate or alibi_scaling")
        self._check_scaling()
        super().validate_architecture()  # type: ignore[no-untyped-call]

    @property
    def rounds(self) -> bool:
        """Whether attention reproduces the original's rounding."""
        return self.numerics == "checkpoint" and self.checkpoint_rounding != "none"

    @property
    def head_dim(self) -> int:
        """D."""
        return self.hidden_size // self.num_attention_heads

    @property
    def key_heads(self) -> int:
        """K."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    def scale(self, layer: int) -> float:
        """The factor of q·k in one layer."""
        scale: float = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        return scale / (layer + 1) if self.scale_by_inverse_layer else scale

    def slopes_at(self, key_len: int) -> tuple[float, ...]:
        """m for S = key_len keys, including cached ones."""
        stretch = self.stretch(key_len)
        return tuple(slope / stretch for slope in self.unstretched)

    @property
    def unstretched(self) -> tuple[float, ...]:
        """m before `alibi_scaling`."""
        return tuple(alibi_slopes(self.num_attention_heads).tolist() if self.slopes is None else self.slopes)

    def stretch(self, key_len: int) -> float:
        """The divisor of the slopes."""
        if self.alibi_scaling is None:
            return 1.0
        if self.scales_with_length:
            return max(1.0, key_len / self.alibi_scaling["train_seq_len"])
        return float(self.alibi_scaling["factor"])

    @property
    def scales_with_length(self) -> bool:
        """Whether slopes depend on the number of keys."""
        return self.alibi_scaling is not None and self.alibi_scaling.get("factor") is None

    @property
    def needs_length(self) -> bool:
        """Whether attention needs the number of keys on the host."""
        return self.scales_with_length or self.root_bias

    def _check_scaling(self) -> None:
        scaling = self.alibi_scaling
        if scaling is None:
            return
        factor, trained = scaling.get("factor"), scaling.get("train_seq_len")
        known = set(scaling) <= {"type", "factor", "train_seq_len"} and scaling.get("type", "linear") == "linear"
        fixed = trained is None and isinstance(factor, int | float) and 0 < factor < float("inf")
        dynamic = factor is None and isinstance(trained, int) and trained > 0
        if not known or not (fixed or dynamic) or isinstance(factor, bool) or isinstance(trained, bool):
            raise ValueError(
                f"alibi_scaling is {scaling} but must be None, "
                '{"type": "linear", "factor": s} with a positive s, or {"type": "linear", "train_seq_len": L} with a length L'
            )
