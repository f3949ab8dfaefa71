"""Wall-clock durations as Slurm writes them."""

from __future__ import annotations

import re

from aligner.errors import ConfigError

_FORM = re.compile(r"(?:(?P<days>\d{1,9})-)?(?P<parts>\d{1,9}(?::\d{1,9}){0,2})", re.ASCII)


def parse_duration(text: str, key: str = "trainer.max_time") -> float:
    """Seconds of ``text``: ``90`` (seconds), ``MM:SS``, ``HH:MM:SS``, or with days ``D-HH[:MM[:SS]]``.

    Raises:
        ConfigError: another form, a part of 60 or more behind a larger one, or no time at all; names ``key``.
    """
    found = _FORM.fullmatch(str(text).strip())
    if found is None:
        raise _refused(key, text, "must be seconds, [HH:]MM:SS or D-HH[:MM[:SS]]")
    parts = [int(part) for part in found["parts"].split(":")]
    if found["days"] is not None:
        days = int(found["days"])
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        leading = hours < 24
    else:
        days = 0
        hours, minutes, seconds = (0, 0, *parts)[-3:]
        leading = True
    largest = len(parts) == 1 or (len(parts) == 2 and found["days"] is None)
    if not leading or seconds >= 60 and len(parts) > 1 or minutes >= 60 and not largest:
        raise _refused(key, text, "must have fewer than 24 hours, 60 minutes and 60 seconds behind a larger part")
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise _refused(key, text, "must be more than 0")
    return float(total)


def _refused(key: str, text: object, rule: str) -> ConfigError:
    return ConfigError(f"{key}={text!r} {rule}; for example {key}=1:30:00 for an hour and a half")
