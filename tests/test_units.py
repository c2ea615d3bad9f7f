"""Conversions compared with published numbers."""

import math

import pytest

from alibi_attn.units import bits_per_byte, perplexity, word_perplexity


def test_conversions_give_the_numbers_that_were_worked_out_by_hand():
    assert perplexity(0) == 1
    assert perplexity(2.9396) == pytest.approx(18.908, abs=1e-3)
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))
    # 1,000 words in 1,250 tokens: 1.25 · 2.4 = 3 nats a word, e³ = 20.0855
    assert word_perplexity(2.4, words_per_token=1000 / 1250) == pytest.approx(20.0855, abs=1e-4)
    # nanoGPT's 1.4697 nats a character are 2.1203 bits; at 4 bytes a token a quarter
    assert bits_per_byte(1.4697, bytes_per_token=1) == pytest.approx(2.1203, abs=1e-4)
    assert bits_per_byte(1.4697, bytes_per_token=4) == pytest.approx(0.5301, abs=1e-4)


def test_units_agree_on_one_text():
    nats, tokens, words, num_bytes = 700.0, 250, 200, 1000
    per_token = nats / tokens
    assert word_perplexity(per_token, words_per_token=words / tokens) == pytest.approx(math.exp(nats / words))
    assert bits_per_byte(per_token, bytes_per_token=num_bytes / tokens) == pytest.approx(nats / math.log(2) / num_bytes)
    assert perplexity(per_token) == pytest.approx(2 ** (bits_per_byte(per_token, bytes_per_token=4) * 4))
