"""The one plug point for users' code: a function given as ``path/to/file.py:name``."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError


def load_function(reference: str, key: str, arguments: Sequence[str]) -> Callable[..., Any]:
    """Import the function behind ``reference`` and check that it can be called with ``arguments``.

    ``key`` is the configuration key that messages name (``data.filter``); ``arguments`` are the names of the positional
    arguments it will get. The file is executed as a module of its own and may import its neighbours.
    Raises ConfigError: no ``file.py:name`` form, missing file, failing import, missing name, wrong arguments.
    """
    found = f"{key}={reference}"
    path_text, separator, name = reference.rpartition(":")
    if not separator or not path_text.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"{found}: not of the form path/to/file.py:name")
    path = Path(path_text).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{found}: there is no file {path}; give the path of an existing Python file")
    function = getattr(_import_file(path, found), name, None)
    if function is None:
        raise ConfigError(f"{found}: {path.name} defines no {name}; define it or correct the name")
    if not callable(function):
        raise ConfigError(f"{found}: {name} is a {type(function).__name__}, not a function")
    _check_arguments(function, arguments, found)
    return function


def _import_file(path: Path, found: str) -> Any:
    module_name = f"aligner_plugin_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle in the file look the module up
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        what = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise ConfigError(f"{found}: importing {path.name} failed: {what}; correct the file") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _check_arguments(function: Callable[..., Any], arguments: Sequence[str], found: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # built-ins without a signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        wanted = f"({', '.join(arguments)})"
        raise ConfigError(f"{found}: is called with {wanted} but takes {signature}: {error}") from error
