"""``aligner checkpoint ls|show|verify|export|rm RUN [STEP]``: the checkpoints of a run, for people.

All but ``export`` answer without torch.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.checkpoint import manifest
from aligner.checkpoint.deletion import remove
from aligner.checkpoint.manifest import Manifest
from aligner.checkpoint.pins import pinned_steps
from aligner.cli.options import OptionParser
from aligner.config.keys import nearest
from aligner.config.sources import CHECKPOINTS_DIRECTORY
from aligner.errors import CheckpointError, ConfigError
from aligner.monitoring.lives import read_lives

_QUIET = ("timers/", "memory/", "throughput/", "checkpoint/")  # metrics that `show` leaves out
_STEP = "step number, or `latest`"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises AlignerError."""
    words = list(arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] not in ACTIONS:
        raise ConfigError(
            f"checkpoint {words[0]}: no such action; {nearest(words[0], ACTIONS)}available: {', '.join(ACTIONS)}"
        )
    return ACTIONS[words[0]][1](words[1:])


def _help() -> str:
    lines = ["usage: aligner checkpoint ACTION RUN [STEP] [options]", "", "actions:"]
    lines += [f"  {name:<{max(map(len, ACTIONS))}}  {summary}" for name, (summary, _) in ACTIONS.items()]
    return "\n".join([*lines, "", "`aligner checkpoint ACTION --help` lists what an action takes."])


