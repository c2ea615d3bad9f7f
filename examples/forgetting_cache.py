"""Can a model decode forever in bounded memory, with the same outputs?

python examples/forgetting_cache.py                  # 20,000 tokens in half a minute
python examples/forgetting_cache.py --tokens 2000
"""

import argparse

import torch

from alibi_attn import ALiBiAttention, KVCache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20_000, help="length of the text (default 20,000)")
    options = parser.parse_args()
    torch.manual_seed(0)

    # With normalized queries and keys the weights bound every score. So the reach of each head is known before any
    # text is read, and keys beyond it can be dropped permanently.
    layer = ALiBiAttention(embed_dim=64, num_heads=4, qk_norm=True, slopes=[1 / 2, 1 / 8, 1 / 16, 1 / 32]).eval()
    print("reach of each head:", ", ".join(f"{reach:,}" for reach in layer.static_reach().tolist()), "tokens")

    forgets, keeps_all = layer.reach_cache(), KVCache()
    worst = torch.zeros(())
    with torch.no_grad():
        for at, part in enumerate(torch.randn(1, options.tokens, 64).split(100, dim=1), start=1):
            difference = layer(part, cache=forgets) - layer(part, cache=keeps_all)
            worst = torch.maximum(worst, difference.abs().max())
            if at * 100 % (options.tokens // 4) == 0:
                kept = ", ".join(f"{count:,}" for count in forgets.kept)
                print(f"after {at * 100:6,} tokens the heads keep {kept}; outputs differ by {worst:.0e} at most")


if __name__ == "__main__":
    main()
