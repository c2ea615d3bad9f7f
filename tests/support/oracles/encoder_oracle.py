"""An ALiBi encoder from its formulas, in fp64: loops over texts, layers and heads, with the original key names.

Also writes random checkpoints of each family as folders on disk, and a tokenizer of letters.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional as F

from alibi_attn.hf import ALiBiBertConfig, ALiBiBertModel

LAYOUTS = ("mosaic", "jina", "jina-code")
WIDTH, HEADS, INNER, LAYERS, WORDS, TYPES = 48, 6, 40, 2, 40, 2


def slopes(num_heads: int) -> list[float]:
    """The authors' slopes, for powers of two and other numbers of heads."""

    def of_power(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (h + 1) / n) for h in range(n)]

    closest = 2 ** int(math.log2(num_heads))
    return of_power(closest) + of_power(2 * closest)[0::2][: num_heads - closest]


def encode(
    state: dict[str, Tensor],
    layout: str,
    ids: Tensor,
    mask: Tensor,
    types: Tensor | None = None,
    *,
    heads: int = HEADS,
    act: str = "gelu",
    activates: str | None = None,
) -> Tensor:
    """Hidden states [B, T, E] in fp64, 0 at padding. `activates` is the half that gates, by default the family's."""
    state = {name: x.double() if not x.requires_grad else x for name, x in state.items()}
    activates = activates or ("second" if layout == "jina-code" else "first")
    types = torch.zeros_like(ids) if types is None else types
    rows = [
        _text(state, layout, *row, heads=heads, act=act, activates=activates)
        for row in zip(ids, mask, types, strict=True)
    ]
    return torch.stack(rows)


def _text(state, layout, ids, mask, types, *, heads, act, activates):
    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps=1e-12)

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    where = mask.bool().nonzero()[:, 0]  # the visible tokens' indices in the padded row
    distance = (where[:, None] - where[None, :]).abs().double()
    x = (
        state["embeddings.word_embeddings.weight"][ids[where]]
        + state["embeddings.token_type_embeddings.weight"][types[where]]
    )
    x = norm("embeddings.LayerNorm", x)
    layers = {int(name.split(".")[2]) for name in state if name.startswith("encoder.layer.")}
    for n in range(len(layers)):
        at = f"encoder.layer.{n}."
        if layout == "mosaic":
            q, k, v = linear(f"{at}attention.self.Wqkv", x).chunk(3, dim=-1)
        else:
            q, k, v = (linear(f"{at}attention.self.{part}", x) for part in ("query", "key", "value"))
        if layout == "jina-code":
            q, k = norm(f"{at}attention.self.layer_norm_q", q), norm(f"{at}attention.self.layer_norm_k", k)
        outputs = []
        for slope, q_h, k_h, v_h in zip(slopes(heads), *(y.chunk(heads, dim=-1) for y in (q, k, v)), strict=True):
            scores = q_h @ k_h.T / math.sqrt(q_h.shape[-1]) - slope * distance
            outputs.append(scores.softmax(-1) @ v_h)
        a = norm(
            f"{at}attention.output.LayerNorm", linear(f"{at}attention.output.dense", torch.cat(outputs, dim=-1)) + x
        )
        h = norm(f"{at}layer_norm_1", x + a) if layout == "jina-code" else a
        inner = linear(f"{at}mlp." + ("up_gated_layer" if layout == "jina-code" else "gated_layers"), h)
        gate, other = inner.chunk(2, dim=-1)
        gate, other = (gate, other) if activates == "first" else (other, gate)
        gate = F.relu(gate) if act == "relu" else F.gelu(gate)
        out = linear(f"{at}mlp." + ("down_layer" if layout == "jina-code" else "wo"), gate * other)
        x = norm(f"{at}layer_norm_2" if layout == "jina-code" else f"{at}mlp.layernorm", out + h)
    row = torch.zeros(len(ids), x.shape[-1], dtype=torch.float64)
    return row.index_copy(0, where, x)


