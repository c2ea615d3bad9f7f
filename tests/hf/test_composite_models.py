"""Models that hold a T5, BLOOM or MPT inside are patched there, and compute what they computed before."""

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    BloomConfig,
    EncodecConfig,
    MptConfig,
    MusicgenConfig,
    MusicgenDecoderConfig,
    MusicgenForConditionalGeneration,
    T5Config,
)

from alibi_attn.hf import patch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*is deprecated:FutureWarning"),  # peft calls it
    pytest.mark.usefixtures("no_gradients"),
]
WIDTH, WORDS, IMAGE_TOKEN = 32, 50, 49
T5_SIZES = {"d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
T5_CONFIG = T5Config(**T5_SIZES, decoder_start_token_id=0)
INNER = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
LANGUAGE = {
    "t5": (T5_CONFIG, 6),
    "bloom": (BloomConfig(vocab_size=WORDS, hidden_size=WIDTH, n_layer=2, n_head=4), 2),
    "mpt": (MptConfig(vocab_size=WORDS, d_model=WIDTH, n_layers=2, n_heads=4), 2),
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def drawn(model: nn.Module) -> nn.Module:
    """All weights random, so that each has an effect."""
    for parameter in model.parameters():
        parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def words(batch: int, length: int) -> Tensor:
    return torch.randint(3, IMAGE_TOKEN, (batch, length))


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_musicgen_with_its_own_guidance():
    audio = EncodecConfig(
        num_filters=4,
        hidden_size=16,
        codebook_size=32,
        codebook_dim=16,
        upsampling_ratios=[4, 2],
        num_lstm_layers=1,
        target_bandwidths=[60.0],
    )
    sound = MusicgenDecoderConfig(
        vocab_size=32,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        ffn_dim=48,
        num_codebooks=2,
        pad_token_id=32,
        bos_token_id=32,
    )
    config = MusicgenConfig(text_encoder=T5_CONFIG.to_dict(), audio_encoder=audio.to_dict(), decoder=sound.to_dict())
    model = drawn(MusicgenForConditionalGeneration(config))
    ids = words(2, 40)
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    codes = torch.randint(32, (4, 5))
    # As published: guidance_scale is 3 in the generation config, and `generate` passes it to the text encoder as well.
    options = {"max_new_tokens": 6, "do_sample": False, "guidance_scale": 3.0}
    logits, sounds = model(**given, decoder_input_ids=codes).logits, model.generate(**given, **options)
    with patch(model) as handle:
        assert len(handle.layers) == 2
        assert all(name.startswith("text_encoder.encoder.") for name in handle.layers)
        close(model(**given, decoder_input_ids=codes).logits, logits)
        close(model.generate(**given, **options), sounds)
    assert torch.equal(model(**given, decoder_input_ids=codes).logits, logits)


@pytest.mark.parametrize("name", LANGUAGE)
def test_blip_2_with_each_language_model(name):
    text, layers = LANGUAGE[name]
    model = drawn(
        Blip2ForConditionalGeneration(
            Blip2Config(
                vision_config={**INNER, "image_size": 8, "patch_size": 4},
                qformer_config={**INNER, "encoder_hidden_size": WIDTH, "vocab_size": WORDS},
                text_config=text.to_dict(),
                num_query_tokens=3,
                image_token_index=IMAGE_TOKEN,
            )
        )
    )
    ids = words(2, 20)
    ids[:, :3] = IMAGE_TOKEN
    given = {"pixel_values": torch.randn(2, 3, 8, 8), "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "t5":
        given["decoder_input_ids"] = words(2, 4)
    logits = model(**given).logits
    prompt = {key: x for key, x in given.items() if key != "decoder_input_ids"}
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    text_tokens = model.generate(**prompt, **options)
    with patch(model) as handle:
        assert len(handle.layers) == layers
        assert all(layer.startswith("language_model.") for layer in handle.layers)
        close(model(**given).logits, logits)
        assert torch.equal(model.generate(**prompt, **options), text_tokens)
