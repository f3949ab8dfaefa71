"""``aligner checkpoint``: what people see of a run's checkpoints, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from aligner.checkpoint import manifest
from aligner.checkpoint.pins import pin
from aligner.cli.main import main
from aligner.monitoring.lives import begin_life
from tests.checkpoint.fake import fake_checkpoint

IDENTITY = {"command": "sft", "config": {"trainer": {"max_steps": 3}}, "sources": {"actor": {"path": "/models/x"}}}
BEST = {"metric": "val/loss", "mode": "min", "step": 2, "value": 0.25}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        fake_checkpoint(
            tmp_path / "checkpoints",
            step,
            identity=IDENTITY,
            best=BEST,
            metrics={"val/loss": 0.5, "timers/step": 7.0},
            fingerprint={"torch": "9.9"},
        )
    return tmp_path


def _call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def _steps(run: Path) -> list[int]:
    return [manifest.parse(path).step for path in manifest.published(run / "checkpoints")]


def test_ls(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = run / "checkpoints"
    pin(checkpoints / "step_00000001", by=str(run))
    (checkpoints / "step_00000003" / "state.json").unlink()
    fake_checkpoint(checkpoints, 4)
    (checkpoints / "step_00000004" / manifest.FILE).write_text("")
    begin_life(run, start_step=1)
    code, out, _ = _call(capsys, "ls", run)
    header, one, two, three, four = out.splitlines()
    assert code == 0 and header.split("  ")[0] == "step"
    assert (
        one.startswith("1 ")
        and f"continued from, pinned by {run}" in one
        and one.endswith("yes")
        and "actor 1x1x1" in one
    )
    assert "latest, best val/loss 0.25" in two and two.endswith("yes")
    assert three.endswith("no: file 'state.json' is missing")
    assert four.startswith("step_00000004") and "not a complete checkpoint" in four


def test_show(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _call(capsys, "show", run)
    assert code == 0 and out.splitlines()[0] == str(run / "checkpoints" / "step_00000003")
    for text in (
        "by 1 rank",
        f"sha256 {manifest.digest(run / 'checkpoints' / 'step_00000003')}",
        "model, 1 tensors, 25 values, 103 B",
        "counters  state",
        "sources.actor.path  /models/x",
        "val/loss  0.5",
        "torch  9.9",
        "step 2: val/loss 0.25 (min)",
    ):
        assert text in out, text
    assert "max_steps" not in out and "timers/" not in out
    assert _call(capsys, "show", run, 1)[1].startswith(str(run / "checkpoints" / "step_00000001"))


def test_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _call(capsys, "verify", run)
    assert code == 0 and out.splitlines() == [f"step_0000000{step}: sound" for step in (1, 2, 3)]
    (run / "checkpoints" / "step_00000002" / "actor" / ".metadata").write_bytes(b"indeX")
    (run / "checkpoints" / "step_00000003" / "rng_00000.pt").unlink()
    code, out, err = _call(capsys, "verify", run)
    one, two, three = out.splitlines()
    assert code == 5 and "2 of 3 checkpoints" in err and "step_00000002, step_00000003" in err
    assert one.endswith("sound") and "DAMAGED: file 'actor/.metadata' has changed" in two
    assert "DAMAGED: file 'rng_00000.pt' is missing" in three
    assert _call(capsys, "verify", run, "latest")[0] == 5, "the newest that is sound by sizes is step 2"
    assert _call(capsys, "verify", run, "step_00000001")[0] == 0


def test_rm(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pin(run / "checkpoints" / "step_00000001", by="an evaluation", heartbeat=True):
        code, _, err = _call(capsys, "rm", run, 1)
        assert code == 5 and "pinned by an evaluation" in err and "--force" in err and 1 in _steps(run)
        assert _call(capsys, "rm", run, 1, "--force")[0] == 0
    assert _call(capsys, "rm", run, "latest")[1] == f"removed {run / 'checkpoints' / 'step_00000003'}\n"
    assert _steps(run) == [2]
    code, _, err = _call(capsys, "rm", run, 2)
    assert code == 5 and "the only sound checkpoint" in err and _steps(run) == [2]
    damaged = fake_checkpoint(run / "checkpoints", 9)
    (damaged / "state.json").unlink()
    assert _call(capsys, "rm", run, 2)[0] == 5, "another that is damaged does not count"
    assert _call(capsys, "rm", run, 9)[0] == 0
    assert _call(capsys, "rm", run, 2, "--force")[0] == 0 and _steps(run) == []
    assert not list((run / "checkpoints").glob(".tmp-*"))


def test_export_is_a_conversion(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr("aligner.cli.convert.main", lambda words: called.append(words) or 0)
    assert _call(capsys, "export", run, 2, "there", "--role", "actor")[0] == 0
    assert called == [[str(run / "checkpoints" / "step_00000002"), "there", "--role=actor"]]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["lst"], 2, "nearest: ls"),
        (["frobnicate"], 2, "error: checkpoint frobnicate: no such action; available: "),
        (["ls"], 2, "required: run"),
        (["ls", "RUN", "--all"], 2, "unrecognized arguments: --all"),
        (["rm", "RUN"], 2, "required: step"),
        (["export", "RUN", "1"], 2, "required: target"),
        (["show", "RUN", "one"], 2, "give a step number, or `latest`"),
        (["show", "RUN", "7"], 5, "no checkpoint of step 7; it holds 1, 2, 3"),
        (["export", "RUN", "7", "there"], 5, "no checkpoint of step 7"),
        (["ls", "/nowhere"], 5, "'/nowhere' has no checkpoints/"),
    ],
)
def test_what_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    found, out, err = _call(capsys, *[str(run) if word == "RUN" else word for word in words])
    assert found == code and message in err and err.startswith("error: ") and not out


def test_help_lists_the_actions(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"]):
        code, out, _ = _call(capsys, *words)
        assert code == 0 and all(action in out for action in ("ls", "show", "verify", "export", "rm"))
    with pytest.raises(SystemExit):
        main(["checkpoint", "verify", "--help"])
    assert "exit code 5 when one is damaged" in " ".join(capsys.readouterr().out.split())
