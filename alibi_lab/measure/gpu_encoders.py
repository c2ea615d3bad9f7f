"""Encoders on one GPU: texts of several lengths in every dtype, one long document, and texts as strings.

Hidden states are compared with those of the dense encoder in fp32. Read next: `gpu_linears.py`.
"""

import copy
import functools
import math
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alibi_attn.nn import quantized
from alibi_attn.nn.allocator import peak_memory_bytes, reset_peak_memory
from alibi_lab.measure.gpu_networks import ENCODER_LAYERS, checked_row, relative_error
from alibi_lab.measure.gpu_parts import COLUMNS, GRAPH, Calls, Case, Part, call_row, judged
from alibi_lab.measure.gpu_steps import padding
from alibi_lab.measure.harness import Row
from alibi_lab.measure.timing import replayable

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDED: dict[quantized.Kind, float] = {
    "int8": 0.01,
    "float8": 0.04,
}  # the error of one linear layer, for normal numbers
MOST_ERROR = 2e-2  # of means of hidden states in bf16, as in `long_document.py`
LONGEST_DENSE = 8192
CHUNK = 256  # tokens
TEXT_LAYERS = 2
GROWTH = 4  # a document is compared with one of this share of its length
ALONE, COMPUTED, ONE_ROW = "bf16, each text alone", "bf16, padding computed", "bf16, one row"


def mixed(case: Case, device: torch.device) -> Calls:
    """A batch of texts of several lengths."""
    ours, exact, ids = _encoders(case, device)
    shown = padding(case, device)
    mask, lengths = shown.long(), shown.sum(1).tolist()
    with torch.no_grad():
        true = exact(ids, mask)[shown]
        plain = {
            name: relative_error(copy.deepcopy(exact).to(dtype)(ids, mask)[shown], true)
            for name, dtype in HALVES.items()
        }
    bf16 = copy.deepcopy(ours).to(torch.bfloat16)

    def states(model: nn.Module, given: Tensor, **options: Tensor) -> Tensor:
        with torch.no_grad():
            hidden: Tensor = model(given, **options).last_hidden_state
            return hidden

    def tokens(output: Tensor) -> Tensor:
        return output[shown]

    def row(name: str, call: Callable[[], Tensor], compared: Callable[[Tensor], Tensor] = tokens) -> Row:
        return checked_row(call, device, true, plain[name], compared)

    def in_half(name: str) -> Row:
        model = copy.deepcopy(ours).to(HALVES[name])
        return row(name, lambda: states(model, ids, attention_mask=mask))

    def alone() -> Row:
        texts = [text[None, :length] for text, length in zip(ids, lengths, strict=True)]
        return row("bf16", lambda: torch.cat([states(bf16, text)[0] for text in texts]), lambda output: output)

    def one_row() -> Row:
        text, segments = ids[shown][None], shown.nonzero()[None, :, 0]
        return row("bf16", lambda: states(bf16, text, segment_ids=segments), lambda output: output[0])

    def computed() -> Row:
        return checked_row(
            lambda: states(bf16, ids), device, true[: lengths[0]], plain["bf16"], lambda output: output[0, : lengths[0]]
        )

    def graph() -> Row:
        with_hole = mask.clone()
        with_hole[0, 1] = 0  # is not packed, so that it compiles what is recorded
        states(bf16, ids, attention_mask=with_hole)
        return row("bf16", replayable(lambda: states(bf16, ids, attention_mask=mask), device))

    def in_kind(kind: quantized.Kind) -> Row:
        model = copy.deepcopy(bf16)
        layers = quantized.convert(model.encoder, kind=kind)
        most = ROUNDED[kind] * math.sqrt(len(layers))  # errors of layers are independent, and add in quadrature
        return checked_row(lambda: states(model, ids, attention_mask=mask), device, true, most, tokens)

    return {
        **{name: functools.partial(in_half, name) for name in HALVES},
        COMPUTED: computed,
        ONE_ROW: one_row,
        ALONE: alone,
        "bf16" + GRAPH: graph,
        **{kind: functools.partial(in_kind, kind) for kind in ROUNDED},
    }


