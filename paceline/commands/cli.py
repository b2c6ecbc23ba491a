"""The command ``paceline``: it parses, calls the library, and prints for people or (``--json``) for machines."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from paceline.commands.compare import compare
from paceline.commands.options import (
    PathType,
    check_problem_name,
    codec_option,
    delay_options,
    free_directory,
    needs_server,
    processes_per_worker,
    read_delay,
    servers_option,
)
from paceline.commands.replay import replay
from paceline.commands.report import report
from paceline.commands.run import run, serve
from paceline.commands.sparse import (
    NAMES,
    OWN,
    check_resumed_problem,
    not_a_run,
    refuse_sparse_options,
    saved_sparse,
    sparse_options,
    train_sparse_problem,
)
from paceline.commands.watch import watch
from paceline.errors import CommError, PacelineError, UsageError, unknown_name
from paceline.interrupts import INTERRUPTED, Interrupts, StopRequest, answered, end_at_once
from paceline.launch.environment import read_world
from paceline.launch.reports import supervised
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.launch.service import ServerOptions
    from paceline.problems import Problem
    from paceline.studies import Study
    from paceline.training.train import TrainConfig

# torch takes seconds to import; what needs it is imported inside the commands, so that --help is instant.


class _Command(click.Group):
    """A group that suggests the nearest known name for an unknown subcommand."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            shown = [name for name, command in self.commands.items() if not command.hidden]
            raise click.UsageError(str(unknown_name("command", args[0], shown)))
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Command,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="paceline")
@click.pass_context
def cli(context: click.Context) -> None:
    """Train one PyTorch model on many workers; how they keep pace is a value you pass in."""
    if context.invoked_subcommand is None:
        print(context.get_help())
    elif context.invoked_subcommand in ("simulate", "study"):  # both import torch to know their options
        context.with_resource(answered(end_at_once, signal.SIGINT))


