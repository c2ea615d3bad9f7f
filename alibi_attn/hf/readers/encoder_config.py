"""`ALiBiBertConfig`: the sizes of an encoder with ALiBi, and the options in which its families differ."""

from typing import Any, ClassVar

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from alibi_attn.attention.run.dispatch import BACKENDS
from alibi_attn.hf.readers.inputs import check, check_choice

GATE_ACTIVATIONS = ("gelu", "relu")


class ALiBiBertConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """Config of `ALiBiBertModel` and its heads. Defaults are the shape of MosaicBERT, DNABERT-2 and Jina v2, at base size.

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, type_vocab_size: V, E, layers, H, I
            and the number of token types.
        hidden_act: activation in the head of the masked language model.
        gated: whether the feed-forward is gated. False is BERT's own feed-forward, for models from `to_alibi`.
        gate_act: activation of the feed-forward: "gelu" (exact, with erf) or "relu", or any of transformers if it is not gated.
        gate: which half of the gated layer's outputs is activated, "first" or "second" (Jina v2 code).
        qk_norm: LayerNorms of queries and of keys over the whole width E, before heads are split (Jina v2 code).
        extra_norm: a second residual and LayerNorm after those of the attention (Jina v2 code).
        qkv_bias: whether queries, keys and values have biases.
        pooler: whether the bare model has a pooler, a dense layer and tanh over the first token.
        hidden_dropout_prob, attention_probs_dropout_prob, classifier_dropout: in training only; None for the last means
            the same as the first.
        max_position_embeddings: the length of the training texts. It has no effect: longer texts work.
        emb_pooler: how to pool hidden states into sentence embeddings, "mean" or None; only stored for users of the model.
        backend: of `alibi_attention`. "dense" is plain PyTorch, which torch.onnx can translate.
        original_layout: the family from which the model was read, whose weight names `save_pretrained(folder, layout="original")`
            writes; None = it was not read from an original.

    Raises:
        ValueError: invalid or inconsistent values.

    >>> ALiBiBertConfig(num_attention_heads=12).head_dim
    64
    """

    model_type: ClassVar[str] = "alibi-bert"

    vocab_size: int = 30528
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    type_vocab_size: int = 2
    hidden_act: str = "gelu"
    gated: bool = True
    gate_act: str = "gelu"
    gate: str = "first"
    qk_norm: bool = False
    extra_norm: bool = False
    qkv_bias: bool = True
    pooler: bool = True
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.0
    classifier_dropout: float | None = None
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    max_position_embeddings: int = 512
    emb_pooler: str | None = None
    backend: str = "auto"
    original_layout: str | None = None
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        for name, kind in ALiBiBertConfig.__annotations__.items():
            value = getattr(self, name)
            if kind is int:
                check(name, value, type(value) is int and value >= 1, "a positive integer")
            elif kind is bool:
                check_choice(name, value, (False, True))
            elif name.endswith(("_prob", "_dropout")):
                unset = name == "classifier_dropout" and value is None
                check(name, value, unset or (type(value) in (int, float) and 0 <= value < 1), "a probability in [0, 1)")
            elif kind is float:
                check(name, value, type(value) in (int, float) and value >= 0, "a number ≥ 0")
        layout = self.original_layout
        check("original_layout", layout, isinstance(layout, str | None), "the name of a family, or None")
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        check_choice("gate_act", self.gate_act, GATE_ACTIVATIONS if self.gated else tuple(ACT2FN))
        check("hidden_act", self.hidden_act, self.hidden_act in ACT2FN, "an activation of transformers, such as 'gelu'")
        width, heads = self.hidden_size, self.num_attention_heads
        check("hidden_size", width, width % heads == 0, f"a multiple of num_attention_heads, {heads}")

    @property
    def head_dim(self) -> int:
        """D, the size of a head."""
        return self.hidden_size // self.num_attention_heads


_CHOICES: dict[str, tuple[object, ...]] = {
    "gate": ("first", "second"),
    "emb_pooler": ("mean", None),
    "backend": ("auto", *BACKENDS),
    "problem_type": (None, "regression", "single_label_classification", "multi_label_classification"),
}