def random_state(
    layout: str, *, prefix: str = "", seed: int = 0, head: str = "", pooler: bool = False, labels: int = 2
):
    """Random weights by a family's names; none is zero, so all have an effect. head: "", "mlm" or "classifier"."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}

    def put(name: str, *shape: int, around: float = 0.0) -> None:
        scale = 0.25 if len(shape) == 1 else shape[1] ** -0.5  # so that hidden states stay of order 1
        state[name] = around + scale * torch.randn(*shape, generator=generator)

    def linear(name: str, out: int, inner: int, *, bias: bool = True) -> None:
        put(f"{name}.weight", out, inner)
        if bias:
            put(f"{name}.bias", out)

    def norm(name: str) -> None:
        put(f"{name}.weight", WIDTH, around=1.0)
        put(f"{name}.bias", WIDTH)

    put(f"{prefix}embeddings.word_embeddings.weight", WORDS, WIDTH)
    put(f"{prefix}embeddings.token_type_embeddings.weight", TYPES, WIDTH)
    norm(f"{prefix}embeddings.LayerNorm")
    for n in range(LAYERS):
        at, code = f"{prefix}encoder.layer.{n}.", layout == "jina-code"
        if layout == "mosaic":
            linear(f"{at}attention.self.Wqkv", 3 * WIDTH, WIDTH)
        else:
            for part in ("query", "key", "value"):
                linear(f"{at}attention.self.{part}", WIDTH, WIDTH)
        for name in ["attention.output.LayerNorm", *_NORMS[code]]:
            norm(at + name)
        linear(f"{at}attention.output.dense", WIDTH, WIDTH)
        linear(f"{at}mlp." + ("up_gated_layer" if code else "gated_layers"), 2 * INNER, WIDTH, bias=False)
        linear(f"{at}mlp." + ("down_layer" if code else "wo"), WIDTH, INNER)
    if pooler or head == "classifier":
        linear(f"{prefix}pooler.dense", WIDTH, WIDTH)
    if head == "classifier":
        linear("classifier", labels, WIDTH)
    if head == "mlm":
        linear("cls.predictions.transform.dense", WIDTH, WIDTH)
        norm("cls.predictions.transform.LayerNorm")
        put("cls.predictions.decoder.bias" if layout == "mosaic" else "cls.predictions.bias", WORDS)
    return state


_NORMS = {
    False: ["mlp.layernorm"],
    True: ["attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1", "layer_norm_2"],
}


def config(layout: str, **changes: object) -> dict[str, object]:
    """The contents of the family's config.json."""
    said: dict[str, object] = {
        "model_type": "bert",
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INNER,
        "type_vocab_size": TYPES,
        "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 16,
        "hidden_act": "gelu",
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    if layout == "mosaic":  # whose config is misleading
        said |= {"position_embedding_type": "absolute", "alibi_starting_size": 16}
        said |= {"auto_map": {"AutoModel": "bert_layers.BertModel"}}
    else:
        said |= {"position_embedding_type": "alibi", "feed_forward_type": "geglu", "emb_pooler": "mean"}
        said |= {"auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"}}
    return {name: value for name, value in {**said, **changes}.items() if value is not None}


def write_folder(folder: Path, state: dict[str, Tensor], said: dict[str, object], *, pickled: bool = False) -> Path:
    """Writes a checkpoint in the published layout."""
    folder.mkdir(parents=True, exist_ok=True)
    if pickled:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(
            {name: x.contiguous() for name, x in state.items()}, folder / "model.safetensors", metadata={"format": "pt"}
        )
    (folder / "config.json").write_text(json.dumps(said), encoding="utf-8")
    return folder


SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def small_encoder(kind: type[nn.Module] = ALiBiBertModel, **fields: object) -> nn.Module:
    """One of our classes with random weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    return kind(ALiBiBertConfig(**{**sizes, "intermediate_size": INNER, **fields})).eval()


def write_tokenizer(folder: Path, **said: object) -> Path:
    """Writes a tokenizer of one-letter words, a = 5 and so on, with [CLS] and [SEP] around a text."""
    vocabulary = {word: at for at, word in enumerate([*SPECIAL, *"abcdefghijklmnopqrstuvwxyz"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **dict(zip(names, SPECIAL, strict=True)), **said}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    return folder


def letter_ids(text: str) -> Tensor:
    """The ids [1, T] that this tokenizer gives a text of single letters."""
    return torch.tensor([[2, *(ord(letter) - ord("a") + 5 for letter in text.split()), 3]])


def pooled(state: dict[str, Tensor], layout: str, text: str, pooling: str = "mean") -> Tensor:
    """The embedding of a text from the formulas, in fp64."""
    ids = letter_ids(text)
    states = encode(state, layout, ids, torch.ones_like(ids))[0]
    return states.mean(0) if pooling == "mean" else states[0]
