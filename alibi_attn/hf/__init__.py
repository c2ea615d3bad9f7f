"""ALiBi models of `transformers` (BLOOM, MPT, Falcon with alibi=True) on our attention, a decoder of our own that reads the
checkpoints of others (Baichuan-13B, BTLM, Jais, MPT, Refact), and checkpoints to and fro.

Encoders of our own read Jina v2, MosaicBERT and DNABERT-2.

Read `patching.py` first, then one file of `families/`; `encoder/` has the encoders, `decoder/` the decoder.
`docs/hf.md`, `docs/encoders.md` and `docs/decoders.md` show how they are used.
"""

try:
    from alibi_attn.hf.cache import ALiBiCache
    from alibi_attn.hf.decoder.config import ALiBiCausalLMConfig
    from alibi_attn.hf.decoder.model import ALiBiForCausalLM
    from alibi_attn.hf.encoder.config import ALiBiBertConfig
    from alibi_attn.hf.encoder.models import ALiBiBertForMaskedLM, ALiBiBertForSequenceClassification, ALiBiBertModel
    from alibi_attn.hf.patching import Patch, patch
    from alibi_attn.hf.sentence_encoder import sentence_transformer
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers"):
        raise
    raise ImportError('alibi_attn.hf needs transformers; install it with: pip install "alibi-attn[hf]"') from error

__all__ = [
    "ALiBiBertConfig",
    "ALiBiBertForMaskedLM",
    "ALiBiBertForSequenceClassification",
    "ALiBiBertModel",
    "ALiBiCache",
    "ALiBiCausalLMConfig",
    "ALiBiForCausalLM",
    "Patch",
    "patch",
    "sentence_transformer",
]
