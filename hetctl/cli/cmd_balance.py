"""``hetctl balance`` and its sub-command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hetctl.cli.options import command_line_options, json_option
from hetctl.cli.output import print_json, print_table
from hetctl.model.serialization import encode
from hetctl.model.training_settings import MANAGERS, PREDICTORS

MOST_SAMPLES, MOST_ITERATIONS = 1_000_000_000, 100_000


class ChangeType(click.ParamType):  # type: ignore[type-arg]
    """Option ``150:slower.csv``: from iteration 150 on, workers have the times in that file."""

    name = "change"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, Path]:
        """Parse the number before the colon."""
        if isinstance(value, tuple):
            return value
        number, colon, path = value.partition(":")
        if not (colon and path and number.isascii() and number.isdecimal() and len(number) < 10):
            self.fail(f"{value} is not ITERATION:FILE, as in 150:slower.csv", param, ctx)
        return int(number), Path(path)


@click.group("balance")
def command() -> None:
    """Balance the batches of workers with different speeds.

    \b
    Example: hetctl balance simulate --workers workers.csv --batch 128 --iterations 100
    """


@command.command("simulate")
@click.option(
    "--workers",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read step times from a CSV file with the columns worker,batch,seconds[,max_batch].",
)
@click.option(
    "--batch",
    metavar="N",
    type=click.IntRange(1, MOST_SAMPLES),
    help="Train on N samples in each iteration, on all workers together.",
)
@click.option(
    "--iterations",
    metavar="N",
    type=click.IntRange(1, MOST_ITERATIONS),
    default=100,
    show_default=True,
    help="Simulate N iterations.",
)
@click.option(
    "--algorithm",
    type=click.Choice(MANAGERS),
    default="curve",
    show_default=True,
    help="Set the batches with this algorithm.",
)
@click.option(
    "--predictor",
    type=click.Choice(PREDICTORS),
    default="narx",
    show_default=True,
    help="Predict speeds with this predictor, for --algorithm cpu.",
)
@click.option(
    "--change",
    "changes",
    type=ChangeType(),
    metavar="ITERATION:FILE",
    multiple=True,
    help="Use the step times in FILE from an iteration on. May be given several times.",
)
@click.option(
    "--jitter",
    metavar="SHARE",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Vary each worker's step time with this standard deviation, as a share of it.",
)
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed random numbers.",
)
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Repeat the decisions of a real run from its log, instead.",
)
@json_option
@click.pass_context
def simulate(context: click.Context, /, replay: Path | None, as_json: bool, **options: Any) -> None:
    """Simulate iterations of workers with different speeds, and balance their batches.

    \b
    Example: hetctl balance simulate --workers workers.csv --batch 128 --iterations 100 --algorithm curve

    All start with equal batches. After each iteration the algorithm sets those of the next one.
    """
    if replay is not None:
        _replay(context, replay, as_json=as_json)
        return
    for name in ("workers", "batch"):
        if options[name] is None:
            raise click.UsageError(f"Missing option '--{name}'.", context)
    if options["algorithm"] != "cpu" and "predictor" in command_line_options(context):
        raise click.UsageError("--predictor requires --algorithm cpu", context)
    from hetctl.app.balance import BalanceRequest, simulate_balancing

    fields = encode(simulate_balancing(BalanceRequest(**options)))
    if as_json:
        print_json(fields)
        return
    from hetctl.reports.simulation_tables import balance_table

    print_table(balance_table(fields))


def _replay(context: click.Context, log: Path, *, as_json: bool) -> None:
    if others := set(command_line_options(context)) - {"replay", "as_json"}:
        raise click.UsageError(f"--replay does not go with --{sorted(others)[0]}", context)
    from hetctl.app.balance import replay_balancing

    found = replay_balancing(log)
    if as_json:
        print_json(encode(found))
    else:
        from hetctl.reports.simulation_tables import replay_table

        print_table(replay_table(encode(found)))
    if not found.equal:
        context.exit(1)
