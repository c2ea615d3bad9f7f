"""Converts the lab's tokenizers to the format of the `tokenizers` library, which transformers loads."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from alibi_attn.strict_json import JsonError, parse

SCHEMA = 1  # of the lab's file
_END_OF_LINE, _UNKNOWN = "<eos>", "<unk>"
_ADVICE = "pass the file that the lab saved next to its checkpoints"


def byte_tokenizer() -> Tokenizer:
    """The tokenizer whose token b is the byte b of UTF-8 text.

    >>> byte_tokenizer().encode("añ").ids
    [97, 195, 177]
    """
    vocabulary = {word: byte for byte, word in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def saved_tokenizer(content: bytes) -> Tokenizer:
    """The tokenizer in a file that the lab saved next to a checkpoint: "bytes", "words" or "bpe:SIZE".

    It encodes like the lab's tokenizer. Decoded words are separated by one space, and the end of a line is decoded as
    its token.

    Raises:
        ValueError: another schema, or not a tokenizer file.
    """
    try:
        about = parse(content)
    except JsonError as error:
        raise ValueError(f"this is not a tokenizer file of the lab ({error}); {_ADVICE}") from None
    if not isinstance(about, dict) or not {"tokenizer", "schema"} <= set(about):
        raise ValueError(f"this is not a tokenizer file of the lab (it names no tokenizer); {_ADVICE}")
    kind, schema = str(about["tokenizer"]), about["schema"]
    if schema != SCHEMA:
        raise ValueError(
            f"the tokenizer has schema {schema} but this version reads {SCHEMA}; use the one that wrote it"
        )
    if kind == "bytes":
        return byte_tokenizer()
    words, model = about.get("words"), about.get("model")
    if kind == "words" and isinstance(words, list) and all(isinstance(word, str) for word in words):
        tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=_UNKNOWN))
        tokenizer.normalizer = normalizers.Replace("\n", f" {_END_OF_LINE} ")
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return tokenizer
    if not isinstance(model, str):
        raise ValueError(f"the tokenizer {kind!r} has no vocabulary; {_ADVICE}")
    tokenizer = Tokenizer.from_str(model)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
