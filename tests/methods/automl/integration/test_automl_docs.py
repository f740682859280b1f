from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[4] / "docs" / "automl.md"


def test_the_examples_of_the_page_work() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert names["best"].loss < 0.01
    assert names["restored"].done
    assert names["restored"].history.trials == names["procedure"].history.trials
