"""The examples of docs/hf.md run, one after another."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parent.parent.parent / "docs" / "hf.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.+?)^```", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES, ids=[str(at) for at in range(len(EXAMPLES))])
def test_an_example_runs_and_prints_what_it_says(example, capsys):
    exec(compile(example, "docs/hf.md", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    for promised in re.findall(r"^print\(.*\)\s+# ([(\[t].+)$", example, re.MULTILINE):
        assert promised in printed
    assert len(EXAMPLES) == 4


def test_the_examples_of_the_encoders_run_one_after_another():
    text = (Path(__file__).parent.parent.parent / "docs" / "encoders.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.+?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(examples) == 2
    namespace = {"__name__": "example"}
    for example in examples:
        exec(compile(example, "docs/encoders.md", "exec"), namespace)
