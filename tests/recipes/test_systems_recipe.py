"""The recipe of attention systems: every system is trained from its file, recorded with its look, and drawn."""

from alibi_lab import records
from alibi_lab.lab.experiment import run
from alibi_lab.lab.model.imported_method import imported_method
from alibi_lab.position_methods import LOOKS
from alibi_lab.recipes.systems import BUILT_IN, RECIPE, SYSTEMS
from alibi_lab.report.page import report_html


def test_every_system_is_trained_tested_and_drawn(tmp_path):
    text = tmp_path / "verses.txt"
    text.write_text("".join(f"{number} bottles of beer on the wall.\n" for number in range(200)), encoding="utf-8")
    paths = run(RECIPE, out=tmp_path / "out", scale="smoke", overrides={"data.text": str(text)})
    evaluations = [record for path in paths if (record := records.load(path)).kind == "evaluation"]
    assert [record.config["model"]["method"] for record in evaluations] == [*BUILT_IN, *SYSTEMS]
    same = {str({key: record.config[key] for key in ("data", "train", "eval", "corpus")}) for record in evaluations}
    assert len(same) == 1
    for record in evaluations:
        assert all(3 < nats < 7 for nats in record.curves["by_length"]["sliding_nats"])
        assert ("memory" in record.curves) is record.name.startswith("systems/TransformerXL")
    page = report_html(evaluations)
    for method in SYSTEMS:
        look = imported_method(method).look
        assert look is not None
        assert look.label in page
        assert f"var(--own-{look.light[1:]})" in page


def test_looks_differ_and_colors_are_not_those_of_built_in_methods():
    looks = [imported_method(method).look for method in SYSTEMS]
    for field in ("label", "light", "dark", "marker"):
        assert len({getattr(look, field) for look in looks}) == len(looks), field
    assert not {look.light for look in looks} & {look.light for look in LOOKS.values()}
