"""Records of evaluations and answers to the paper's items, made up for the tests of the report."""

import dataclasses

from alibi_lab import records
from alibi_lab.records import Record
from alibi_lab.report.published import PUBLISHED

LENGTHS = (64, 1024)
DOCUMENTS = 128
PARTS = 32


def changed(record: Record, *place: str, **fields: object) -> Record:
    """The record with other fields at a place, such as "config", "eval"."""

    def within(data: dict, names: list[str]) -> dict:
        return data | ({names[0]: within(data[names[0]], names[1:])} if names else fields)

    name, *inner = place
    return dataclasses.replace(record, **{name: within(getattr(record, name), inner)})


def evaluated(
    method: str,
    task: str,
    values: tuple[float | None, ...],
    *,
    seed: int = 0,
    noise: float = 0.0,
    trials: int = DOCUMENTS,
) -> Record:
    """Shares (or nats, for the text ""), with parts alternately `noise` above and below."""
    known = [(at, value) for at, value in zip(LENGTHS, values, strict=True) if value is not None]
    rows = [(at, part, value + (noise if part % 2 else -noise)) for at, value in known for part in range(PARTS)]
    parts = {"length": [at for at, _, _ in rows], "part": [part for _, part, _ in rows]}
    if task:
        curves = {
            task: {"length": list(LENGTHS), "accuracy": list(values), "answers": [1024] * 2},
            f"{task}_by_part": {**parts, "answers": [32] * len(rows), "accuracy": [value for _, _, value in rows]},
            "by_length": {"length": list(LENGTHS), "nonoverlapping_nats": [2.0, 2.0], "sliding_nats": [2.0, 2.0]},
        }
    else:
        nats = [value for _, _, value in rows]
        curves = {
            "by_length": {"length": list(LENGTHS), "nonoverlapping_nats": list(values), "sliding_nats": list(values)},
            "by_part": {**parts, "tokens": [128] * len(rows), "nonoverlapping_nats": nats, "sliding_nats": nats},
        }
    config = {
        "model": {"method": method, "num_heads": 4},
        "data": {"corpus": f"task:{task}:64" if task else "python-source", "text": []},
        "train": {"length": 64, "seed": seed, "steps": 10},
        "eval": {"lengths": list(LENGTHS), "tasks": [task] if task else [], "trials": trials},
        "corpus": {"name": f"task:{task}:64" if task else "python-source", "sha256": f"{task or 'text'}"},
    }
    return records.make(
        "evaluation", f"referee/{method}-64/seed-{seed}", config=config, metrics={"parameters": 1.2e5}, curves=curves
    )


def answer(item: str, *, factor: int = 8, growth: float = 1.0, **columns: object) -> Record:
    """A made-up result in our format: the paper's lengths divided by `factor`, its perplexities times `growth` over five."""
    published = PUBLISHED[item]
    curves = {}
    for label, series in published.series.items():
        if label in published.cited:
            continue
        made: dict[str, list[float | None]] = {}
        for column, values in series.items():
            if column == "length":
                made |= {"length": [int(x) // factor for x in values], "paper_length": list(values)}
            elif "perplexity" in column:
                made[column] = [None if x is None else x * growth / 5 for x in values]
            else:
                made[column] = (
                    [None if x is None else x / 2 for x in values] if "per_second" in column else list(values)
                )
        if "perplexity" in made:
            other = "nonoverlapping" if "sliding" in published.evaluation else "sliding"
            made |= {
                "low": [None if x is None else x * 0.99 for x in made["perplexity"]],
                "high": [None if x is None else x * 1.01 for x in made["perplexity"]],
                f"{other}_perplexity": [None if x is None else x * 0.95 for x in made["perplexity"]],
                "tokens": [4096] * len(made["perplexity"]),
                "seeds": [2] * len(made["perplexity"]),
            }
        curves[label] = made
    config = {"scale": "small", "corpora": [{"name": "novels", "bytes_per_token": 1}], **columns}
    return records.make("paper-item", item, config=config, metrics={}, curves=curves)
