"""The options that tests/conftest.py adds to pytest: `--processor-time` and `--processor`."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from processor_time import ProcessorTime

from alibi_attn.processor import features

SUPPORT = Path(__file__).parent / "support" / "processes"


def test_the_processor_time_includes_other_processes_and_all_workers() -> None:
    counted = ProcessorTime(SimpleNamespace())
    item = SimpleNamespace(nodeid="tests/test_made_up.py::test_made_up")
    running = counted.pytest_runtest_protocol(item)
    next(running)
    subprocess.run([sys.executable, "-S", "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    with pytest.raises(StopIteration):
        running.send(None)
    seconds = counted.seconds["tests/test_made_up.py"]
    assert seconds > 0.2
    for more in (10, 20):
        counted.pytest_testnodedown(
            SimpleNamespace(workeroutput={"processor_seconds": {"tests/test_made_up.py": more}})
        )
    lines: list[str] = []
    counted.pytest_terminal_summary(SimpleNamespace(section=lines.append, write_line=lines.append))
    assert lines[0] == "processor time: 0.5 minutes"
    assert lines[1].endswith(f"{30 + seconds:.1f} s  tests/test_made_up.py")


REPORT = """
import subprocess
import sys

SEEN = '''
import subprocess
from alibi_attn import processor
print(processor.instructions(), "avx512_vnni" in processor.features())
print(subprocess.run(["g++", "-march=native", "-dM", "-E", "-xc++", "/dev/null"], capture_output=True, text=True).stdout)
'''
from lesser_processor import hide

with hide(sys.argv[1]):
    exec(SEEN)
    subprocess.run([sys.executable, "-c", SEEN], check=True)
"""


@pytest.mark.skipif("avx512_vnni" not in features(), reason="hides features that this processor does not have")
@pytest.mark.parametrize(("level", "words"), [("avx2", "AVX2"), ("avx512", "AVX-512")])
def test_a_lesser_processor_is_reported_and_compiled_for(level: str, words: str) -> None:
    """In the process that hides features, and in one that it starts."""
    command = [sys.executable, "-c", REPORT, level]
    seen = subprocess.run(command, cwd=SUPPORT, capture_output=True, text=True, check=True).stdout
    assert seen.count(f"{words} False\n") == 2
    assert "__AVX512VNNI__" not in seen
    assert seen.count("__AVX512F__ ") == (2 if level == "avx512" else 0)
    assert seen.count("__AVX2__ ") == 2