def document(case: Case, device: torch.device) -> Calls:
    """The vectors of a long document's chunks (`late_chunking.py`), compared with fp32, and the memory of a pass."""
    from alibi_attn.hf.embedding.late_chunking import Windows, computed
    from alibi_lab.measure.long_document import random_document

    ours, exact, _ = _encoders(case, device, dense=case.length <= LONGEST_DENSE)
    papers = {
        length: random_document(length, min(CHUNK, length), ours.config.vocab_size)
        for length in (case.length, case.length // GROWTH)
    }

    def vectors(model: Any, length: int = case.length) -> Tensor:
        ((_, (found,)),) = computed(model, [papers[length]], Windows(), batch_tokens=length, normalize=False)
        return torch.from_numpy(found)

    def peak(model: Any, length: int) -> int:
        before = torch.cuda.memory_allocated(device)
        reset_peak_memory(device)
        vectors(model, length)
        return (peak_memory_bytes(device) or 0) - before

    paper = papers[case.length]
    if case.length <= LONGEST_DENSE:
        ids = torch.from_numpy(paper.ids).long()[None].to(device)
        with torch.no_grad():
            states = exact(ids, torch.ones_like(ids))[0].float()
        true = torch.stack([states[start:end].mean(0) for start, end in paper.tokens.tolist()]).cpu()
    else:
        true = vectors(ours)
    half = copy.deepcopy(ours).to(torch.bfloat16)

    def row() -> Row:
        found = judged(relative_error(vectors(half), true), MOST_ERROR)
        if device.type == "cuda":
            whole, part = (peak(half, length) for length in papers)
            found["peak_bytes"] = whole
            if whole > 1.1 * GROWTH * part:
                found |= {"right": False, "why_not": f"memory is not linear: {whole:,} bytes, {part:,} for 1/{GROWTH}"}
        return found | call_row(lambda: vectors(half), device) if found["right"] else found

    return {"bf16": row}


def texts(case: Case, device: torch.device) -> Calls:
    """Strings to vectors, through the folder of a model, compared with dense attention in fp32."""
    from alibi_attn.hf.embedding import sentence_encoder
    from alibi_attn.hf.embedding.late_chunking import Windows, computed, prepared

    width = case.heads * case.head_dim
    generator = random.Random(0)
    strings = [" ".join(generator.choices("abcdefgh", k=case.length // count)) for count in range(1, case.batch + 1)]

    def vectors(sentences: sentence_encoder.Sentences) -> Tensor:
        documents = prepared(sentences, strings, case.length, Windows())
        found = dict[int, Any]()
        for indices, rows in computed(
            sentences.model, documents, Windows(), batch_tokens=2 * case.length, normalize=False
        ):
            found |= dict(zip(indices, rows, strict=True))
        return torch.cat([torch.from_numpy(found[at]) for at in range(len(strings))])

    def of_folder(dtype: str, folder: Path, true: Tensor) -> Row:
        place = device.type if dtype in ROUNDED else None
        sentences = sentence_encoder.load(folder, dtype=dtype, device=place)
        sentences.model.to(device)  # type: ignore[arg-type]
        most = 2 * ROUNDED[dtype] * math.sqrt(4 * TEXT_LAYERS) if dtype in ROUNDED else MOST_ERROR
        row = judged(relative_error(vectors(sentences), true), most)
        return row | call_row(lambda: vectors(sentences), device) if row["right"] else row

    def of_sentence_transformer(folder: Path, true: Tensor) -> Row:
        from alibi_attn.hf import late_chunks, sentence_transformer

        model = sentence_transformer(folder, dtype=torch.bfloat16, device=device.type)
        [chunks] = late_chunks(model, strings[:1], chunks=case.length)
        found = torch.cat((torch.from_numpy(model.encode(strings)), torch.from_numpy(chunks.vectors)))
        row = judged(relative_error(found, torch.cat((true, true[:1]))), MOST_ERROR)
        return row | call_row(lambda: model.encode(strings), device) if row["right"] else row

    def in_folder(row: Callable[[Path, Tensor], Row]) -> Row:
        with tempfile.TemporaryDirectory() as place:
            write_folder(Path(place), width, case.heads)
            exact = sentence_encoder.load(place, dtype="float32")
            for module in exact.model.to(device).modules():  # type: ignore[arg-type]
                if hasattr(module, "attend"):
                    module.backend = "dense"
            return row(Path(place), vectors(exact))

    peers: dict[str, Callable[[Path, Tensor], Row]] = {
        "bf16": functools.partial(of_folder, "bfloat16"),
        **{kind: functools.partial(of_folder, kind) for kind in ROUNDED},
        "sentence_transformer": of_sentence_transformer,
    }
    return {name: functools.partial(in_folder, row) for name, row in peers.items()}


def write_folder(folder: Path, width: int, heads: int) -> None:
    """An encoder with random weights and a tokenizer whose words are letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from alibi_lab.measure.embedding_peers import our_encoder
    from alibi_lab.measure.peers.dense_encoder import Sizes

    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(("[PAD]", "[UNK]", *"abcdefgh"))}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    our_encoder(Sizes(TEXT_LAYERS, width, heads, 4 * width, 16)).save_pretrained(folder)


def _encoders(case: Case, device: torch.device, *, dense: bool = True) -> tuple[Any, Any, Tensor]:
    """(ours in fp32, the dense one with its weights, token ids [B, T])."""
    from alibi_lab.measure.embedding_peers import our_encoder
    from alibi_lab.measure.peers.dense_encoder import DenseEncoder, Sizes

    width = case.heads * case.head_dim
    sizes = Sizes(ENCODER_LAYERS[device.type], width, case.heads, 4 * width, 30528 if device.type == "cuda" else 100)
    with device:
        ours = our_encoder(sizes)
        exact = DenseEncoder(sizes, case.length, eager=False).eval() if dense else None
    if exact is not None:
        exact.take(ours.state_dict())
    generator = torch.Generator(device).manual_seed(0)
    return (
        ours,
        exact,
        torch.randint(1, sizes.vocabulary, (case.batch, case.length), generator=generator, device=device),
    )


_KINDS: dict[str, str] = {kind: f"linear layers in {kind}, the rest in bf16" for kind in ROUNDED}
MIXED = Part(
    "encoder-mixed",
    12.0,
    {
        **{name: f"ALiBiBertModel in {name} with the mask" for name in HALVES},
        COMPUTED: "the same without a mask, so that padding is computed",
        ONE_ROW: "the same texts in one row with segment_ids",
        ALONE: "a call per text",
        "bf16" + GRAPH: "with the mask, replayed by a CUDA graph",
        **_KINDS,
    },
    {"full": (Case(32, 512, 12, 64), Case(8, 2048, 12, 64)), "smoke": (Case(3, 70, 2, 16),)},
    mixed,
)
DOCUMENT = Part(
    "encoder-document",
    7.0,
    {"bf16": "the vectors of late chunks of one document"},
    {"full": (Case(1, 8192, 12, 64), Case(1, 100_000, 12, 64)), "smoke": (Case(1, 80, 2, 16),)},
    document,
    (*COLUMNS, "peak_bytes"),
)
TEXTS = Part(
    "encoder-texts",
    5.0,
    {"bf16": "a folder's tokenizer and model", **_KINDS, "sentence_transformer": "encode and late_chunks, in bf16"},
    {"full": (Case(8, 2048, 12, 64),), "smoke": (Case(3, 40, 2, 16),)},
    texts,
)