cli.add_command(run)
cli.add_command(serve)
cli.add_command(replay)
cli.add_command(compare)
cli.add_command(report)
cli.add_command(watch)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command; a usage error prints one line on stderr and exits with 2, a failed run with 1."""
    try:
        code = cli.main(args=arguments, standalone_mode=False)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except PacelineError as error:
        if supervised():  # its supervisor shows the failure, once for all workers
            raise
        _fail(str(error), 2 if isinstance(error, UsageError) else 1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _fail(f"{error.strerror}: {error.filename or 'a file of the run'}; free some space and resume", 1)
    except (KeyboardInterrupt, click.Abort):
        if supervised():  # the supervisor prints the message
            sys.exit(130)
        _fail("interrupted", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    print(f"paceline: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


@cli.command()
@click.argument("problem", default="digits")
@click.option("--model", help="Another model than the problem's own.")
@click.option("--data", type=PathType(), envvar="PACELINE_DATA", help="Where the data lies.  [PACELINE_DATA]")
@click.option("--normalise", is_flag=True, help="Give images the mean 0 and the deviation 1.")
@click.option("--xavier", is_flag=True, help="Fill the model's weights by Xavier's rule.")
@click.option("--workers", type=int, default=1, show_default=True, help="Processes on this host.")
@click.option("--policy", default="all-reduce", show_default=True, help="How the workers keep pace.")
@codec_option
@servers_option
@delay_options
@click.option("--attack", help='What hostile workers push, such as "sign-flip(scale=10)".')
@click.option("--hostile", type=int, default=0, show_default=True, help="Workers that attack, from worker 0.")
@click.option("--optimizer", help='Such as "sgd(lr=0.1, momentum=0.9)".')
@click.option("--batch-size", type=int, help="Examples in a step of one worker.")
@click.option("--epochs", type=int)
@click.option("--max-steps", type=int, help="Stop after this many updates.")
@click.option("--base-batch", type=int, help="Batch the rate was tuned for: scales it linearly to this run's.")
@click.option("--warmup", default="none", show_default=True, help="none, constant or gradual.")
@click.option("--warmup-epochs", type=float, default=5.0, show_default=True)
@click.option("--warmup-start", type=float, help="Share of the rate to start from.  [default: before scaling]")
@click.option(
    "--decay", default="none", show_default=True, help="none, step or cosine; of sparse problems a factor, such as 0.9."
)
@click.option("--decay-epochs", default="30,60,80", show_default=True, help="Where step decay multiplies the rate.")
@click.option("--decay-factor", type=float, default=0.1, show_default=True)
@click.option("--clip-norm", type=float, help="Clip gradients to this norm.")
@click.option("--precision", default="fp32", show_default=True, help="fp32, or bf16 by autocast.")
@click.option("--device", default="auto", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--run", type=PathType(), help="Directory of the run.  [default: runs/PROBLEM-N]")
@click.option("--resume", type=PathType(), help="Go on with the run in this directory, with its options.")
@click.option(
    "--save-every",
    type=int,
    help="Updates between checkpoints.  [default: one epoch; sparse problems: the first epoch, then one after 5 s]",
)
@click.option("--keep", type=int, default=3, show_default=True, help="Checkpoints that stay.")
@click.option("--log-every", type=int, default=1, show_default=True, help="Updates between lines of metrics.")
@click.option("--on-nan", default="stop", show_default=True, help="stop, skip or ignore a loss that is not finite.")
@sparse_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.pass_context
def train(
    context: click.Context,
    /,
    workers: int,
    servers: int,
    respawn: bool,
    delay: str | None,
    delay_unit: str | None,
    resume: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a built-in PROBLEM, or the one that a Python file makes (path/to/file.py).

    svm, matrix-completion and graph-cut are sparse problems, which threads of one process train.
    """
    given = _typed(context, context.params)
    saved = saved_sparse(resume) if resume is not None else None
    if resume is not None:
        check_resumed_problem(resume, given.get("problem"))
    if saved is not None or (resume is None and options["problem"] in NAMES):
        if not _is_on_command_line(context, "data"):  # PACELINE_DATA is a directory, and these want a file
            given.pop("data", None)
        try:
            train_sparse_problem({**given, "problem": options["problem"]}, saved, _free_run)
        except KeyboardInterrupt as error:
            _fail(str(error) or "interrupted", INTERRUPTED)
        return
    refuse_sparse_options(given, options["problem"])
    if resume is None:
        check_problem_name(options["problem"], *NAMES)
    for name in OWN:
        del options[name]
    asking = "--servers" if servers > 1 else None
    if resume is None:
        needs_server(options["policy"], asking, workers)  # before torch is imported
    from paceline.launch.service import ServerOptions
    from paceline.threads import one_thread
    from paceline.training.threads import wants_one_thread
    from paceline.training.train import TrainConfig, check_config, load_config_problem

    if resume is not None:
        launch = {"workers": workers, "servers": servers, "delay": delay, "delay_unit": delay_unit}
        given = _typed(context, {**options, **launch})
        options = {**_saved_options(resume), **given, "run": resume, "resume": True}
        workers, servers, delay, delay_unit = (options.pop(name) for name in launch)
    if workers < 1:
        raise UsageError(f"--workers must be at least 1, got {workers}")
    schedule = _schedule_config(options)
    config = TrainConfig(schedule=schedule, **options)
    problem = load_config_problem(config)
    check_config(config, problem, workers, servers)
    small = wants_one_thread(config.problem, problem, config.batch_size or problem.recipe.batch_size)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if small else None
    if read_world() is None:  # else a launcher has started all processes
        config = _settle_learners(config, workers, environment)
        workers *= processes_per_worker(config.policy, workers)
    server = ServerOptions(
        needed=needs_server(config.policy, asking, workers),
        respawn=respawn,
        delay=read_delay(delay, delay_unit, workers),
        servers=servers,
    )
    config = dataclasses.replace(config, run=config.run or _free_run(problem.name))
    try:
        if workers == 1 and servers == 1 and not respawn and delay is None:
            with one_thread() if small else contextlib.nullcontext():
                result = _train_here(config, problem, as_json)
        else:
            result = _train_on(workers, config, server, as_json, environment)
    except KeyboardInterrupt:
        begun = (Path(str(config.run)) / "config.json").exists()
        _fail(f"interrupted; go on with: paceline train --resume {config.run}" if begun else "interrupted", 130)
    if as_json:
        print(json.dumps({n: None if v != v or v in (math.inf, -math.inf) else v for n, v in result.items()}))
        return
    goal = "" if result["target"] is None else f" (target {result['target']:g})"
    spent = f"after {result['steps']} steps in {result['seconds']:.1f} s"
    if result["resumed_at"] == result["steps"]:
        spent = f"after {result['steps']} steps; the run was finished already"
    print(f"{result['problem']}: {result['metric']} {result['value']:.4f}{goal} {spent}")
    print(f"run: {result['run']}")


