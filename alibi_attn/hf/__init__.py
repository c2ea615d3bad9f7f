"""ALiBi for `transformers`: `patch` for its own models (BLOOM, MPT, Falcon with alibi=True, T5, mT5, UMT5), a decoder
(Baichuan-13B, BTLM, Jais, Replit, MPT, Refact, FoX, Step-1) and encoders (MosaicBERT, DNABERT-2, Jina v2, Jina v2 code, Jina
CLIP v1's text tower) that need no remote code, and checkpoint conversion.

The folders, each of which imports only those before it: `caches/`, `attention/`, `readers/` (families, encoders, decoder,
checkpoints), `patching/`, `embedding/`. Read `patching/patching.py` first, then one file of `readers/families/`.
`docs/hf.md`, `docs/encoders.md` and `docs/decoders.md` are the user guides.
"""

try:
    from alibi_attn.hf.caches.cache import ALiBiCache
    from alibi_attn.hf.embedding.late_chunking import LateChunks, late_chunks
    from alibi_attn.hf.embedding.sentence_encoder import sentence_transformer
    from alibi_attn.hf.patching.capture_qk import record_attention
    from alibi_attn.hf.patching.patching import Patch, patch
    from alibi_attn.hf.patching.reading import read
    from alibi_attn.hf.patching.surgery import to_alibi
    from alibi_attn.hf.readers.decoder.model import ALiBiForCausalLM
    from alibi_attn.hf.readers.decoder_config import ALiBiCausalLMConfig
    from alibi_attn.hf.readers.encoder.heads import (
        ALiBiBertForMaskedLM,
        ALiBiBertForQuestionAnswering,
        ALiBiBertForSequenceClassification,
        ALiBiBertForTokenClassification,
    )
    from alibi_attn.hf.readers.encoder.models import ALiBiBertModel
    from alibi_attn.hf.readers.encoder_config import ALiBiBertConfig
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers"):
        raise
    raise ImportError('alibi_attn.hf needs transformers; install it with: pip install ".[hf]" in a clone') from error

__all__ = [
    "ALiBiBertConfig",
    "ALiBiBertForMaskedLM",
    "ALiBiBertForQuestionAnswering",
    "ALiBiBertForSequenceClassification",
    "ALiBiBertForTokenClassification",
    "ALiBiBertModel",
    "ALiBiCache",
    "ALiBiCausalLMConfig",
    "ALiBiForCausalLM",
    "LateChunks",
    "Patch",
    "late_chunks",
    "patch",
    "read",
    "record_attention",
    "sentence_transformer",
    "to_alibi",
]
