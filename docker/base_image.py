"""What the base image of the GPU image brings, and that it is still there when this package has been installed.

    base_image.py record FILE                        versions of the installed distributions, and which modules import
    base_image.py constraints FILE CONSTRAINTS.TXT   pip constraints (stdout) that leave them alone
    base_image.py verify FILE                        exit code 1 when one of them has changed or imports no more

Runs in the image's Python: standard library and ``packaging`` only.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.version import InvalidVersion, Version

# Compiled against each other. The rest of what was compiled there is known by its local version (``2.9.0+70f53666``).
PROTECTED = re.compile(
    r"torch.*|.*triton|transformer-engine.*|apex|flash-attn.*|nvfuser.*|numpy|nvidia-.*|cuda-.*|cupy.*|tensorrt.*"
)
BASE_MODULES = ("torch", "numpy", "triton", "transformer_engine.pytorch", "apex", "flash_attn")
OUR_MODULES = ("megatron.core", "transformers", "tokenizers", "launchers", "aligner.cli.main")


def is_protected(name: str, version: str) -> bool:
    """Whether a distribution must keep its version: it was compiled for this image, or against what was."""
    return "+" in version or PROTECTED.fullmatch(name) is not None


def constraints(installed: dict[str, str], tested: dict[str, str]) -> list[str]:
    """Constraint lines for pip: protected ones stay; others stay too unless a requirement moves them, then at most to
    the tested version; what is missing comes in the tested version."""
    lines = []
    for name in sorted({*installed, *tested}):
        have, pin = installed.get(name), tested.get(name)
        if have is None:
            lines.append(f"{name}=={pin}")
        elif is_protected(name, have):
            lines.append(f"{name}=={have}")
        elif pin is not None and Version(have) <= Version(pin):
            lines.append(f"{name}>={have},<={pin}")
    return lines


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Protected distributions whose version is another one or which are gone."""
    return [
        f"{name} {version} has become {after.get(name, 'nothing')}"
        for name, version in sorted(before.items())
        if is_protected(name, version) and after.get(name) != version
    ]


def import_all(modules: tuple[str, ...]) -> tuple[dict[str, str], dict[str, str]]:
    """(module: its version, module: why it does not import). There may be no GPU where an image is built."""
    versions, failures = {}, {}
    for name in modules:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # whatever it is: a missing library is an OSError, a missing GPU a RuntimeError
            failures[name] = f"{type(error).__name__}: {error}"
            continue
        versions[name] = str(getattr(module, "__version__", ""))
        if name == "torch":
            versions["torch.version.cuda"] = str(module.version.cuda)
    return versions, failures


def installed_versions() -> dict[str, str]:
    """Normalized name of every installed distribution: version."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        if name and _is_valid(version):
            found.setdefault(_normalized(name), version)  # the first one of sys.path is the one that is imported
    return found


def read_pins(path: Path) -> dict[str, str]:
    """The ``name==version`` lines of a constraints file."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {_normalized(name): version for name, version in found}


def record(path: Path) -> None:
    versions, failures = import_all(BASE_MODULES)
    found = {"distributions": installed_versions(), "modules": versions, "not importable": failures}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, why in failures.items():
        print(f"the base image's {name} does not import here ({why}); it is not verified")


def verify(path: Path) -> list[str]:
    """What is wrong after the installation, one line each."""
    base = json.loads(path.read_text(encoding="utf-8"))
    wrong = changes(base["distributions"], installed_versions())
    versions, failures = import_all((*BASE_MODULES, *OUR_MODULES))
    wrong += [
        f"{name} {version} now reports {versions[name]}"
        for name, version in base["modules"].items()
        if name in versions and versions[name] != version
    ]
    expected = (*base["modules"], *OUR_MODULES)
    return wrong + [f"{name} does not import: {why}" for name, why in failures.items() if name in expected]


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_valid(version: str) -> bool:
    try:
        Version(version)
    except InvalidVersion:
        return False
    return True


def main(arguments: list[str]) -> int:
    match arguments:
        case ["record", path]:
            record(Path(path))
        case ["constraints", path, pins]:
            base = json.loads(Path(path).read_text(encoding="utf-8"))
            print("\n".join(constraints(base["distributions"], read_pins(Path(pins)))))
        case ["verify", path]:
            wrong = verify(Path(path))
            for line in wrong:
                print(f"error: {line}", file=sys.stderr)
            return 1 if wrong else 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