def _train_here(config: TrainConfig, problem: Problem, quiet: bool) -> dict[str, Any]:
    """Train in this process."""
    from paceline.report.terminal import ProgressLine
    from paceline.training.train import train as train_problem

    with StopRequest().heard() as request, contextlib.ExitStack() as stack:
        watch = None if quiet else stack.enter_context(ProgressLine(problem.name))
        return train_problem(config, problem, watch, lambda: request.asked).as_dict()


def _train_on(
    workers: int, config: TrainConfig, server: ServerOptions, quiet: bool, environment: dict[str, str] | None
) -> dict[str, Any]:
    """Train on several workers."""
    from paceline.report.terminal import ProgressLine
    from paceline.training.on_workers import WorkersFailed, train_on_workers

    with contextlib.ExitStack() as stack:
        line = None if quiet else stack.enter_context(ProgressLine(f"{config.problem} x {workers}"))
        try:
            return train_on_workers(config, workers, server, environment=environment, watch=line)
        except WorkersFailed as failed:  # the supervisor has said why
            sys.exit(failed.code)


def _settle_learners(config: TrainConfig, workers: int, environment: dict[str, str] | None) -> TrainConfig:
    """Find how many learners each worker should have, if the policy leaves that open."""
    from paceline.commands.learners import settle_learners
    from paceline.training.on_workers import worker_command

    def command(policy: str) -> list[str]:
        return worker_command(dataclasses.replace(config, policy=policy))

    return dataclasses.replace(config, policy=settle_learners(config.policy, workers, command, environment))


