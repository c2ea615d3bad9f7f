"""`read`: passes a long text through a model, in chunks, into a cache. With a cache in files it can be resumed.

A chunk attends only to the cached keys within reach, so the time per token does not grow with the text. With a cache in
files, memory stays bounded too.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from alibi_attn.hf.caches.cache import ALiBiCache

_CHUNK = 1024  # tokens per forward pass
_LOGITS = 1 << 26  # numbers of logits in memory at once, if losses are computed


@torch.no_grad()
def read(
    model: nn.Module,
    tokens: Tensor,
    cache: ALiBiCache,
    *,
    progress: Callable[[int, int], None] | None = None,
    losses: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Adds to the cache the tokens that it does not hold yet; returns the logits after the last token, [B, V].

    Each token sees all tokens before it. After an interruption (Ctrl-C, an error, a killed process with a cache in a file), call
    again with the same arguments to continue. To generate, call `cache.crop(-1)` and `model.generate(tokens,
    past_key_values=cache)`: transformers needs one token that is not cached yet.

    Args:
        model: a patched model, or one of our models, with a language model head, in evaluation mode.
        tokens: [B, S] int64, the whole text, without padding; the cache may hold its first tokens.
        cache: empty, or filled by an earlier `read` or `generate`.
        progress: called after each chunk with (tokens in the cache, S).
        losses: called after each chunk with the losses in nats, [B, n] float32, of the tokens that follow those of the
            chunk; all calls together cover tokens 1 … S − 1. A text that is partly cached resumes after the tokens in
            the cache; crop the cache first if you need their losses.

    Raises:
        ValueError: the cache holds another text or more tokens, belongs to other weights, or the model is in training mode.

    >>> from transformers import BloomConfig, BloomForCausalLM
    >>> from alibi_attn.hf import patch
    >>> model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=50)).eval()
    >>> handle, cache = patch(model), ALiBiCache()
    >>> read(model, torch.ones(1, 3000, dtype=torch.int64), cache).shape, cache.get_seq_length()
    (torch.Size([1, 50]), 3000)
    """
    check(model, tokens, cache)
    length = tokens.shape[1]
    vocabulary = model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
    chunk = _CHUNK if losses is None else max(16, min(_CHUNK, _LOGITS // (tokens.shape[0] * vocabulary)))
    if cache.get_seq_length() == length:
        cache.crop(-1)  # the logits after the last token need one forward pass
    while (start := cache.get_seq_length()) < length:
        stop = min(start + chunk, length)
        keep = {} if losses is not None else {"logits_to_keep": 1}
        try:
            logits = model(tokens[:, start:stop], past_key_values=cache, use_cache=True, **keep).logits
        except BaseException:
            cache.level()
            raise
        if losses is not None and start + 1 < length:
            targets = tokens[:, start + 1 : stop + 1].long()
            scores = logits[:, : targets.shape[1]].float().transpose(1, 2)
            losses(nn.functional.cross_entropy(scores, targets, reduction="none"))
        if progress is not None:
            progress(stop, length)
    return logits[:, -1]


def check(model: nn.Module, tokens: Tensor, cache: ALiBiCache, *, compared: int | None = None) -> None:
    """Raises what `read` raises, and changes no cached token.

    Args:
        compared: the caller drops the tokens after this number of cached ones, so they may be those of another text.
    """
    if not isinstance(cache, ALiBiCache):
        raise TypeError(f"cache is a {type(cache).__name__} but must be an ALiBiCache")
    if tokens.ndim != 2 or tokens.shape[1] == 0 or tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"tokens are {list(tokens.shape)} {tokens.dtype} but must be token ids [B, S], int64, with S ≥ 1 and no padding"
        )
    known = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if int(tokens.min()) < 0 or int(tokens.max()) >= known:
        raise ValueError(
            f"tokens has ids from {int(tokens.min())} to {int(tokens.max())} but the model has {known}, 0 and up; use its own "
            "tokenizer"
        )
    if model.training:
        raise ValueError("the model is in training mode, where dropout changes what it reads; call model.eval()")
    cache.level()
    length = cache.get_seq_length()
    if length > tokens.shape[1]:
        raise ValueError(
            f"the cache holds {length} tokens but the text has {tokens.shape[1]}; crop the cache, or pass the whole text"
        )
    if length:
        cache.check_model(model.base_model)  # type: ignore[arg-type]
        held = cache.tokens()
        if held is None:
            raise ValueError(
                "the token ids in this cache are unknown (filled from embeddings, copied, reordered or changed), so it cannot be "
                "compared with the text; pass a new ALiBiCache()"
            )
        known = slice(length if compared is None else compared)
        if held.shape[0] != tokens.shape[0] or not torch.equal(
            held[:, known], tokens[:, :length][:, known].cpu().long()
        ):
            raise ValueError(
                "the cache holds another text; pass the text that it was filled with, or a new ALiBiCache()"
            )
