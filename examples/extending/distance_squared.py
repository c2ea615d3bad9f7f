"""A new position method, complete: a bias of −d²/1000.

    python examples/extending/distance_squared.py

trains it for a few steps from this file. To add it for good, copy this file without its last part to alibi_lab/lab/model/, and
give it a row in `LOOKS` of alibi_lab/position_methods.py:

    "squared": Look("squared distances", "#0c5a7a", "#7fd0f0", "4", "distance_squared:Squared", "", "−d²/1000"),
"""

import torch

from alibi_lab.lab.model.position_method import ByDistance, Pass, PositionMethod


class Squared(PositionMethod):
    """−d²/1000 for every head."""

    def bias(self, at: Pass) -> ByDistance:
        distance = torch.arange(at.key_len)
        return ByDistance((-(distance**2) / 1000.0).expand(self.config.num_heads, -1))


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    from alibi_lab import records
    from alibi_lab.recipes import index

    with tempfile.TemporaryDirectory() as folder:
        paths = index.run("quick", out=Path(folder), scale="smoke", methods=[f"{__file__}:Squared"])
        for path in paths:
            for curve, columns in records.load(path).curves.items():
                print(curve, columns)
