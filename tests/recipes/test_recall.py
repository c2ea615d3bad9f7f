"""The recall recipe: trained and tested on one task, with documents of the trained length."""

from alibi_lab import records
from alibi_lab.lab.data.tasks import recall_distances
from alibi_lab.lab.experiment import run
from alibi_lab.recipes.recall import COMPARED, RECIPE


def test_recall_runs_at_smoke_scale_and_records_every_distance(tmp_path):
    written = [records.load(path) for path in run(RECIPE, out=tmp_path, scale="smoke")]
    evaluations = [record for record in written if record.kind == "evaluation"]
    assert [record.config["model"]["method"] for record in evaluations] == list(COMPARED)
    for record in evaluations:
        curve = record.curves["recall"]
        assert curve["distance"] == recall_distances(32) + recall_distances(64)
        assert all(0 <= share <= 1 for share in curve["accuracy"])
        assert set(curve["tokens"]) == {16 * 7}
        assert record.config["corpus"]["name"] == "task:recall:32"
