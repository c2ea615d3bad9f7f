"""A BLOOM in CTranslate2."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from transformers import BloomForCausalLM


class CTranslate2:
    """A BLOOM in fp32 or int8. The time per token is the difference between generating a longer and a shorter answer."""

    def __init__(self, model: BloomForCausalLM, folder: Path, *, threads: int, precision: str = "float32") -> None:
        import ctranslate2

        place = folder / "ctranslate2"
        if not place.exists():
            place.mkdir()
            write_ctranslate2(model, place)
        self._generator = ctranslate2.Generator(str(place), compute_type=precision, intra_threads=threads)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        return np.array(self._generator.forward_batch([[_word(token) for token in tokens]]))[0, -1]

    def several(self, tokens: Sequence[int], count: int) -> Callable[[], float]:
        words = [_word(token) for token in tokens]

        def generation_s(length: int) -> float:
            start = time.perf_counter()
            self._generator.generate_batch(
                [words], max_length=length, min_length=length, include_prompt_in_result=False
            )
            return time.perf_counter() - start

        return lambda: (generation_s(1 + count) - generation_s(1)) / count


def write_ctranslate2(model: BloomForCausalLM, folder: Path) -> None:
    """Converts the model with CTranslate2's BLOOM loader; placeholder words replace the tokenizer's vocabulary."""
    from ctranslate2.converters.transformers import BloomLoader

    spec = BloomLoader().get_model_spec(model)
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = _word(0)
    spec.register_vocabulary([_word(token) for token in range(model.config.vocab_size)])
    spec.validate()
    spec.optimize(quantization=None)
    spec.save(str(folder))


def _word(token: int) -> str:
    return f"<{token}>"
