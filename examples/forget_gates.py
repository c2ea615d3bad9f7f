"""What if the text decides how much is forgotten, instead of the distance alone?

python examples/forget_gates.py
"""

import argparse

import torch
from torch.nn.functional import logsigmoid

from alibi_attn import alibi_attention, forgetting_attention, head_reach


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096, help="tokens (default 4,096)")
    options = parser.parse_args()
    torch.manual_seed(0)
    length, heads = options.length, 4
    q, k, v = torch.randn(3, 1, heads, length, 64)

    # The gate at each token, between 0 and 1, is the share of everything earlier that is kept. A constant gate is an
    # ALiBi slope.
    constant = torch.full((1, heads, length), -0.1)  # the logarithm of the gates
    same = forgetting_attention(q, k, v, constant) - alibi_attention(q, k, v, [0.1] * heads)
    print(f"constant gates and slopes differ by {same.abs().max():.0e}")

    # Gates that depend on the text (random here). One token closes its gate: everything before it is forgotten.
    gates = logsigmoid(torch.randn(1, heads, length) + 5)
    gates[:, :, length // 2] = -100.0
    cut = forgetting_attention(q, k, v, gates)[:, :, length // 2 :]
    alone = forgetting_attention(*(x[:, :, length // 2 :] for x in (q, k, v, gates)))
    print(
        f"after a closed gate the second half differs from a call without the first half by {(cut - alone).abs().max():.0e}"
    )

    # Forgotten keys are not computed: a gate is a bias per key, b_j = −Σ ln f, and the certificate includes it.
    for openness in (1.0, 3.0, 5.0):
        gates = logsigmoid(torch.randn(1, heads, length) + openness)
        reach = head_reach(q, k, [0.0] * heads, key_bias=-gates.double().cumsum(-1), backend="native")
        print(
            f"gates near {torch.tensor(openness).sigmoid():.2f}: heads reach back at most {int(reach.max()):,} tokens"
        )


if __name__ == "__main__":
    main()
