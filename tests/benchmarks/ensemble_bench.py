"""Ensembles of the example's nine networks over the best of them, on digits that nobody has seen.

python tests/benchmarks/ensemble_bench.py [--quick], or results.py ensembles for the table of docs/results.md
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demo_bench import hetctl
from tables import Table

from hetctl.model.exports import AVERAGES, BEST_MEMBER
from hetctl.model.seed_groups import spread_of

SEEDS = 10
SPLIT = """\
    images = (digits.images / 16.0).astype("float32")[..., None]
    rest, x_test, y_rest, y_test = train_test_split(
        images, digits.target, test_size=360, random_state={seed}, stratify=digits.target
    )
    x, x_validation, y, y_validation = train_test_split(
        rest, y_rest, test_size=360, random_state={seed}, stratify=y_rest
    )
    return ((x, y), (x_validation, y_validation)) if path != "test" else (x_test, y_test)
"""
"""End of the example's ``input_fn`` with 1,077 training, 360 validation and 360 held-out images."""
TESTED = """\
import importlib.util
import json
import sys

import keras

import digits

x, y = digits.input_fn("test")
found = {}
for way in sys.argv[2:]:
    spec = importlib.util.spec_from_file_location(way, f"{way}/predict.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    found[way] = float((module.predict_fn(x).argmax(1) == y).mean())
best = keras.models.load_model(sys.argv[1])
found["best member"] = float((best.predict(x, verbose=0).argmax(1) == y).mean())
print(json.dumps(found))
"""


def table(quick: bool = False) -> Table:
    """Train, choose by the validation images, and count on the held-out ones."""
    found = []
    with tempfile.TemporaryDirectory(prefix="hetctl-ensembles-", dir="/tmp") as name:
        for seed in range(2 if quick else SEEDS):
            found.append(_measured(Path(name), seed))
            print(seed, found[-1], flush=True)
    return table_of(found)


def table_of(found: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of seeds from 0 on."""
    rows = [
        (str(seed), *(f"{one[way]:.4f}" for way in (BEST_MEMBER, *AVERAGES)), one["expected"])
        for seed, one in enumerate(found)
    ]
    spreads = {way: spread_of([one[way] for one in found]) for way in (BEST_MEMBER, *AVERAGES)}
    gains = {way: spread_of([one[way] - one[BEST_MEMBER] for one in found]) for way in AVERAGES}
    rows += [
        ("mean", *(f"{spread.mean:.4f}" for spread in spreads.values() if spread), ""),
        (
            "gain, with its 95 % interval",
            "",
            *(
                f"{100 * gain.mean:+.2f} ± {100 * (gain.half_width or 0):.2f}"
                for gain in gains.values()
                if gain
            ),
            "",
        ),
    ]
    return Table(
        "Ensembles of the example over its best member, on held-out digits",
        ("seed", BEST_MEMBER, *AVERAGES, "greedy gain, by validation"),
        tuple(rows),
        (),
        f"`hetctl submit` trains the example's nine networks on 1,077 digits with two slots; `hetctl"
        " ensemble` chooses by 360 others, and what it wrote counts on 360 that nobody has seen. Each of"
        f" {len(found)} seeds draws its own three parts, first weights and order. Gains are in points of"
        " accuracy, with Student's t over the seeds. The last column is what `hetctl ensemble` said, in"
        " points, with its 95 % interval.",
    )


def _measured(parent: Path, seed: int) -> dict[str, Any]:
    folder = parent / str(seed)
    hetctl(parent, "init", folder.name, "--example", "digits")
    module, ensemble = folder / "digits.py", folder / "ensemble.yaml"
    text = module.read_text()
    begin, end = text.index("    images = ("), text.index("\n\ndef model_fn")
    module.write_text(text[:begin] + SPLIT.format(seed=seed) + text[end:])
    ensemble.write_text(ensemble.read_text().replace("seed: 7", f"seed: {seed}"))
    hetctl(folder, "submit", "--wait", "--json")
    for way in AVERAGES:
        said = hetctl(folder, "ensemble", "--way", way, "-o", way, "--json")
    hetctl(folder, "export", said["candidates"][0]["member"], "-o", "best.keras", "--json")
    done = subprocess.run(
        [sys.executable, "-c", TESTED, "best.keras", *AVERAGES],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    gain = next(one["gain"] for one in said["combinations"] if one["way"] == AVERAGES[0])
    expected = f"{100 * gain['mean']:+.2f} ({100 * gain['low']:+.2f} to {100 * gain['high']:+.2f})"
    return {**json.loads(done.stdout.splitlines()[-1]), "expected": expected}


if __name__ == "__main__":
    print(table("--quick" in sys.argv))
