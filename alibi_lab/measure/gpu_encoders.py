"""Encoders on one GPU: short texts and a long one, texts of several lengths in every dtype, a document, and texts as strings.

Hidden states are compared with those of the dense encoder in fp32. Read next: `gpu_linears.py`.
"""

import copy
import functools
import random
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alibi_attn.nn import quantized
from alibi_lab.measure.gpu_networks import TRANSFORMERS
from alibi_lab.measure.gpu_parts import COLUMNS, GRAPH, Calls, Case, Part, call_row, cases, checked_row
from alibi_lab.measure.gpu_steps import padding
from alibi_lab.measure.gpu_truth import allowed_error, judged, relative_error
from alibi_lab.measure.harness import Row
from alibi_lab.measure.peers.dense_encoder import DenseEncoder, Sizes
from alibi_lab.measure.timing import replayable

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS: tuple[quantized.Kind, ...] = ("int8", "float8")
LAYERS = {"cpu": 1, "cuda": 12}
LONGEST_DENSE = 8192
CHUNK = 256  # tokens
TEXT_LAYERS = 2
ALL = ("",)  # every peer is ours
GROWTH = 4  # the memory of a document is compared with that of one of this share of its length
DENSE = "SDPA + dense bias"
ALONE, COMPUTED, ONE_ROW = "bf16, each text alone", "bf16, padding computed", "bf16, one row"


def encoder(case: Case, device: torch.device) -> Calls:
    """A forward pass over texts of several lengths, compared with the dense encoder in fp32, and one without padding."""
    exact, ids = _dense(case, device), _tokens(case, device)
    shown = padding(case, device) if case.batch > 1 else torch.ones_like(ids, dtype=torch.bool)
    mask, last = shown.long(), shown[-1:]
    true = exact(ids[-1:], mask[-1:])[last]
    precision = "bf16" if device.type == "cuda" else "fp32"
    dense, ours = exact.to(FLOATS[precision]), _ours(precision, case.heads, case.head_dim, device)
    plain = relative_error(dense(ids[-1:], mask[-1:])[last], true)

    def row(call: Callable[[], Tensor], *, graph: bool = False) -> Row:
        run = replayable(call, device) if graph else call
        return checked_row(run, device, true, plain, lambda output: output[-1:][last])

    calls: Calls = {
        "ours": functools.partial(row, lambda: ours(ids, mask).last_hidden_state),
        DENSE: functools.partial(row, lambda: dense(ids, mask)),
    }
    if bool(shown.all()):
        calls["ours" + GRAPH] = functools.partial(row, lambda: ours(ids).last_hidden_state, graph=True)
    return calls


def mixed(case: Case, device: torch.device) -> Calls:
    """A batch of texts of several lengths."""
    exact, ids, shown = _dense(case, device), _tokens(case, device), padding(case, device)
    mask, lengths = shown.long(), shown.sum(1).tolist()
    first = lengths[0]
    true = exact(ids, mask)[shown]

    @functools.cache
    def plain(name: str) -> float:
        model = copy.deepcopy(exact).to(FLOATS.get(name, torch.bfloat16))
        if name not in FLOATS:
            quantized.convert(model, kind=name)  # type: ignore[arg-type]
        return relative_error(model(ids, mask)[shown], true)

    def states(name: str, given: Tensor, **options: Tensor) -> Tensor:
        return _ours(name, case.heads, case.head_dim, device)(given, **options).last_hidden_state

    def row(
        name: str,
        call: Callable[[], Tensor],
        compared: Callable[[Tensor], Tensor] = lambda output: output[shown],
        tokens: int | None = None,
    ) -> Row:
        return checked_row(call, device, true[:tokens], plain(name), compared)

    masked = {name: functools.partial(states, name, ids, attention_mask=mask) for name in ("bf16", "fp16", *KINDS)}
    texts = [text[None, :length] for text, length in zip(ids, lengths, strict=True)]
    joined, segments = ids[shown][None], shown.nonzero()[None, :, 0]

    def alone() -> Tensor:
        return torch.cat([states("bf16", text)[0] for text in texts])

    def graph() -> Row:
        with_hole = mask.clone()
        with_hole[0, 1] = 0  # is not packed, so that it compiles what is recorded
        states("bf16", ids, attention_mask=with_hole)
        return row("bf16", replayable(masked["bf16"], device))

    return {
        "bf16": functools.partial(row, "bf16", masked["bf16"]),
        ALONE: functools.partial(row, "bf16", alone, lambda output: output),
        COMPUTED: functools.partial(row, "bf16", lambda: states("bf16", ids), lambda output: output[0, :first], first),
        "bf16" + GRAPH: graph,
        **{name: functools.partial(row, name, masked[name]) for name in (*KINDS, "fp16")},
        ONE_ROW: functools.partial(
            row, "bf16", lambda: states("bf16", joined, segment_ids=segments), lambda output: output[0]
        ),
    }


