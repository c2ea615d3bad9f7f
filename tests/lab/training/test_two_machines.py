"""FSDP over two torchrun agents, as on two machines: a killed machine or process, and resuming with the same losses."""

from pathlib import Path

import pytest
from forked_ranks import free_port
from two_agents import TRAIN, Agents

from alibi_lab import records
from alibi_lab.lab.training.checkpoint import newest

pytestmark = pytest.mark.long


def by_hand() -> list[list[str]]:
    """The ranks are given; nothing restarts automatically."""
    port = free_port()
    return [["--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", port] for rank in (0, 1)]


def automatic() -> list[list[str]]:
    """A rendezvous that the first agent hosts; on one machine either could, so it is named."""
    common = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--max-restarts", "3"]
    return [[*common, "--rdzv-conf", f"is_host={host}"] for host in (1, 0)]


def results(out: Path) -> list[object]:
    """All losses of training and evaluation, and the bytes of the weights."""
    (training,) = records.find(out / "records", kind="training")
    (evaluation,) = records.find(out / "records", kind="evaluation")
    (run,) = out.glob("checkpoints/quick/*/seed-0-*")
    weights = (newest(run) / "model.safetensors").read_bytes()
    return [training.curves["training"]["loss_nats"], evaluation.curves["by_length"]["sliding_nats"], weights]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> list[object]:
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    with Agents(out, by_hand()) as agents:
        assert agents.ends(0, 1) == [0, 0], agents.said()
    return results(out)


def assert_resumed(steps: list[int], found: list[object], expected: list[object]) -> None:
    """Each checkpoint that was seen is of a later step than the one before, and the results have the same bits."""
    assert steps == sorted(steps)
    assert steps[-1] == int(TRAIN["steps"])
    assert found == expected


def test_the_same_commands_resume_after_a_machine_is_killed(uninterrupted, tmp_path):
    out = tmp_path / "out"
    with Agents(out, by_hand()) as agents:
        agents.until_checkpoint()
        agents.kill(1)
        assert agents.ends(0) == [1], agents.said()
        (state,) = out.glob("checkpoints/quick/*/seed-0-*/step-*/state")
        assert {path.name for path in state.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
        assert not list(out.glob("records/*"))
        for rank in (0, 1):
            agents.start(rank)
        assert agents.ends(0, 1) == [0, 0], agents.said()
    assert_resumed(agents.steps, results(out), uninterrupted)


@pytest.mark.parametrize("dead", ["a process", "a machine"])
def test_torchrun_restarts_both_if_the_processes_do_not_share_its_store(dead, uninterrupted, tmp_path):
    with Agents(tmp_path / "out", automatic(), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") as agents:
        agents.until_checkpoint()
        if dead == "a machine":
            agents.kill(1)
            agents.start(1)
        else:
            agents.worker(0).kill()
        assert agents.ends(0, 1) == [0, 0], agents.said()
    assert "connectFullMesh failed" not in agents.said()
    assert_resumed(agents.steps, results(agents.out), uninterrupted)


def test_a_training_that_began_again_or_differs_is_noticed():
    for steps, found in ([0, 10, 0, 100], ["same"]), ([0, 10, 100], ["other"]), ([0, 10, 90], ["same"]):
        with pytest.raises(AssertionError):
            assert_resumed(steps, found, ["same"])
