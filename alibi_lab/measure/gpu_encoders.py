"""Encoders on one GPU: texts of several lengths in every dtype, one long document, and texts as strings.

Hidden states are compared with those of the dense encoder in fp32. Read next: `gpu_linears.py`.
"""

import copy
import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from alibi_attn.nn import quantized
from alibi_attn.nn.allocator import peak_memory_bytes, reset_peak_memory
from alibi_lab.measure.gpu_networks import ENCODER_LAYERS, TRANSFORMERS, allowed_error, checked_row, relative_error
from alibi_lab.measure.gpu_parts import COLUMNS, GRAPH, Calls, Case, Part, call_row, judged
from alibi_lab.measure.gpu_steps import padding
from alibi_lab.measure.harness import Row
from alibi_lab.measure.timing import replayable

if TYPE_CHECKING:
    from alibi_lab.measure.peers.dense_encoder import Sizes

Judge = Callable[[Tensor, str], Row]  # of vectors, by the error of dense attention in a dtype
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KINDS: tuple[quantized.Kind, ...] = ("int8", "float8")
LONGEST_DENSE = 8192
CHUNK = 256  # tokens
TEXT_LAYERS = 2
ALL = ("",)  # every peer is ours
GROWTH = 4  # the memory of a document is compared with that of one of this share of its length
ALONE, COMPUTED, ONE_ROW = "bf16, each text alone", "bf16, padding computed", "bf16, one row"


def mixed(case: Case, device: torch.device) -> Calls:
    """A batch of texts of several lengths."""
    exact, ids, shown = _dense(case, device), _tokens(case, device), padding(case, device)
    mask, lengths = shown.long(), shown.sum(1).tolist()
    with torch.no_grad():
        true = exact(ids, mask)[shown]

    @functools.cache
    def plain(name: str) -> float:
        model = copy.deepcopy(exact).to(HALVES.get(name, torch.bfloat16))
        if name not in HALVES:
            quantized.convert(model, kind=name)  # type: ignore[arg-type]
        with torch.no_grad():
            return relative_error(model(ids, mask)[shown], true)

    def states(name: str, given: Tensor, **options: Tensor) -> Tensor:
        with torch.no_grad():
            hidden: Tensor = _ours(name, case.heads, case.head_dim, device)(given, **options).last_hidden_state
            return hidden

    def tokens(output: Tensor) -> Tensor:
        return output[shown]

    def row(name: str, call: Callable[[], Tensor], compared: Callable[[Tensor], Tensor] = tokens) -> Row:
        return checked_row(call, device, true, plain(name), compared)

    def masked(name: str) -> Row:
        return row(name, lambda: states(name, ids, attention_mask=mask))

    def alone() -> Row:
        texts = [text[None, :length] for text, length in zip(ids, lengths, strict=True)]
        return row("bf16", lambda: torch.cat([states("bf16", text)[0] for text in texts]), lambda output: output)

    def one_row() -> Row:
        text, segments = ids[shown][None], shown.nonzero()[None, :, 0]
        return row("bf16", lambda: states("bf16", text, segment_ids=segments), lambda output: output[0])

    def computed() -> Row:
        first = lengths[0]
        return checked_row(
            lambda: states("bf16", ids), device, true[:first], plain("bf16"), lambda output: output[0, :first]
        )

    def graph() -> Row:
        with_hole = mask.clone()
        with_hole[0, 1] = 0  # is not packed, so that it compiles what is recorded
        states("bf16", ids, attention_mask=with_hole)
        return row("bf16", replayable(lambda: states("bf16", ids, attention_mask=mask), device))

    return {
        "bf16": functools.partial(masked, "bf16"),
        ALONE: alone,
        COMPUTED: computed,
        "bf16" + GRAPH: graph,
        **{kind: functools.partial(masked, kind) for kind in KINDS},
        "fp16": functools.partial(masked, "fp16"),
        ONE_ROW: one_row,
    }