def _parser(action: str, *, step: str | None = "?") -> OptionParser:
    summary = ACTIONS[action][0]
    parser = OptionParser(f"checkpoint {action}", f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("run", type=Path, help="run directory")
    if step == "?":
        parser.add_argument("step", nargs="?", help=f"{_STEP}; default: {'all' if action == 'verify' else 'latest'}")
    elif step:
        parser.add_argument("step", help=_STEP)
    return parser


# ------------------------------------------------------------------ actions


def _list(words: Sequence[str]) -> int:
    options = _parser("ls", step=None).parse_args(list(words))
    directory = _directory(options.run)
    rows = [("step", "saved", "size", "layout (TPxPPxDP)", "kept by", "sound by sizes")]
    pins, last = pinned_steps(directory), _newest_sound(directory)
    best = _best(last)
    all_lives = read_lives(options.run)
    for path in manifest.published(directory):
        problem = manifest.damage(path)
        try:
            found = manifest.parse(path)
        except CheckpointError:
            rows.append((path.name, "", "", "", "", f"no: {problem}"))
            continue
        kept = ["latest"] if path == last else []
        kept += [f"best {best['metric']} {best['value']:.4g}"] if best and best["step"] == found.step else []
        kept += ["continued from"] if all_lives and all_lives[-1].start_step == found.step else []
        kept += [f"pinned by {by}" for by in pins.get(found.step, [])]
        sound = f"no: {problem}" if problem else "yes"
        rows.append((str(found.step), _when(found), _size(found.bytes), _layouts(found), ", ".join(kept), sound))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _show(words: Sequence[str]) -> int:
    options = _parser("show").parse_args(list(words))
    path = _find(_directory(options.run), options.step or manifest.LATEST)
    found = manifest.parse(path)
    problem = manifest.damage(path)
    print(path)
    rows = {
        "saved": f"{_when(found)} by {found.world_size} rank{'s' * (found.world_size > 1)}",
        "size": f"{_size(found.bytes)} in {len(found.files)} files",
        "sound": f"no: {problem}" if problem else "yes, by sizes (checksums: `aligner checkpoint verify`)",
        "manifest": f"sha256 {manifest.digest(path)}",
        "layout": f"{_layouts(found)} (TPxPPxDP)",
    }
    if found.best:
        rows["best"] = "step {step}: {metric} {value:.6g} ({mode})".format(**found.best)
    _print_rows("", rows)
    _print_rows("components", {name: _component(entry) for name, entry in found.components.items()})
    identity = {name: value for name, value in found.identity.items() if name != "config"}
    _print_rows("identity (settings: config.yaml of the run)", dict(_flat(identity)))
    _print_rows("metrics", {k: f"{v:.6g}" for k, v in found.metrics.items() if not k.startswith(_QUIET)})
    _print_rows("written by", found.fingerprint)
    return 0


def _verify(words: Sequence[str]) -> int:
    options = _parser("verify").parse_args(list(words))
    directory = _directory(options.run)
    paths = [_find(directory, options.step)] if options.step else manifest.published(directory)
    damaged = []
    for path in paths:
        problem = _verify_one(path)
        print(f"{path.name}: {f'DAMAGED: {problem}' if problem else 'sound'}", flush=True)
        if problem:
            damaged.append(path.name)
    if damaged:
        raise CheckpointError(
            f"{len(damaged)} of {len(paths)} checkpoints in {directory} are damaged: {', '.join(damaged)}; "
            "training passes over them; remove them with `aligner checkpoint rm`, or bring them back from a copy"
        )
    return 0


def _verify_one(path: Path) -> str:
    """What is wrong with a checkpoint, all of it; every file is read. Says how far it is on a terminal."""
    try:
        found = manifest.read(path)
    except CheckpointError as error:
        return str(error).removeprefix(f"{path} is damaged: ")
    problems: list[str] = []
    done = 0
    for name, entry in found.files.items():
        _progress(f"{path.name}: {_size(done)} of {_size(found.bytes)}")
        problems += filter(None, [manifest.file_problem(path, name, entry)])
        done += entry[0]
    _progress("")
    return "; ".join(problems)


def _export(words: Sequence[str]) -> int:
    parser = _parser("export", step="required")
    parser.add_argument("target", type=Path, help="directory to write; it must not exist")
    parser.add_argument("--role", choices=["actor", "reward"], help="model of the run (default: actor, else reward)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="of the written weights (default: as trained)")
    options = parser.parse_args(list(words))
    path = _find(_directory(options.run), options.step)
    from aligner.cli import convert

    extra = [f"--{name}={value}" for name in ("role", "dtype") if (value := getattr(options, name))]
    return convert.main([str(path), str(options.target), *extra])


def _remove(words: Sequence[str]) -> int:
    parser = _parser("rm", step="required")
    parser.add_argument("--force", action="store_true", help="also the last sound one, and one that is pinned")
    options = parser.parse_args(list(words))
    directory = _directory(options.run)
    path = _find(directory, options.step)
    step = manifest.step_of(path)
    assert step is not None
    others = [other for other in manifest.published(directory) if other != path and not manifest.damage(other)]
    if not options.force:
        if by := pinned_steps(directory).get(step):
            raise CheckpointError(f"{path} is pinned by {', '.join(by)}, which needs it; add --force to remove it")
        if not others and not manifest.damage(path):
            raise CheckpointError(f"{path} is the only sound checkpoint of the run; add --force to remove it")
    if not remove(directory, step, even_pinned=options.force):
        raise CheckpointError(f"{path} was pinned just now, so it is kept; add --force to remove it")
    newest = _newest_sound(directory)
    if newest is not None:
        manifest.point_to(newest)
    print(f"removed {path}")
    return 0


ACTIONS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "ls": ("list the checkpoints of a run", _list),
    "show": ("print what a checkpoint consists of, what it belongs to, and what wrote it", _show),
    "verify": ("read every file and compare its checksum; exit code 5 when one is damaged", _verify),
    "export": ("write a Hugging Face directory (safetensors, tokenizer)", _export),
    "rm": ("remove a checkpoint", _remove),
}


# ------------------------------------------------------------------ finding


def _directory(run: Path) -> Path:
    directory = run / CHECKPOINTS_DIRECTORY
    if not directory.is_dir():
        raise CheckpointError(f"'{run}' has no {CHECKPOINTS_DIRECTORY}/; give the directory of a run that has saved")
    return directory


def _find(directory: Path, step: str) -> Path:
    paths = manifest.published(directory)
    if step == manifest.LATEST:
        if (found := _newest_sound(directory)) is not None:
            return found
        raise CheckpointError(f"{directory} holds no sound checkpoint; `aligner checkpoint ls` says why")
    digits = step.removeprefix("step_")
    if not digits.isdecimal():
        raise ConfigError(f"step {step}: give a {_STEP}")
    for path in paths:
        if manifest.step_of(path) == int(digits):
            return path
    found_steps = ", ".join(str(manifest.step_of(path)) for path in paths) or "none"
    raise CheckpointError(f"{directory} holds no checkpoint of step {int(digits)}; it holds {found_steps}")


def _newest_sound(directory: Path) -> Path | None:
    return next((path for path in reversed(manifest.published(directory)) if not manifest.damage(path)), None)


def _best(newest: Path | None) -> dict[str, Any] | None:
    return manifest.parse(newest).best if newest is not None else None


# ------------------------------------------------------------------ text


def _when(found: Manifest) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.time))


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _layouts(found: Manifest) -> str:
    return ", ".join(
        f"{name} {role.tp}x{role.pp}x{found.world_size // (role.tp * role.pp)}" for name, role in found.roles.items()
    )


def _component(entry: Mapping[str, Any]) -> str:
    if "tensors" not in entry:
        return str(entry["kind"])
    values = sum(math.prod(shape) for _, *shape in entry["tensors"].values())
    return f"{entry['kind']}, {len(entry['tensors'])} tensors, {values:,} values, {_size(entry['bytes'])}"


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(item)


def _print_rows(title: str, rows: Mapping[str, str]) -> None:
    if not rows:
        return
    if title:
        print(f"{title}:")
    width = max(map(len, rows))
    for name, text in rows.items():
        print(f"  {name:<{width}}  {text}")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
