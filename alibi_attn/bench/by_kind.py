"""A benchmark of attention over kinds of input and lengths: one record a kind, which nobody has yet."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from alibi_attn import records
from alibi_attn.bench.columns import Columns, GrowingRecord, append
from alibi_attn.bench.timing import peak_memory_bytes

MEMORY_LENGTHS = (8192, 16384, 32768, 65536)


def records_by_kind(
    out: Path,
    name: str,
    configs: Mapping[str, Mapping[str, records.Json]],
    *,
    lengths: Sequence[int],
    measure: Callable[[str, int], Mapping[str, Mapping[str, records.Json]]],
    train_step: Callable[[str, int], None] | None,
    summary: Callable[[Columns], Mapping[str, float | None]],
    say: Callable[[str], None],
) -> list[Path]:
    """Measure and keep "name/kind" for every kind in `configs`, renewed after every length; returns the paths.

    Args:
        measure: (kind, length) -> a row for each peer.
        train_step: (kind, length), run in fresh processes for their peak memory; None = not measured.
        summary: the metrics of a record from its curves.

    Raises:
        FileExistsError: before anything is measured, if one of the records is there already.
    """
    for kind, config in configs.items():
        records.expect_new(out, "benchmark", f"{name}/{kind}", config)
    paths = []
    for kind, config in configs.items():
        record = GrowingRecord(out, f"{name}/{kind}", config, summary)
        for length in sorted(lengths):
            for peer, row in measure(kind, length).items():
                append(record.curves, peer, row)
            record.keep()
        if train_step is not None:
            for length in [n for n in MEMORY_LENGTHS if n in lengths]:
                peak = peak_memory_bytes(train_step, kind, length)
                append(record.curves, "memory", {"length": length, "peak_memory_bytes": peak})
                say(f"{kind} {length:>6}: forward + backward adds {peak / 2**30:.2f} GiB to a fresh process")
        paths.append(record.keep())
    return paths
