"""Members that are scripts of the user's own: their commands, and the variables that a rank sets for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*(?:\.\w+)*)\}")
"""Name in braces, also one with dots; other braces, as in JSON, are text."""
CHECKPOINT_DIR = "checkpoint_dir"
"""Placeholder of the folder for checkpoints, which is a scratch folder in a profile."""
BUILT_IN = frozenset({"name", "seed", "batch_size", CHECKPOINT_DIR})
"""Placeholders of all members; they take precedence over keys of a config."""


def unknown_placeholders(command: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """Return the placeholders of a command for which a config has no value, in their order."""
    named = dict.fromkeys(name for word in command for name in PLACEHOLDER.findall(word))
    return [name for name in named if name not in BUILT_IN and name not in config]


def filled(command: Iterable[str], values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of a command with values in place of placeholders; those other than text as JSON."""
    return tuple(PLACEHOLDER.sub(lambda found: _word(values[found[1]]), word) for word in command)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


PROGRESS_VARIABLE = "HETCTL_PROGRESS_FD"
"""Variable with the descriptor to which the script writes its reports, one line of JSON each."""
ANSWER_VARIABLE = "HETCTL_ANSWER_FD"
"""Variable with a descriptor that has one byte for each of these lines, after hetctl has judged it."""
STOP_VARIABLE = "HETCTL_STOP_FD"
"""Variable with a descriptor whose other end is closed when the script has to stop."""
RESUME_VARIABLE = "HETCTL_RESUME_FROM"
"""Variable with the newest checkpoint that the script has named in an earlier start."""