def document(case: Case, device: torch.device) -> Calls:
    """The vectors of a long document's chunks (`late_chunking.py`), compared with fp32, and the memory of a pass.

    The dense encoder reads the first LONGEST_DENSE tokens: a longer document is compared with ours in fp32, and twice the error
    of the dense encoder in bf16 at these tokens is allowed.
    """
    from alibi_attn.hf.embedding.late_chunking import Windows, computed
    from alibi_lab.measure.long_document import random_document

    lengths = case.length, case.length // GROWTH, min(case.length, LONGEST_DENSE)
    model = functools.partial(_ours, heads=case.heads, head_dim=case.head_dim, device=device)
    papers = {
        length: random_document(length, min(CHUNK, length), model("fp32").config.vocab_size) for length in lengths
    }

    def vectors(name: str, length: int = case.length) -> Tensor:
        ((_, (found,)),) = computed(model(name), [papers[length]], Windows(), batch_tokens=length, normalize=False)
        return torch.from_numpy(found)

    def of_dense(encoder: nn.Module) -> Tensor:
        paper = papers[lengths[-1]]
        ids = torch.from_numpy(paper.ids).long()[None].to(device)
        with torch.no_grad():
            states = encoder(ids, torch.ones_like(ids))[0].float()
        return torch.stack([states[start:end].mean(0) for start, end in paper.tokens.tolist()]).cpu()

    def peak(length: int) -> int:
        before = torch.cuda.memory_allocated(device)
        reset_peak_memory(device)
        vectors("bf16", length)
        return (peak_memory_bytes(device) or 0) - before

    exact = _dense(case._replace(length=lengths[-1]), device)
    first = of_dense(exact)
    allowed = allowed_error(relative_error(of_dense(exact.to(torch.bfloat16)), first), torch.bfloat16)
    del exact
    true = first if case.length <= LONGEST_DENSE else vectors("fp32")

    def row() -> Row:
        found = judged(relative_error(vectors("bf16"), true), allowed)
        if device.type == "cuda":
            whole, part = (peak(length) for length in lengths[:2])
            found["peak_bytes"] = whole
            if whole > 1.1 * GROWTH * part:
                found |= {"right": False, "why_not": f"memory is not linear: {whole:,} bytes, {part:,} for 1/{GROWTH}"}
        return found | call_row(lambda: vectors("bf16"), device) if found["right"] else found

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

    def loaded(dtype: str, folder: Path, backend: str = "auto") -> sentence_encoder.Sentences:
        sentences = sentence_encoder.load(folder, dtype=dtype, device=device.type if dtype in KINDS else None)
        for module in sentences.model.to(device).modules():  # type: ignore[arg-type]
            if hasattr(module, "attend"):
                module.backend = backend
        return sentences

    def of_folder(dtype: str, folder: Path, judge: Judge) -> Row:
        sentences = loaded(dtype, folder)
        row = judge(vectors(sentences), dtype)
        return row | call_row(lambda: vectors(sentences), device) if row["right"] else row

    def of_sentence_transformer(folder: Path, judge: Judge) -> Row:
        from alibi_attn.hf import late_chunks, sentence_transformer

        model = sentence_transformer(folder, dtype=torch.bfloat16, device=device.type)
        [chunks] = late_chunks(model, strings[:1], chunks=case.length)
        found = torch.cat((torch.from_numpy(model.encode(strings)), torch.from_numpy(chunks.vectors)))
        row = judge(found, "bfloat16")
        return row | call_row(lambda: model.encode(strings), device) if row["right"] else row

    def in_folder(row: Callable[[Path, Judge], Row]) -> Row:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write_folder(folder, width, case.heads, device)
            true = vectors(loaded("float32", folder, "dense"))

            def judge(found: Tensor, dtype: str) -> Row:
                plain = relative_error(vectors(loaded(dtype, folder, "dense")), true)
                rows = torch.cat((true, true[:1]))[: len(found)]
                return judged(relative_error(found, rows), allowed_error(plain, torch.bfloat16))

            return row(folder, judge)

    peers: dict[str, Callable[[Path, Judge], Row]] = {
        "bf16": functools.partial(of_folder, "bfloat16"),
        **{kind: functools.partial(of_folder, kind) for kind in KINDS},
        "sentence_transformer": of_sentence_transformer,
    }
    return {name: functools.partial(in_folder, row) for name, row in peers.items()}