def document(case: Case, device: torch.device) -> Calls:
    """The vectors of a long document's chunks (`late_chunking.py`), compared with fp32, and the memory of a pass.

    The dense encoder reads the first LONGEST_DENSE tokens: a longer document is compared with ours in fp32, and twice the error
    of the dense encoder in bf16 at these tokens is allowed.
    """
    from alibi_attn.hf.embedding.late_chunking import Windows, vectors_of
    from alibi_lab.measure.long_document import random_document

    lengths = case.length, case.length // GROWTH, min(case.length, LONGEST_DENSE)
    model = functools.partial(_ours, heads=case.heads, head_dim=case.head_dim, device=device)
    words = model("fp32").config.vocab_size
    papers = {length: random_document(length, min(CHUNK, length), words) for length in lengths}

    def vectors(name: str, length: int = case.length) -> Tensor:
        (found,) = vectors_of(model(name), [papers[length]], Windows(), batch_tokens=length, normalize=False)
        return torch.from_numpy(found)

    def of_dense(encoder: nn.Module) -> Tensor:
        paper = papers[lengths[-1]]
        ids = torch.from_numpy(paper.ids).long()[None].to(device)
        states = encoder(ids, torch.ones_like(ids))[0].float()
        return torch.stack([states[start:end].mean(0) for start, end in paper.tokens.tolist()]).cpu()

    def peak(length: int) -> int:
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        vectors("bf16", length)
        return torch.cuda.max_memory_allocated(device) - before

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
        return call_row(found, lambda: vectors("bf16"), device)

    return {"bf16": row}


