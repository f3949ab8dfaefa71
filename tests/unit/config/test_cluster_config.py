"""The cluster section: every shipped file composes and is accepted; values that would break a job are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from aligner.config.cluster import ClusterConfig, check_cluster, ranks_per_node, split_overrides, time_limit_s
from aligner.config.compose import compose, conf_directory, config_groups
from aligner.errors import ConfigError


def cluster(*overrides: str, config_dirs: tuple[Path, ...] = ()) -> ClusterConfig:
    """Composed and checked as ``aligner submit`` does."""
    found = compose("submit", [f"cluster.{text}" if "cluster" not in text else text for text in overrides], config_dirs)
    check_cluster(found.cluster)
    return found.cluster


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        cluster(*overrides)
    message = str(caught.value)
    assert "\n" not in message and message.startswith("cluster")
    return message


@pytest.mark.parametrize("name", sorted(path.stem for path in (conf_directory() / "cluster").glob("*.yaml")))
def test_every_shipped_cluster_is_accepted(name: str) -> None:
    found = cluster(f"cluster={name}", "account=a1", "nodes=3")
    assert found.nodes == 3 and found.account == "a1"
    assert time_limit_s(found) is not None and found.time is not None


def test_cluster_is_the_group_of_submit_alone() -> None:
    assert set(config_groups(command="submit")) == {"cluster"}
    assert "cluster" not in config_groups()
    for override in ("cluster=local_slurm", "cluster.nodes=2"):
        with pytest.raises(ConfigError, match="a key of aligner submit"):
            compose("ppo", ["model.path=m", override])


def test_a_site_extends_a_shipped_file(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "ours.yaml").write_text("defaults: [gpu_pyxis]\naccount: team\nenv: {A: '1'}\n")
    found = cluster("cluster=ours", "env.B='x y'", config_dirs=(tmp_path,))
    assert found.account == "team" and found.container.runtime == "pyxis"
    assert dict(found.env) == {"HF_HOME": "/shared/huggingface", "A": "1", "B": "x y"}


def test_ranks_default_to_one_a_gpu() -> None:
    assert ranks_per_node(cluster()) == 1
    assert ranks_per_node(cluster("gpus_per_node=4")) == 4
    assert ranks_per_node(cluster("gpus_per_node=4", "tasks_per_node=1")) == 1


@pytest.mark.parametrize(
    ("text", "seconds"), [("00:10:00", 600), ("100:00:01", 360001), ("1-02:03:04", 93784), ("0-00:05:00", 300)]
)
def test_time_limits(text: str, seconds: int) -> None:
    assert time_limit_s(cluster(f"time='{text}'", "signal_lead=60")) == seconds


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("partition='a b'", "only letters"),
        ("account='x\ny'", "only letters"),
        ('qos="\'; rm -rf /"', "only letters"),
        ("memory=lots", "64G"),
        ("nodes=0", "give 1 or more"),
        ("tasks_per_node=0", "give 1 or more"),
        ("time=14400", "[D-]HH:MM:SS"),
        ("time=30:00", "[D-]HH:MM:SS"),
        ("time=1:61:00", "[D-]HH:MM:SS"),
        ("signal_lead=0", "give 1 or more"),
        ("signal_lead=70000", "65535"),
        ("requeue=always", "choose requeue, chain or none"),
        ("max_restarts=-1", "give 0 or more"),
        ("port_base=60000", "55535"),
        ("env.RANK=1", "from Slurm"),
        ("env.a-b=c", "no name of an environment variable"),
        ("env.A='x\ny'", "only printable"),
        ("command=['python\n']", "only printable"),
        ("sbatch=['--comment=a\n#SBATCH --uid=0']", "only printable"),
        ("sbatch=[constraint]", "--name=value"),
        ("sbatch=['--time=1']", "set cluster.time instead"),
        ("sbatch=['-N4']", "set cluster.nodes instead"),
        ("sbatch=['--array=1-3']", "leave it out"),
        ("container.runtime=docker", "choose none, pyxis or apptainer"),
        ("container.runtime=pyxis", "needs cluster.container.image"),
        ("container.image=a.sif", "have no effect"),
    ],
)
def test_refused(override: str, says: str) -> None:
    assert says in refusal(override)


def test_values_that_contradict_each_other() -> None:
    assert "not below cluster.time" in refusal("time='00:10:00'", "signal_lead=600")
    assert "above cluster.gpus_per_node" in refusal("tasks_per_node=8", "gpus_per_node=4")
    container = ("container.runtime=pyxis", "container.image=x.sqsh")
    for mount in ("relative:/x", "/a", "/a:/b:rx", "/a,/b:/c", "/a:/b:ro:rw"):
        assert "is not of the form" in refusal(*container, f"container.mounts=['{mount}']")


def test_overrides_are_told_apart() -> None:
    mine, others = split_overrides(["cluster=a", "clusters.x=1", "m=1", "+cluster.env.A=b", "++cluster.nodes=2"])
    assert mine == ["cluster=a", "+cluster.env.A=b", "++cluster.nodes=2"]
    assert others == ["clusters.x=1", "m=1"]
