"""Who may import what: read from the source with ``ast``, so that lazy imports inside functions count too."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ORDER = [
    "errors",
    "config",
    "planning",
    "distributed",
    "monitoring",
    "data",
    "models",
    "weights",
    "checkpoint",
    "generation",
    "rewards",
    "rollout",
    "phases",
    "evaluation",
    "algorithms",
    "cli",
]
MEGATRON_FOLDERS = ("distributed", "models", "weights", "checkpoint")
CUDA_FOLDERS = ("distributed", "phases")
_LIGHT_COMMANDS = ("main", "launch", "help", "commands", "exit_codes", "options", "submit", "status", "checkpoint")
SOURCES = sorted((ROOT / "aligner").rglob("*.py"))


def _part(path: Path) -> str:
    """``aligner/config/schema.py`` -> ``config``; ``aligner/errors.py`` -> ``errors``."""
    first = path.relative_to(ROOT / "aligner").parts[0]
    return first.removesuffix(".py")


def _imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, module, inside a function) of every import; ``from a import b`` yields ``a.b`` too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, node in inside
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            yield node.lineno, str(node.module), node in inside
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}", node in inside


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_imports_go_left_to_right() -> None:
    wrong = []
    for path in SOURCES:
        part = _part(path)
        if part in ("__init__", "__main__"):
            continue
        assert part in ORDER, f"{_name(path)}: {part} has no place in the import order"
        for line, module, _ in _imports(path):
            words = module.split(".")
            if words[0] == "launchers" and part != "cli":
                wrong.append(f"{_name(path)}:{line}: {part} imports launchers")
            elif words[0] == "aligner" and words[1:2] and words[1] in ORDER[ORDER.index(part) + 1 :]:
                wrong.append(f"{_name(path)}:{line}: {part} imports {module}")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_package_root_imports_nothing() -> None:
    assert [module for _, module, _ in _imports(ROOT / "aligner" / "__init__.py") if "__future__" not in module] == []


def test_megatron_stays_in_its_places() -> None:
    wrong = [
        f"{_name(path)}:{line}: {module}"
        for path in SOURCES
        if _part(path) not in MEGATRON_FOLDERS and _part(path) != "generation"
        for line, module, _ in _imports(path)
        if module.split(".")[0] in ("megatron", "transformer_engine", "apex")
    ]
    # In generation/ only the Megatron engine and the files split from it know Megatron.
    wrong += [
        f"{_name(path)}:{line}: {module}"
        for path in SOURCES
        if _part(path) == "generation" and path.name in ("engine.py", "sampling.py", "__init__.py")
        for line, module, _ in _imports(path)
        if module.split(".")[0] == "megatron"
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_cuda_stays_in_its_places() -> None:
    wrong = []
    for path in SOURCES:
        if _part(path) in CUDA_FOLDERS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
                wrong.append(f"{_name(path)}:{node.lineno}: torch.cuda")
        wrong += [f"{_name(path)}:{line}: {m}" for line, m, _ in _imports(path) if m.startswith("torch.cuda")]
    assert not wrong, "\n".join(wrong)


def test_optional_engines_are_imported_inside_functions() -> None:
    wrong = [
        f"{_name(path)}:{line}: {module}"
        for path in SOURCES
        for line, module, inside in _imports(path)
        if module.split(".")[0] in ("vllm", "tensorrt_llm") and not inside
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", [part for part in ("config", "planning", "cli") if (ROOT / "aligner" / part).is_dir()])
def test_imports_without_torch(part: str) -> None:
    """All of config and planning, and of cli what runs before the ranks do."""
    folder = ROOT / "aligner" / part
    modules = [f"aligner.{part}.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    if part == "cli":
        modules = [f"aligner.cli.{name}" for name in _LIGHT_COMMANDS]
        modules += [f"launchers.{path.stem}" for path in sorted((ROOT / "launchers").glob("*.py"))]
    program = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
heavy = sorted(name for name in ("torch", "megatron", "transformers", "numpy") if name in sys.modules)
assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_no_file_without_a_subject() -> None:
    folders = [ROOT / name for name in ("aligner", "launchers", "tests", "slurm")]
    names = ("utils", "util", "helpers", "helper", "common", "misc")
    wrong = [_name(path) for folder in folders for path in folder.rglob("*") if path.stem in names]
    assert not wrong, f"name these after what they hold: {wrong}"


def test_every_package_travels_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES if path.name == "__init__.py"}
    folders |= {"launchers", "aligner.conf", "aligner.slurm"}
    assert sorted(settings["packages"]) == sorted(folders)
    assert settings["package-dir"] == {"aligner.conf": "conf", "aligner.slurm": "slurm"}
