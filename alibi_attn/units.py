"""From nats per token to the units that papers print. Means are taken in nats; these are the last step.

A mean over tokens is turned into one over words or bytes by the ratio of the two in the scored text: the sum of the losses
is the same. Perplexities of different tokenizers can be compared per word or per byte, never per token.
"""

import math


def perplexity(nats_per_token: float) -> float:
    """e^n; infinite where that is more than a float can hold.

    >>> round(perplexity(2.5), 3)
    12.182
    """
    return math.exp(nats_per_token) if nats_per_token < 709 else math.inf


def word_perplexity(nats_per_token: float, *, words_per_token: float) -> float:
    """e^(n·tokens/words): of a text in pieces, what a model of words would have (WikiText-103 counts line ends as words).

    >>> round(word_perplexity(2.5, words_per_token=0.5), 3)
    148.413
    """
    return perplexity(nats_per_token / words_per_token)


def bits_per_byte(nats_per_token: float, *, bytes_per_token: float) -> float:
    """n·tokens/bytes/ln 2; where tokens are bytes, bits per character of ASCII.

    >>> round(bits_per_byte(2.5, bytes_per_token=4), 3)
    0.902
    """
    return nats_per_token / bytes_per_token / math.log(2)
