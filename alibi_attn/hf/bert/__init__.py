"""Encoders with ALiBi: the post-norm BERT with a gated feed-forward of Jina v2, Jina v2 code, MosaicBERT and DNABERT-2.

One implementation; what differs is a field of `config.py`. Read `layers.py` (the formulas), then `models.py`; `layouts.py` has
the key names of the originals, `loading.py` and `saving.py` their folders, `packing.py` says why padding costs nothing.
"""

from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from alibi_attn.hf.bert.config import ALiBiBertConfig
from alibi_attn.hf.bert.models import ALiBiBertForMaskedLM, ALiBiBertForSequenceClassification, ALiBiBertModel

__all__ = ["ALiBiBertConfig", "ALiBiBertForMaskedLM", "ALiBiBertForSequenceClassification", "ALiBiBertModel"]

# Folders that save_pretrained wrote load through AutoModel. Originals say model_type "bert", which is BERT's.
AutoConfig.register(ALiBiBertConfig.model_type, ALiBiBertConfig, exist_ok=True)
AutoModel.register(ALiBiBertConfig, ALiBiBertModel, exist_ok=True)
AutoModelForMaskedLM.register(ALiBiBertConfig, ALiBiBertForMaskedLM, exist_ok=True)
AutoModelForSequenceClassification.register(ALiBiBertConfig, ALiBiBertForSequenceClassification, exist_ok=True)
