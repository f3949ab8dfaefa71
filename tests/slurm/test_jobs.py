"""Training as jobs on a real Slurm: stopped, limited, robbed of a node or cancelled, a run loses nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.e2e.pipeline import assert_same_run, metrics
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.scenarios import STEPS, TIMEOUT_S, Outcome, Scenarios

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]
# In the order in which their jobs are submitted: the one that has to wait for its time limit first.
NAMES = ("limit", "straight", "stop", "node", "crash", "cancel", "crashing", "chained", "refused")


@pytest.fixture(scope="module")
def scenarios(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Scenarios:
    return Scenarios(cluster, tmp_path_factory.mktemp("slurm jobs"))


@pytest.fixture(scope="module")
def jobs(scenarios: Scenarios) -> Iterator[dict[str, Future[Outcome]]]:
    """All scenarios, running."""
    with ThreadPoolExecutor(len(NAMES)) as pool:
        first = pool.submit(getattr(scenarios, NAMES[0]))
        wait_for(lambda: scenarios.is_submitted(NAMES[0]) or first.done(), TIMEOUT_S, "the first job is submitted")
        yield {NAMES[0]: first, **{name: pool.submit(getattr(scenarios, name)) for name in NAMES[1:]}}


@pytest.fixture(scope="module")
def straight(jobs: dict[str, Future[Outcome]]) -> Outcome:
    return jobs["straight"].result(TIMEOUT_S)


def assert_like(outcome: Outcome, straight: Outcome) -> None:
    """Finished with the same metrics and the same bits."""
    assert outcome.facts["JobState"] == "COMPLETED", outcome.log
    assert outcome.event_names[-1] == "finished"
    assert_same_run(outcome.run_dir, straight.run_dir, STEPS)
    assert (outcome.status["state"], outcome.status["step"]) == ("finished", STEPS)


def test_bad_partition_and_too_many_nodes_are_refused_before_submission(scenarios: Scenarios) -> None:
    words = ["ppo", *scenarios.ppo_words("nothing")]
    for override, says in (
        ("cluster.partition=nope", "invalid partition specified: nope"),
        ("cluster.nodes=10", "Requested node configuration is not available"),
        ("cluster.sbatch=['--constraint=h100']", "Invalid feature specification"),
    ):
        more = ("ppo.rollout_batch_size=32", "ppo.mini_batch_size=32") if "nodes" in override else ()
        done = scenarios.aligner("submit", *words, override, *more)
        assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert override.partition("=")[0] in done.stderr
    done = scenarios.aligner("submit", *words, "--test-only")
    assert done.returncode == 0 and "to start at" in done.stdout
    assert not (scenarios.base / "runs" / "nothing").exists()


def test_runs_on_two_nodes_with_two_tasks_each(straight: Outcome) -> None:
    assert straight.facts["JobState"] == "COMPLETED" and straight.event_names == ["started", "finished"], straight.log
    assert [row["step"] for row in metrics(straight.run_dir)] == list(range(1, STEPS + 1))
    assert straight.facts["NumNodes"] == "2"
    codes = sorted((straight.run_dir / "slurm" / "exit_codes").glob("*/*"))
    assert [path.name for path in codes] == ["0", "1", "2", "3"] and {path.read_text() for path in codes} == {"0\n"}
    assert f"squeue -j {straight.job}" in straight.printed
    assert straight.status["job"]["id"] == straight.job and straight.status["restarts"] == 0


def test_stop_request_saves_requeues_and_continues(jobs: dict[str, Future[Outcome]], straight: Outcome) -> None:
    outcome = jobs["stop"].result(TIMEOUT_S)
    assert_like(outcome, straight)
    assert outcome.event_names == ["started", "requeued", "started", "finished"]
    assert outcome.facts["Restarts"] == "1" and outcome.status["restarts"] == 1
    assert "the ranks saved and ask to go on: SIGUSR1" in outcome.log and "restart 1 of this job" in outcome.log
    assert not (outcome.run_dir / "slurm_crashes.txt").exists()


def test_time_limit_saves_requeues_and_continues(jobs: dict[str, Future[Outcome]], straight: Outcome) -> None:
    outcome = jobs["limit"].result(TIMEOUT_S)
    assert_like(outcome, straight)
    assert outcome.event_names == ["started", "requeued", "started", "finished"]
    assert "the ranks saved and ask to go on" in outcome.log
    assert not (outcome.run_dir / "slurm_crashes.txt").exists()


def test_lost_node_requeues_and_continues(jobs: dict[str, Future[Outcome]], straight: Outcome) -> None:
    outcome = jobs["node"].result(TIMEOUT_S)
    assert_like(outcome, straight)
    assert outcome.event_names == ["started", "requeued", "started", "finished"]
    assert outcome.facts["Restarts"] == "1"
    assert "Slurm starts this job again by itself" in outcome.log


def test_killed_rank_ends_all_requeues_and_continues(jobs: dict[str, Future[Outcome]], straight: Outcome) -> None:
    outcome = jobs["crash"].result(TIMEOUT_S)
    assert_like(outcome, straight)
    assert outcome.event_names == ["started", "requeued", "started", "finished"]
    assert outcome.facts["Restarts"] == "1" and outcome.status["crashes"] == 1 and outcome.status["restarts"] == 1


def test_cancelled_job_is_saved_and_not_requeued(jobs: dict[str, Future[Outcome]], straight: Outcome) -> None:
    outcome = jobs["cancel"].result(TIMEOUT_S)
    assert outcome.facts["JobState"] == "CANCELLED" and outcome.facts["Restarts"] == "0"
    assert outcome.event_names in (["started", "cancelled"], ["started"])  # it may be killed before it can say so
    assert outcome.status["state"] == "stopped" and outcome.status["last_end"]["exit_code"] == 76
    rows = metrics(outcome.run_dir)
    assert 0 < len(rows) < STEPS and rows == metrics(straight.run_dir)[: len(rows)]
    assert outcome.status["checkpoint"]["step"] == len(rows)
    assert not (outcome.run_dir / "restart_requested").exists()


def test_crashing_job_stops_after_max_restarts(jobs: dict[str, Future[Outcome]]) -> None:
    outcome = jobs["crashing"].result(TIMEOUT_S)
    assert outcome.facts["JobState"] == "FAILED" and outcome.facts["Restarts"] == "1"
    assert outcome.event_names == ["started", "requeued", "started", "ended"]
    assert outcome.status["crashes"] == 2 and "not started again" in outcome.log


def test_chained_job_takes_over(jobs: dict[str, Future[Outcome]]) -> None:
    outcome = jobs["chained"].result(TIMEOUT_S)
    assert outcome.facts["JobState"] == "COMPLETED" and outcome.facts["Restarts"] == "0"
    assert outcome.event_names == ["started", "chained", "started", "finished"]
    assert outcome.status["job"]["id"] == outcome.job


def test_refused_requeue_becomes_a_chained_job(jobs: dict[str, Future[Outcome]]) -> None:
    outcome = jobs["refused"].result(TIMEOUT_S)
    assert outcome.facts["JobState"] == "COMPLETED"
    assert outcome.event_names == ["started", "requeued", "chained", "started", "finished"]
    assert "scontrol requeue was refused" in outcome.log and "takes over" in outcome.log
