"""One cluster for all tests of this folder. Opt-in (``ALIGNER_SLURM_TESTS=1``): it needs root and writes /etc/hosts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing_programs

NODES = 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("ALIGNER_SLURM_TESTS") == "1":
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(
                pytest.mark.skip(reason="starts a Slurm cluster; set ALIGNER_SLURM_TESTS=1 (make test-slurm)")
            )


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Nodes of two CPUs: a job of two tasks a node has its nodes for itself."""
    if missing := missing_programs():
        pytest.fail(f"not installed: {', '.join(missing)}; apt-get install slurmctld slurmd slurm-client munge", False)
    if os.geteuid() != 0:
        pytest.fail("the simulated nodes need root", False)
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        cluster = Cluster(Path(folder), nodes=NODES, cpus=2)
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()
