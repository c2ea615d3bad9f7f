"""A new claim, complete: a ratio of the paper's numbers, judged with our records.

    python examples/extending/claim.py

prints the verdict at each size. To add it for good, append ROW to alibi_lab/report/claims.json.
"""

from typing import Any

ROW: dict[str, Any] = {
    "item": "figure-1",
    "says": "ALiBi, L = 512, is better at 30 L than at 2 L",
    "over": [["ALiBi, L = 512", 15512]],
    "under": [["ALiBi, L = 512", 1012]],
    "relation": "below",
}

if __name__ == "__main__":
    from pathlib import Path

    from alibi_lab import records
    from alibi_lab.report import verdicts
    from alibi_lab.report.published import claim_of
    from alibi_lab.report.section import Archive

    verdicts.CLAIMS = (claim_of(ROW),)
    for name in ("medium", "paper"):
        archive = Archive(list(records.find(Path(__file__).parents[2] / "results" / f"{name}.jsonl")))
        for _, one in verdicts.all_verdicts(archive.records, archive.by_identity):
            interval = verdicts.interval_text(one.interval)
            print(f"{name}: {one.claim.says}: {one.word}; the paper {one.paper:.4f}, ours {one.ours:.4f} ({interval})")
