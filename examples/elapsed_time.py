"""What if attention decays by the time between events, not by the number of events between them?

python examples/elapsed_time.py
"""

import argparse

import torch

from alibi_attn import alibi_attention, explain, forgetting_attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=4096, help="events (default 4,096)")
    events = parser.parse_args().events
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, events, 64)

    # Bursts of a few seconds with hours between them, as Unix times: fp64, because fp32 would round them to two minutes.
    gaps = torch.rand(1, events, dtype=torch.float64) * 5
    gaps[:, ::50] += 3600 * torch.rand(1, len(range(0, events, 50)), dtype=torch.float64)
    times = 1.75e9 + gaps.cumsum(1)
    slopes = torch.tensor([1 / 10, 1 / 60, 1 / 600, 1 / 3600])  # nats per second: what each head remembers

    by_time = alibi_attention(q, k, v, slopes, positions=times)

    # The same as a forget gate that closes by m·Δt before each event; only differences of times matter.
    elapsed = times.diff(prepend=times[:, :1])
    gated = forgetting_attention(q, k, v, -slopes[:, None] * elapsed[:, None])
    print(f"positions and gates of −m·Δt differ by {(by_time - gated).abs().max():.0e}")

    by_count = alibi_attention(q, k, v, slopes)
    print(f"a decay by count differs by {(by_time - by_count).abs().max():.2f}")

    # A pause of an hour weighs e^(−360) in the first head: its certificate reads the current burst only.
    shares = explain(q, k, v, slopes, positions=times, backend="native").shares
    print("share of all scores computed, by head: " + ", ".join(f"{share:.1%}" for share in shares))

    # Where both sides are known, such as in an encoder, and at times between the events:
    between = times + 0.5 * torch.cat([gaps[:, 1:], gaps[:, :1]], 1)
    imputed = alibi_attention(q, k, v, slopes, causal=False, positions=times, query_positions=between)
    print(f"imputed {imputed.shape[2]:,} values between the events, finite: {bool(imputed.isfinite().all())}")


if __name__ == "__main__":
    main()
