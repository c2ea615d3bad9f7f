"""The tables of model families. To add one, write a file in this folder and add its row here (CONTRIBUTING.md).

ENCODERS and DECODERS list the checkpoints that `encoder/` and `decoder/` read. They are recognized by the names of their weights,
in this order. PATCHED lists the models of transformers that `patch` changes.
"""

from alibi_attn.hf.readers.decoder_config import ALiBiCausalLMConfig
from alibi_attn.hf.readers.families.baichuan import FAMILY as BAICHUAN
from alibi_attn.hf.readers.families.bloom import FAMILY as BLOOM
from alibi_attn.hf.readers.families.cerebras import FAMILY as CEREBRAS
from alibi_attn.hf.readers.families.falcon import FAMILY as FALCON
from alibi_attn.hf.readers.families.family import Family, PatchedFamily
from alibi_attn.hf.readers.families.forgetting import FAMILY as FORGETTING
from alibi_attn.hf.readers.families.jina import CLIP_FAMILY as JINA_CLIP
from alibi_attn.hf.readers.families.jina import CODE_FAMILY as JINA_CODE
from alibi_attn.hf.readers.families.jina import FAMILY as JINA
from alibi_attn.hf.readers.families.llm_foundry import FAMILY as LLM_FOUNDRY
from alibi_attn.hf.readers.families.mosaic import FAMILY as MOSAIC
from alibi_attn.hf.readers.families.mpt import FAMILY as MPT
from alibi_attn.hf.readers.families.refact import FAMILY as REFACT
from alibi_attn.hf.readers.families.replit import FAMILY as REPLIT
from alibi_attn.hf.readers.families.step1 import FAMILY as STEP1
from alibi_attn.hf.readers.families.t5 import FAMILIES as T5

# The keys are the values of `layout` for `save_pretrained`.
ENCODERS: dict[str, Family] = {"mosaic": MOSAIC, "jina-code": JINA_CODE, "jina": JINA, "jina-clip": JINA_CLIP}
DECODERS: tuple[Family, ...] = (BAICHUAN, CEREBRAS, REPLIT, LLM_FOUNDRY, REFACT, FORGETTING, STEP1)
PATCHED: tuple[PatchedFamily, ...] = (BLOOM, MPT, FALCON, *T5)
# The model_type of every supported decoder.
DECODER_TYPES = {ALiBiCausalLMConfig.model_type}.union(
    (family.model.config_class.model_type for family in PATCHED if family.around is None),  # type: ignore[union-attr]
    *(family.model_types for family in DECODERS),
)
