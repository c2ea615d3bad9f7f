"""From nats per token to the units that papers print. Average losses in nats first, then convert the mean.

A mean over tokens becomes one over words or bytes by the ratio of the two in the scored text, because the sum of the losses
is the same. Perplexities of different tokenizers can be compared per word or per byte, never per token.
"""

import math


def perplexity(nats_per_token: float) -> float:
    """e^n; infinite if it does not fit a float.

    >>> round(perplexity(2.5), 3)
    12.182
    """
    return math.inf if nats_per_token >= 709 else math.exp(nats_per_token)


def word_perplexity(nats_per_token: float, *, words_per_token: float) -> float:
    """e^(n·tokens/words): the perplexity of a word-level model with the same total loss (WikiText-103 counts line ends as words).

    >>> round(word_perplexity(2.5, words_per_token=0.5), 3)
    148.413
    """
    return perplexity(nats_per_token / words_per_token)


def bits_per_byte(nats_per_token: float, *, bytes_per_token: float) -> float:
    """n·tokens/bytes/ln 2; for tokens that are bytes, bits per ASCII character.

    >>> round(bits_per_byte(2.5, bytes_per_token=4), 3)
    0.902
    """
    return nats_per_token / bytes_per_token / math.log(2)
