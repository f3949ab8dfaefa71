"""The protocol of everything a run saves besides models: cursors, controllers, counters."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """A component whose state goes into every checkpoint.

    The state is a dictionary that JSON can hold exactly (string keys; dictionaries, lists, strings, integers,
    floats, booleans, None), and is the same on every rank.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state, as of the last finished step."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Become the component that :meth:`state_dict` was called on."""
        ...