@cli.command("train-worker", hidden=True)
@click.argument("config")
def train_worker(config: str) -> None:
    """Be one worker of ``paceline train --workers N``; only its supervisor calls this."""
    from paceline.launch.reports import report
    from paceline.training.train import Progress, TrainConfig
    from paceline.training.train import train as train_problem

    last = 0.0

    def watch(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= 0.1 or progress.step == progress.total_steps:
            last = time.monotonic()
            report("progress", step=progress.step, progress=dataclasses.asdict(progress))

    with StopRequest().heard() as request:
        whole = TrainConfig.from_dict(json.loads(config))
        try:
            result = train_problem(whole, watch=watch, stop=lambda: request.asked)
        except CommError as error:
            if request.asked:  # worker 0 has saved and ended
                raise KeyboardInterrupt from error
            raise
    report("result", result=result.as_dict())


def _schedule_config(options: dict[str, Any]) -> Any:
    """Take the schedule's options out of ``options``."""
    from paceline.schedules import ScheduleConfig

    taken = {field.name: options.pop(field.name) for field in dataclasses.fields(ScheduleConfig)}
    try:
        epochs = tuple(float(epoch) for epoch in str(taken["decay_epochs"]).split(",") if epoch.strip())
    except ValueError as error:
        raise UsageError(
            f"--decay-epochs wants numbers separated by commas, such as 30,60,80, got {taken['decay_epochs']!r}"
        ) from error
    return ScheduleConfig(**{**taken, "decay_epochs": epochs})


def _typed(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """The options that the user gave, without defaults."""
    default = click.core.ParameterSource.DEFAULT
    return {name: value for name, value in options.items() if context.get_parameter_source(name) != default}


def _is_on_command_line(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE


_LAUNCH: dict[str, Any] = {"servers": 1, "delay": None, "delay_unit": None}  # of a run in one process


def _saved_options(run: str) -> dict[str, Any]:
    """Read the options of a run of ``paceline train``, with its number of workers and servers, and their delay."""
    from paceline.schedules import ScheduleConfig
    from paceline.training.train import TrainConfig

    file = Path(run) / "config.json"
    try:
        config = json.loads(file.read_text())
        saved: dict[str, Any] = dict(config["train"])
        processes = int(config["world_size"]) // processes_per_worker(saved["policy"])
        others_start = read_world() is not None  # another launcher: it has started all processes, as it wants them
        launch = {} if others_start else {name: config[name] for name in _LAUNCH if name in config}
        schedule = dict(saved.pop("schedule"))
        schedule["decay_epochs"] = ",".join(str(epoch) for epoch in schedule["decay_epochs"])
        known = {field.name for kind in (TrainConfig, ScheduleConfig) for field in dataclasses.fields(kind)}
        if not {*saved, *schedule, "schedule"} <= known:
            raise ValueError("options of another version")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise not_a_run(file) from error
    return {**saved, **schedule, **_LAUNCH, **launch, "workers": 1 if others_start else processes}


def _free_run(problem: str) -> str:
    return str(free_directory("run", lambda number: f"runs/{problem}-{number}"))


class _Studies(click.Group):
    """The studies as subcommands; their table needs torch, so it is imported only when used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from paceline.studies import STUDIES

        return list(STUDIES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command:
        from paceline.studies import STUDIES
        from paceline.studies.options import command_options

        if name not in STUDIES:
            raise click.UsageError(str(unknown_name("study", name, STUDIES)))
        study = STUDIES[name]
        run = functools.partial(_run_study, study, f"study-{name}")
        options = [*command_options(study), *_study_options(f"study-{name}")]
        return click.Command(name, callback=run, params=options, help=study.__doc__, short_help=study.title)


@cli.group(cls=_Studies, invoke_without_command=True)
@click.pass_context
def study(context: click.Context) -> None:
    """Measure a published figure or table again."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def _study_options(folder: str) -> list[click.Parameter]:
    return [
        click.Option(
            ["--data"],
            type=PathType(path_type=Path),
            envvar="PACELINE_DATA",
            help="Where the data lies.  [PACELINE_DATA]",
        ),
        click.Option(["--seed"], type=int, default=0, show_default=True),
        click.Option(
            ["--out"],
            type=PathType(path_type=Path),
            help="Directory for result.json, table.md and plot.png.  "
            f"[default: the first of {folder}, {folder}-2, ... that does not exist]",
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON object instead."),
    ]


def _run_study(kind: type[Study], folder: str, /, **options: Any) -> None:
    """Run a study and show its results; after an interrupt, those measured so far."""
    interrupts = Interrupts()
    with interrupts.heard():
        try:
            _show_study(kind, folder, interrupts, **options)
        except KeyboardInterrupt as error:
            _fail(str(error) or "interrupted", INTERRUPTED)
    if interrupts.asked:
        _fail("interrupted after all measurements; the results are complete", INTERRUPTED)


def _show_study(
    kind: type[Study],
    folder: str,
    interrupts: Interrupts,
    /,
    data: Path | None,
    seed: int,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    from paceline.report.terminal import progress_bar
    from paceline.studies import StudyContext
    from paceline.studies.files import check_folder, write_result
    from paceline.studies.terminal import print_table

    study = kind(**options)
    check_folder(out or Path())
    with progress_bar() as tell:
        result = study.run(StudyContext(data=data, seed=seed, tell=tell, interrupts=interrupts))
    interrupts.show_results()
    # Print even if writing fails, and write before printing: the disk may be full, or stdout a closed pipe.
    try:
        out = out or free_directory("out", lambda number: folder if number == 1 else f"{folder}-{number}")
        write_result(result, out)
    finally:
        if as_json:
            print(json.dumps(result.as_dict(), allow_nan=False))
        else:
            print_table(result)
    if not as_json:
        print(f"result.json, table.md, plot.png: {out}")
    if result.missing is not None:
        _fail(result.missing, INTERRUPTED if result.interrupted else 1)


class _Simulate(click.Command):
    """The command whose options are the fields of ``Simulation``, which is imported only when used."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*_simulate_options(), *super().get_params(ctx)]


@functools.cache
def _simulate_options() -> list[click.Parameter]:
    from paceline.studies.options import command_options
    from paceline.studies.simulation import Simulation

    return [*command_options(Simulation), *_study_options("simulation")]


@cli.command(cls=_Simulate)
def simulate(**options: Any) -> None:
    """Try policies on a virtual cluster of any size, with or without real gradients.

    \b
      paceline simulate --policies "sync,k-sync(k=96)" --workers 100
      paceline simulate --policies sync,async --workers 1,10,100,1000 --delays "1+exp(0.5),exp(1) slow(0, 5)"
      paceline simulate --policies all-reduce,sync --workers 8,64 --link "50us 10Gbit/s" --size 100MB
      paceline simulate --problem digits --policies "sync,async,ada-sync(window=20)" --target 0.9
    """
    from paceline.studies.simulation import Simulation

    _run_study(Simulation, "simulation", **options)


@cli.group(cls=_Command, invoke_without_command=True)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure on this machine: Paceline against Gloo and others, in one run."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench.command("collectives")
@click.option("--ranks", type=int, multiple=True, default=(2, 4), show_default=True)
@click.option("--seconds", type=float, default=1.0, show_default=True, help="To spend on each way and size.")
@click.option("--busy", type=int, default=0, show_default=True, help="Busy loops to run beside the ranks.")
@click.option("--quick", is_flag=True, help="A run of seconds, to see that it works; measures nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def bench_collectives(ranks: tuple[int, ...], seconds: float, busy: int, quick: bool, as_json: bool) -> None:
    """Time all-reduce through shared memory, through Gloo and, if mpi4py is installed, through MPI."""
    from paceline.bench import run_bench
    from paceline.bench.busy import busy_loops
    from paceline.bench.collectives import SIZES, measure_mpi
    from paceline.report.table import print_table

    _check_ranks(ranks)
    if not 0 < seconds < math.inf:
        raise UsageError(f"--seconds must be above 0 and finite, got {seconds:g}")
    sizes = SIZES[:2] if quick else SIZES
    rows = []
    for count in ranks:
        with busy_loops(busy):
            measured = run_bench("collectives", count, sizes=sizes, seconds=0.0 if quick else seconds)
            mpi = measure_mpi(count, sizes)
        for row in measured:
            row["mpi_us"] = mpi[sizes.index(row["bytes"])] if mpi and row["buffers"] == "hot" else None
        rows += measured
    if as_json:
        print(json.dumps({"busy": busy, "rows": rows}))
        return
    columns = {"ranks": "d", "bytes": "d", "buffers": "", "ours_us": ".1f", "any_us": ".1f", "gloo_us": ".1f"}
    if any(row["mpi_us"] is not None for row in rows):
        columns["mpi_us"] = ".1f"
    print_table(rows, {**columns, "ours_ratio": ".1f", "any_ratio": ".1f", "bandwidth_share": ".0%"})


@bench.command("step")
@click.option("--models", multiple=True, default=("mlp", "net3", "cnn", "gpt"), show_default=True)
@click.option("--rounds", type=int, default=10, show_default=True)
@click.option("--steps", type=int, default=10, show_default=True, help="Of each way in each round.")
@click.option("--quick", is_flag=True, help="A run of seconds, to see that it works; measures nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def bench_step(models: tuple[str, ...], rounds: int, steps: int, quick: bool, as_json: bool) -> None:
    """Time a training step on two workers against the same step with only a barrier."""
    from paceline.bench import run_bench
    from paceline.report.table import print_table

    _check_models(models)
    if min(rounds, steps) < 1:
        raise UsageError(f"--rounds and --steps must be at least 1, got {rounds} and {steps}")
    if quick:
        models, rounds, steps = ("net3",), 2, 2
    rows = run_bench("step", 2, models=models, rounds=rounds, steps=steps)
    if as_json:
        print(json.dumps({"rounds": rounds, "steps": steps, "rows": rows}))
        return
    ratios = {"over_barrier": ".3f", "over_gloo": ".3f"}
    print_table(rows, {"model": "", "megabytes": ".1f", "batch": "d", "way": "", "step_ms": ".2f", **ratios})


@bench.command("codecs")
@click.option("--models", multiple=True, default=("mlp", "net3"), show_default=True)
@click.option("--links", multiple=True, default=("10Gbit/s", "1Gbit/s", "100Mbit/s", "10Mbit/s"), show_default=True)
@click.option("--rounds", type=int, default=15, show_default=True, help="Of encoding and decoding.")
@click.option("--steps", type=int, default=3, show_default=True, help="Of each codec on each link.")
@click.option("--quick", is_flag=True, help="A run of seconds, to see that it works; measures nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def bench_codecs(
    models: tuple[str, ...], links: tuple[str, ...], rounds: int, steps: int, quick: bool, as_json: bool
) -> None:
    """Time all codecs on one core, against torch's own hooks; then whole steps on this host and over links."""
    from paceline.bench import run_bench
    from paceline.bench.codec_steps import over_links
    from paceline.bench.codecs import CODECS
    from paceline.quantities import BANDWIDTHS, read_quantity
    from paceline.report.table import print_table

    _check_models(models)
    if min(rounds, steps) < 1:
        raise UsageError(f"--rounds and --steps must be at least 1, got {rounds} and {steps}")
    for link in links:
        read_quantity(link, BANDWIDTHS)
    if quick:
        models, links, rounds, steps = ("net3",), links[:1], 1, 1
    rows = run_bench("codecs", 1, models=models, rounds=rounds)
    options = {"models": models, "codecs": CODECS, "rounds": steps}
    found = over_links(run_bench("codec-steps", 2, **options, links=()), links, **options)
    if as_json:
        print(json.dumps({"rounds": rounds, "rows": rows, "steps": found.rows, "modelled": found.modelled}))
        return
    rates = {"encode_gb_s": ".2f", "decode_gb_s": ".2f", "reduce_ms": ".2f"}
    print_table(rows, {"model": "", "megabytes": ".1f", "way": "", "bytes": "d", "ratio": ".1f", **rates})
    how = "measured" if found.modelled is None else f"by the link model: {found.modelled}"
    print(f"\nA step of all-reduce on two workers, in ms: on this host, and over links ({how})")
    table = [{**row, **row["links"], "pays below": row["pays_below"]} for row in found.rows]
    print_table(
        table,
        {"model": "", "way": "", "bytes": "d", "step_ms": ".1f", **dict.fromkeys(links, ".1f"), "pays below": ""},
    )


@bench.command("server")
@click.option("--rounds", type=int, default=7, show_default=True)
@click.option("--trips", type=int, default=30, show_default=True, help="Round trips of each way in each round.")
@click.option("--quick", is_flag=True, help="A run of seconds, to see that it works; measures nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def bench_server(rounds: int, trips: int, quick: bool, as_json: bool) -> None:
    """Time push and pull with a parameter server against torch.distributed.rpc."""
    from paceline.bench import run_bench
    from paceline.bench.server import SIZES
    from paceline.report.table import print_table

    if min(rounds, trips) < 1:
        raise UsageError(f"--rounds and --trips must be at least 1, got {rounds} and {trips}")
    if quick:
        rounds, trips = 1, 2
    options = {"sizes": SIZES[:1] if quick else SIZES, "rounds": rounds, "trips": trips}
    rows = [row for over_tcp in (False, True) for row in run_bench("server", 2, **options, over_tcp=over_tcp)]
    (rate,) = run_bench("server-rate", 3 if quick else 4, seconds=0.1 if quick else 5.0)
    if as_json:
        print(json.dumps({"rounds": rounds, "trips": trips, "rows": rows, "rate": rate}))
        return
    print_table(rows, {"bytes": "d", "way": "", "trip_us": ".0f", "per_second": ".0f", "rpc_ratio": ".2f"})
    together = f"{rate['workers']} workers of {rate['bytes']} bytes at once"
    print(f"{together}: {rate['pushes_per_second']:.0f} pushes a second")


def _check_models(models: Sequence[str]) -> None:
    from paceline.bench.workloads import WORKLOADS

    for model in models:
        if model not in WORKLOADS:
            raise unknown_name("model", model, WORKLOADS)


def _check_ranks(ranks: Sequence[int]) -> None:
    if min(ranks) < 2:
        raise UsageError(f"--ranks must be at least 2, got {min(ranks)}")


@cli.command("bench-worker", hidden=True)
@click.argument("name")
@click.argument("options")
@click.argument("file")
def bench_worker(name: str, options: str, file: str) -> None:
    """Be one worker of ``paceline bench``; only its supervisor calls this."""
    from paceline.bench import be_bench_worker

    be_bench_worker(name, options, file)