def write_folder(folder: Path, width: int, heads: int, device: torch.device) -> None:
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
    with device:
        model = our_encoder(Sizes(TEXT_LAYERS, width, heads, 4 * width, 16))
    model.save_pretrained(folder)


@functools.lru_cache(maxsize=8)
def _ours(name: str, heads: int, head_dim: int, device: torch.device) -> Any:
    """Ours with the same random weights in "fp32", a half, or a kind; all parts and cases share it."""
    from alibi_lab.measure.embedding_peers import our_encoder

    if name == "fp32":
        with device:
            return our_encoder(_sizes(heads, head_dim, device))
    model = copy.deepcopy(_ours("fp32", heads, head_dim, device)).to(HALVES.get(name, torch.bfloat16))
    if name not in HALVES:
        quantized.convert(model.encoder, kind=name)  # type: ignore[arg-type]
    return model


def _dense(case: Case, device: torch.device) -> nn.Module:
    """The dense encoder in fp32 with the weights of our encoder."""
    from alibi_lab.measure.peers.dense_encoder import DenseEncoder

    with device:
        exact = DenseEncoder(_sizes(case.heads, case.head_dim, device), case.length, eager=False).eval()
    exact.take(_ours("fp32", case.heads, case.head_dim, device).state_dict())
    return exact


def _sizes(heads: int, head_dim: int, device: torch.device) -> "Sizes":
    from alibi_lab.measure.peers.dense_encoder import Sizes

    width = heads * head_dim
    return Sizes(ENCODER_LAYERS[device.type], width, heads, 4 * width, 30528 if device.type == "cuda" else 100)


def _tokens(case: Case, device: torch.device) -> Tensor:
    """[B, T]."""
    generator, words = torch.Generator(device).manual_seed(0), _sizes(case.heads, case.head_dim, device).vocabulary
    return torch.randint(1, words, (case.batch, case.length), generator=generator, device=device)


_KINDS: dict[str, str] = {kind: f"linear layers in {kind}, the rest in bf16" for kind in KINDS}
MIXED = Part(
    "encoder-mixed",
    14.0,
    {
        "bf16": "ALiBiBertModel in bf16 with the mask",
        ALONE: "a call per text",
        COMPUTED: "the same without a mask, so that padding is computed",
        "bf16" + GRAPH: "with the mask, replayed by a CUDA graph",
        **_KINDS,
        "fp16": "ALiBiBertModel in fp16 with the mask",
        ONE_ROW: "the same texts in one row with segment_ids",
    },
    {"full": (Case(32, 512, 12, 64), Case(8, 2048, 12, 64)), "smoke": (Case(3, 70, 2, 16),)},
    mixed,
    ours=ALL,
    imports=TRANSFORMERS,
)
DOCUMENT = Part(
    "encoder-document",
    8.0,
    {"bf16": "the vectors of late chunks of one document"},
    {"full": (Case(1, 8192, 12, 64), Case(1, 100_000, 12, 64)), "smoke": (Case(1, 80, 2, 16),)},
    document,
    (*COLUMNS, "peak_bytes"),
    ours=ALL,
    imports=TRANSFORMERS,
)
TEXTS = Part(
    "encoder-texts",
    5.0,
    {"bf16": "a folder's tokenizer and model", **_KINDS, "sentence_transformer": "encode and late_chunks, in bf16"},
    {"full": (Case(8, 2048, 12, 64),), "smoke": (Case(3, 40, 2, 16),)},
    texts,
    ours=ALL,
    imports=(*TRANSFORMERS, "sentence_transformers"),
)