def texts(case: Case, device: torch.device) -> Calls:
    """Strings to vectors, through the folder of a model, compared with dense attention in fp32."""
    from alibi_attn.hf import late_chunks, sentence_transformer
    from alibi_attn.hf.embedding import late_chunking, sentence_encoder

    generator, windows = random.Random(0), late_chunking.Windows()
    strings = [" ".join(generator.choices("abcdefgh", k=case.length // count)) for count in range(1, case.batch + 1)]
    folder = Path(tempfile.mkdtemp())

    def reading(dtype: str, backend: str = "auto") -> Callable[[], Tensor]:
        """The model of the folder as a call that returns the vectors of all strings."""
        sentences = sentence_encoder.load(folder, dtype=dtype, device=device.type if dtype in KINDS else None)
        for module in sentences.model.to(device).modules():  # type: ignore[arg-type]
            if hasattr(module, "attend"):
                module.backend = backend

        def vectors() -> Tensor:
            documents = late_chunking.prepared(sentences, strings, case.length, windows)
            tokens = 2 * case.length
            found = late_chunking.vectors_of(sentences.model, documents, windows, batch_tokens=tokens, normalize=False)
            return torch.cat([torch.from_numpy(rows) for rows in found])

        return vectors

    weakref.finalize(reading, shutil.rmtree, folder)  # together with the last call that reads it
    write_folder(folder, case.heads * case.head_dim, case.heads, device)
    true = reading("float32", "dense")()

    def row(found: Tensor, dtype: str, call: Callable[[], object]) -> Row:
        plain = relative_error(reading(dtype, "dense")(), true)
        rows = torch.cat((true, true[:1]))[: len(found)]
        return call_row(judged(relative_error(found, rows), allowed_error(plain, torch.bfloat16)), call, device)

    def of_folder(dtype: str) -> Row:
        vectors = reading(dtype)
        return row(vectors(), dtype, vectors)

    def of_sentence_transformer() -> Row:
        model = sentence_transformer(folder, dtype=torch.bfloat16, device=device.type)
        [chunks] = late_chunks(model, strings[:1], chunks=case.length)
        found = torch.cat((torch.from_numpy(model.encode(strings)), torch.from_numpy(chunks.vectors)))
        return row(found, "bfloat16", lambda: model.encode(strings))

    dtypes: dict[str, str] = {"bf16": "bfloat16", **{kind: kind for kind in KINDS}}
    rows: Calls = {name: functools.partial(of_folder, dtype) for name, dtype in dtypes.items()}
    return {**rows, "sentence_transformer": of_sentence_transformer}


def write_folder(folder: Path, width: int, heads: int, device: torch.device) -> None:
    """An encoder with random weights and a tokenizer whose words are letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from alibi_lab.measure.embedding_peers import our_encoder

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
    model = copy.deepcopy(_ours("fp32", heads, head_dim, device)).to(FLOATS.get(name, torch.bfloat16))
    if name not in FLOATS:
        quantized.convert(model.encoder, kind=name)  # type: ignore[arg-type]
    return model


def _dense(case: Case, device: torch.device) -> nn.Module:
    """The dense encoder in fp32 with the weights of our encoder."""
    with device:
        exact = DenseEncoder(_sizes(case.heads, case.head_dim, device), case.length, eager=False).eval()
    exact.take(_ours("fp32", case.heads, case.head_dim, device).state_dict())
    return exact


def _sizes(heads: int, head_dim: int, device: torch.device) -> Sizes:
    width = heads * head_dim
    return Sizes(LAYERS[device.type], width, heads, 4 * width, 30528 if device.type == "cuda" else 100)


def _tokens(case: Case, device: torch.device) -> Tensor:
    """[B, T]."""
    generator, words = torch.Generator(device).manual_seed(0), _sizes(case.heads, case.head_dim, device).vocabulary
    return torch.randint(1, words, (case.batch, case.length), generator=generator, device=device)


OF_KINDS: dict[str, str] = {kind: f"linear layers in {kind}, the rest in bf16" for kind in KINDS}
NOTES = {
    "ours": "ALiBiBertModel with the mask",
    DENSE: "the same weights, scaled_dot_product_attention with bias and mask as attn_mask",
    "ours" + GRAPH: "ALiBiBertModel without a mask, replayed by a CUDA graph; only where no text is padded",
}
MIXED_NOTES = {
    "bf16": "ALiBiBertModel in bf16 with the mask",
    ALONE: "a call per text",
    COMPUTED: "the same without a mask, so that padding is computed",
    "bf16" + GRAPH: "with the mask, replayed by a CUDA graph",
    **OF_KINDS,
    "fp16": "ALiBiBertModel in fp16 with the mask",
    ONE_ROW: "the same texts in one row with segment_ids",
}
DOCUMENT_NOTES = {"bf16": "the vectors of late chunks of one document"}
TEXTS_NOTES = {"bf16": "a folder's tokenizer and model", **OF_KINDS}
TEXTS_NOTES["sentence_transformer"] = "encode and late_chunks, in bf16"
SHORT_AND_LONG = cases("32x512x12x64 1x8192x12x64", "2x70x2x16 1x70x2x16")
SHORT = cases("32x512x12x64 8x2048x12x64", "3x70x2x16")
LONG = cases("1x8192x12x64 1x100000x12x64", "1x80x2x16")
STRINGS = cases("8x2048x12x64", "3x40x2x16")
OF_TEXTS = (*TRANSFORMERS, "sentence_transformers")
ENCODER = Part("encoder", 15.0, NOTES, SHORT_AND_LONG, encoder, imports=TRANSFORMERS)
MIXED = Part("encoder-mixed", 14.0, MIXED_NOTES, SHORT, mixed, ours=ALL, imports=TRANSFORMERS)
DOCUMENT = Part("encoder-document", 8.0, DOCUMENT_NOTES, LONG, document, (*COLUMNS, "peak_bytes"), ALL, TRANSFORMERS)
TEXTS = Part("encoder-texts", 5.0, TEXTS_NOTES, STRINGS, texts, ours=ALL, imports=OF_TEXTS)
