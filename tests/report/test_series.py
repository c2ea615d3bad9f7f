"""Series: the records that may appear in one figure, and those that form one line."""

import numpy as np
import pytest
from made_up_records import changed

from alibi_lab.report.series import studies


def test_seeds_of_one_configuration_make_one_series(made_up) -> None:
    (study,) = studies(made_up(methods=("alibi", "rotary"), seeds=3))
    assert [s.label for s in study.series] == ["rotary", "ALiBi"]
    assert [s.seeds for s in study.series] == [3, 3]
    assert study.unit == "byte"
    assert study.lengths == [128, 256, 512, 1024, 2048]


def test_labels_distinguish_trained_lengths(made_up) -> None:
    (study,) = studies(made_up(methods=("alibi",), trained=(128, 1024)))
    assert [s.label for s in study.series] == ["ALiBi 128", "ALiBi 1,024"]


@pytest.mark.parametrize(
    ("train", "labels"),
    [
        ({"steps": 80}, ["ALiBi (steps 40)", "ALiBi (steps 80)"]),
        ({"first_length": 32, "first_steps": 10}, ["ALiBi", "ALiBi (staged from 32)"]),
    ],
)
def test_labels_distinguish_other_differences(train, labels, made_up) -> None:
    records = made_up(methods=("alibi",))
    others = [changed(record, "config", "train", **train) for record in records]
    (study,) = studies([*records, *others])
    assert sorted(s.label for s in study.series) == labels


def test_evaluations_on_other_texts_are_other_studies(made_up) -> None:
    records = made_up()
    elsewhere = [changed(record, "config", corpus={"name": "other", "sha256": "cd" * 32}) for record in records]
    assert [study.corpus["name"] for study in studies([*records, *elsewhere])] == ["made-up", "other"]


def test_curves_keep_seeds_separate_and_omit_missing_values(made_up) -> None:
    (study,) = studies(made_up(methods=("learned",), seeds=2))
    x, y = study.series[0].curve("by_length", "length", "nonoverlapping_nats")
    np.testing.assert_array_equal(x, [128])
    np.testing.assert_allclose(y, [[2.20], [2.21]])
    x, y = study.series[0].curve("by_length", "length", "no such column")
    assert x.shape == (0,)
    assert y.shape == (0, 0)
