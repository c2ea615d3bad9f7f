"""Attacks the certificate with dropout: measures output errors, and whether the mask changes the visited keys.

python tests/support/fuzz/dropout_attack.py 100000 results    # many draws, saved as a record
"""

import dataclasses
import sys
from pathlib import Path

import torch
from attack_records import Found, attack_all
from certificate_attack import Attack, native_keys, random_attack

from alibi_attn.attention.call.bias import score_bias
from alibi_attn.attention.call.dropout import kept
from alibi_attn.attention.call.spec import dropout_numbers
from alibi_attn.attention.call.validation import make_spec
from alibi_attn.attention.call.visibility import distances, visible

SHARES = (0.1, 0.5, 0.9)


def off(attack: Attack, read_keys=native_keys) -> tuple[float, float]:
    """Returns (the largest ‖o − õ‖ as a share of 2ε·max‖v‖ / (1 − p), in float64; the share of skipped keys).

    `read_keys` returns the visited keys. The first result is inf if dropout changes them.
    """
    (query, key, value, slopes), kwargs = attack.inputs()
    plain = make_spec(query, key, value, slopes, **kwargs)
    seed = torch.tensor([[2**40 * attack.seed + 1, 0, 0, 0]])
    spec = dataclasses.replace(plain, dropout_p=SHARES[attack.seed % len(SHARES)], dropout_seed=seed)
    read = read_keys(spec, query, key, value)
    distance = distances(spec.query_len, spec.key_len, spec.query_offset, None)
    seen = visible(spec, distance).expand(1, spec.num_heads, -1, -1)
    skipped = seen & ~read
    share = float(skipped.sum() / seen.sum().clamp(min=1))
    if not torch.equal(read, read_keys(plain, query, key, value)):
        return float("inf"), share
    wide = dataclasses.replace(
        spec,
        slopes=spec.slopes.double(),
        right_slopes=None if spec.right_slopes is None else spec.right_slopes.double(),
    )
    value = value.double()[0]
    value = value / value.norm(dim=-1).max().clamp(min=1e-300)
    scores = spec.scale * (query.double() @ key.double().mT) + score_bias(wide, distance, seen)[0]
    weights = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e300)).exp()
    near = weights * read
    full, near = (x / x.sum(-1, keepdim=True).clamp(min=1e-300) for x in (weights, near))
    factors = kept(spec, query.device) * dropout_numbers(spec.dropout_p)[1]
    error = (((full - near) * factors) @ value).norm(dim=-1).max()
    return float(error) * (1 - spec.dropout_p) / (2 * spec.tolerance), share


def main(draws: int, out: Path) -> None:
    def found(seed: int) -> Found:
        attack = random_attack(seed)
        if seed % 20 == 0:  # several different blocks of queries, and keys far beyond the reach
            attack = dataclasses.replace(attack, length=attack.length * 6)
        return *off(attack), ()

    attack_all("attack/native/dropout", draws, out, found, limit="bound", dropout_p=list(SHARES))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
