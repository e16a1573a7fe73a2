"""``moe-ckpt plan``: recommends a policy for a model on a cluster, and predicts what it costs."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_ckpt.errors import ConfigError, DamagedError, MissingPackageError

if TYPE_CHECKING:
    from moe_ckpt_sim.planner.choosing import Leg, Tell
    from moe_ckpt_sim.planner.planner import Candidate, Plan
    from moe_ckpt_sim.planner.rates import Rates
    from moe_ckpt_sim.run.scenario import Scenario
    from moe_ckpt_sim.run.system import System

EPILOG = """\
examples:
  moe-ckpt plan setup=moevement_deepseek failures.mtbf_secs=1800     a paper's model on a paper's cluster
  moe-ckpt plan model=qwen_moe cluster=h100_128 parallel=pp8_ep8_dp2 failures=components --plot roof.png
  moe-ckpt plan --profile run_profile.json failures.mtbf_secs=7200   your own run, as its profile measured it
  moe-ckpt plan --measure . setup=tiny                               with this machine's own rates

Settings are those of moe-ckpt simulate, group=choice and key=value, except policy and memory, which plan tries. With
--profile, the model, the cluster, the iteration time and the load are the profiled run's; failures, duration_secs and
seed can be set, fields of the cluster one by one, especially those that a run does not measure
(cluster.nic_bytes_per_sec=25e9 cluster.detect_secs=60), and tokens_per_step=N if the profile lacks it.
"""

BACKUP_SECS = 10800.0
"""Time between writes of peers' checkpoints to storage."""
_ABOUT = "~"
"""Mark before the ETTR of a policy that was not simulated to the end."""
_NAMED = 3
"""Policies that a progress line names."""
MARK = "*"
"""Mark of systems that only the simulator has."""
COLUMNS = (
    *("policy", "ETTR", "saves every", "stall/iter", "lost tokens"),
    *("host memory", "sent/iter", "stored/iter", "roof"),
)
"""Bytes of host memory are of one node, those sent are of one rank, those stored are of all ranks."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the subcommand. Its unknown arguments are Hydra's: parse with ``parse_known_args``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="which policy to use, with which settings, and what to expect",
        description="Simulate every policy on the same failures; show what limits training, and which policy to use.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--profile", metavar="FILE", help="profile that a run wrote (MoECheckpoint(profile=FILE))")
    parser.add_argument("--measure", metavar="DIR", help="measure copy, network and storage (in DIR) first")
    parser.add_argument("--max-plt", type=float, default=0.05, metavar="P", help="portion of tokens that may be lost")
    parser.add_argument("--seeds", type=int, default=1, help="runs per policy, each with other failures (default: 1)")
    parser.add_argument("--trainer-only", action="store_true", help="leave out policies that only the simulator has")
    parser.add_argument("--storage-only", action="store_true", help="leave out checkpoints in the memory of peers")
    parser.add_argument("--plot", metavar="FILE", help="write the roofline plot to FILE (png, svg, pdf)")
    parser.add_argument("--config-dir", metavar="DIR", help="directory with your own config groups")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-q", "--quiet", action="store_true", help="do not print what is being simulated")
    return parser


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run the command. Returns 0 if a policy is recommended, 1 if none can be used.

    Raises:
        MissingPackageError: Hydra is not installed.
        ConfigError: a setting is invalid.
    """
    from moe_ckpt_sim.commands.outputs import require_filled
    from moe_ckpt_sim.planner.planner import recommend, trainer_systems

    require_filled(args, "profile", "measure", "plot", "config-dir")
    if not 0 <= args.max_plt <= 1:
        raise ConfigError(f"--max-plt {args.max_plt:g}: must be a portion of all tokens, from 0 to 1")
    if args.plot:
        from moe_ckpt_sim.commands.plan_plot import require_writable

        require_writable(args.plot)
    scenario, rates = _scenario(args, rest), None
    if args.measure:
        rates = _measure(args.measure)
        scenario = _with_rates(scenario, rates, [_key(text) for text in rest])
    systems = trainer_systems(scenario, args.max_plt)
    systems += [] if args.storage_only else memory_systems(scenario)
    if args.trainer_only:
        systems = [one for one in systems if one.in_trainer]
    with _progress(scenario.duration_secs, args.quiet) as tell:
        plan = recommend(scenario, systems, seeds=args.seeds, most_plt=args.max_plt, tell=tell)
    if args.plot:
        _plot(scenario, plan, args.plot)
    if args.json:
        print(json.dumps(facts(scenario, plan, rates), indent=2))
    else:
        _show(scenario, plan, rates)
    return 0 if plan.recommended else 1


def memory_systems(scenario: Scenario) -> list[System]:
    """The systems with checkpoints in peers' memory; MoEvement of the papers is for pipelines."""
    from moe_ckpt.policies import Gemini, GradientLog, MoEtion, MoEvement
    from moe_ckpt_sim.run.system import System

    if scenario.layout.nodes < 2:
        return []
    replicas = min(2, scenario.layout.nodes - 1)
    # A Trainer's defaults with Memory, since the Hydra overrides that are printed set nothing else.
    usual = System("moevement_peers", MoEvement(), "peers", replicas, BACKUP_SECS, when_busy="skip", survivors=True)
    near = replace(usual, rollback="localized")
    rule = "oracle" if scenario.failures.mean_secs is None else "daly"
    return [
        replace(usual, name="gemini", policy=Gemini(1), interval=rule),
        replace(usual, name="moetion_peers", policy=MoEtion()),
        replace(usual, name="moevement_memory"),
        near,
        replace(usual, name="gradient_log_peers", policy=GradientLog()),
    ]


def _scenario(args: argparse.Namespace, overrides: Sequence[str]) -> Scenario:
    try:
        from moe_ckpt_sim.conf.scenarios import scenario_of
        from moe_ckpt_sim.conf.sweeps import combinations, composed, config_directory
    except ImportError as error:
        raise MissingPackageError("hydra-core", "moe-ckpt plan", "hydra") from error
    tokens, settings = _tokens(overrides)
    asked = combinations(settings, config_directory(args.config_dir))
    _require_settable(settings, profiled=args.profile is not None)
    if tokens is not None and args.profile is None:
        raise ConfigError("tokens_per_step is for a run's profile, with --profile; here set batch.sequences")
    if len(asked) > 1:
        raise ConfigError(
            f"plan compares policies in one setting, but {' '.join(overrides)} are {len(asked)}; use moe-ckpt simulate "
            "for sweeps"
        )
    cfg = composed(asked[0])
    return scenario_of(cfg) if args.profile is None else _profiled(args.profile, settings, cfg, tokens)


def _tokens(overrides: Sequence[str]) -> tuple[int | None, list[str]]:
    """Split the overrides into tokens_per_step, which is in no config, and the others."""
    tokens = [text for text in overrides if _key(text) == "tokens_per_step"]
    if not tokens:
        return None, [*overrides]
    value = tokens[-1].partition("=")[2]
    if not re.fullmatch(r"[1-9]\d*", value, re.ASCII):
        raise ConfigError(f"{tokens[-1]}: must be a whole number of at least 1")
    return int(value), [text for text in overrides if text not in tokens]


def _require_settable(overrides: Sequence[str], profiled: bool) -> None:
    """Raise ``ConfigError`` for settings that would be ignored."""
    from moe_ckpt_sim.cluster.cluster import Cluster

    keys = [_key(text) for text in overrides]
    searched = ("policy", "memory")
    tried = [text for text, key in zip(overrides, keys, strict=True) if re.split("[.@/]", key)[0] in searched]
    if tried and not profiled:
        raise ConfigError(
            f"{' '.join(tried)}: plan tries all policies, on storage and in memory; moe-ckpt simulate runs what is set"
        )
    if not profiled:
        return
    free = ("failures", "duration_secs", "seed")
    theirs = [key for key in keys if key.split(".")[0] not in free and not key.startswith("cluster.")]
    if theirs:
        raise ConfigError(
            f"{', '.join(theirs)}: with --profile that is the profiled run's own; set failures, duration_secs, seed, "
            "tokens_per_step, or fields such as cluster.nic_bytes_per_sec"
        )
    settable = [field.name for field in fields(Cluster)]
    for text, key in zip(overrides, keys, strict=True):
        field = key.removeprefix("cluster.")
        if field != key and (field not in settable or text.startswith("~")):
            raise ConfigError(f"{text}: of a profiled cluster, these can be set: {', '.join(settable)}")


def _key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0]


def _profiled(path: str, overrides: Sequence[str], cfg: Any, tokens: int | None) -> Scenario:
    """The scenario of the profiled run, changed by the overrides."""
    from moe_ckpt.policies import Dense
    from moe_ckpt_sim.conf.scenarios import failures_of, value_of
    from moe_ckpt_sim.planner.profile import read_profile, scenario_from
    from moe_ckpt_sim.run.system import System

    try:
        profile = read_profile(path)
    except DamagedError as error:  # not exit code 1, which means that no policy can be used
        raise ConfigError(f"--profile: {error}") from error
    cluster = [key.partition(".")[2] for key in map(_key, overrides) if key.startswith("cluster.")]
    machines = profile.cluster(**{field: value_of(cfg, f"cluster.{field}") for field in cluster})
    # Failures by components are counted from the cluster's nodes and GPUs.
    cfg.cluster.nodes, cfg.cluster.gpus_per_node = machines.nodes, machines.gpus_per_node
    run_settings = value_of(cfg, "duration_secs"), value_of(cfg, "seed")
    system = System("plan", Dense())
    return scenario_from(profile, failures_of(cfg), system, *run_settings, cluster=machines, tokens_per_step=tokens)


def _with_rates(scenario: Scenario, rates: Rates, settings: Sequence[str]) -> Scenario:
    """The scenario on a cluster whose links are as fast as this machine's.

    Only one machine is measured: for the network, that is the most its processes can send, whatever connects the nodes.

    Args:
        settings: Keys that the user set; their values stay.
    """
    layout = scenario.layout
    before = layout.cluster
    measured = {
        "pcie_bytes_per_sec": rates.copy.bytes_per_sec,
        "nic_bytes_per_sec": min(before.nic_bytes_per_sec, rates.network.bytes_per_sec * layout.ranks_per_node),
        "storage_bytes_per_sec": rates.storage_write.bytes_per_sec * layout.nodes,
    }
    new: Any = {field: rate for field, rate in measured.items() if f"cluster.{field}" not in settings}
    cluster = replace(before, name=f"{before.name}, links as measured here", **new)
    return replace(scenario, layout=replace(layout, cluster=cluster))


def _measure(directory: str) -> Rates:
    from moe_ckpt.cli.shared import progress_bar
    from moe_ckpt_sim.planner.rates import measure

    with progress_bar("measuring", unit="steps") as tell:
        return measure(directory, progress=lambda what, done, total: tell(done, total))


# --- output ---


@contextmanager
def _progress(duration_secs: float, silent: bool) -> Iterator[Tell | None]:
    """Report progress on stderr: a bar on a terminal, otherwise a line for each part."""
    from moe_ckpt.cli.shared import progress_bar

    if silent:
        yield None
        return
    with progress_bar("", unit="policies", lines=True) as tell:
        yield lambda leg, done: tell(done, len(leg.systems), _leg(leg, duration_secs))


def _leg(leg: Leg, duration_secs: float) -> str:
    from moe_ckpt_sim.commands.sim_table import duration

    first = ", ".join(leg.systems[:_NAMED]) + (f" and {len(leg.systems) - _NAMED} more" * (len(leg.systems) > _NAMED))
    if leg.number == 1:
        part = "" if leg.secs is None else f"{duration(leg.secs)} of "
        return f"simulating {len(leg.systems)} policies, {part}{duration(duration_secs)}"
    return f"a closer look at {first}, up to {duration(duration_secs if leg.secs is None else leg.secs)}"


def facts(scenario: Scenario, plan: Plan, rates: Rates | None) -> dict[str, Any]:
    """The plan as plain data, with everything that is printed."""
    layout = scenario.layout
    return {
        "model": {"name": layout.model.name, "parameters": layout.model.total},
        "cluster": asdict(layout.cluster),
        "ranks": layout.parallel.ranks,
        "iteration_secs": scenario.iteration.secs,
        "mtbf_secs": scenario.failures.mean_secs,
        "rates": None if rates is None else rates.to_dict(),
        "candidates": [_candidate(one) for one in plan.candidates],
        "recommended": None if plan.recommended is None else plan.recommended.system.name,
        "overrides": None if plan.recommended is None else override_line(plan.recommended),
        "best": None if plan.best is None else plan.best.system.name,
    }


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        "system": one.system.name,
        "in_trainer": one.system.in_trainer,
        "policy": one.system.policy.describe(),
        "ettr": round(one.ettr, 6),
        "ettr_margin": round(one.margin, 6),
        "simulated_secs": round(one.simulated_secs, 3),
        "stall_secs": round(one.stall_secs, 6),
        "plt": round(one.plt, 6),
        "window": one.outcome.window if one.outcome else None,
        "interval": one.outcome.interval if one.outcome else None,
        "use": asdict(one.use) if one.use else None,
        "roof": one.use.roof if one.use else None,
        "refused": one.refused,
    }


def override_line(candidate: Candidate) -> str:
    """The Hydra overrides that choose the candidate, without settings that equal their defaults."""
    from moe_ckpt_sim.planner.planner import memory_overrides, overrides

    policy, memory = candidate.system.policy, memory_overrides(candidate.system)
    return f"{overrides(policy, vars(type(policy)()))} {memory}".rstrip()


def _show(scenario: Scenario, plan: Plan, rates: Rates | None) -> None:
    from moe_ckpt.core.user_text import human_bytes
    from moe_ckpt.tables import print_table, wrapped
    from moe_ckpt_sim.failures.failures import NoFailures
    from moe_ckpt_sim.planner.log_or_windows import sentences

    layout, mean = scenario.layout, scenario.failures.mean_secs
    never = isinstance(scenario.failures, NoFailures)
    rarely = "no failures" if never else "failures as in the trace"
    failing = rarely if mean is None else f"a failure every {_span(mean)}"
    count, ranks = layout.model.total, layout.parallel.ranks
    size = f"{count / 1e9:.3g} B" if count >= 1e8 else f"{count:,.0f}"
    print(
        wrapped(
            f"{layout.model.name}: {size} parameters on {ranks} rank{'s' * (ranks != 1)} of "
            f"{layout.cluster.name}, {scenario.iteration.secs:.3g} s per iteration, {failing}"
        )
    )
    if rates is not None:
        for name in ("copy", "network", "storage_write", "storage_read"):
            rate = getattr(rates, name)
            print(f"  {name:13} {rate.bytes_per_sec / 1e9:8.3g} GB/s  ({rate.how})")
    print()
    rows = [_row(one, human_bytes) for one in plan.candidates]
    print_table(COLUMNS, rows)
    for one in plan.candidates:
        if one.refused:
            print(wrapped(f"{one.system.name} cannot be used: {one.refused}"))
    if any(not one.system.in_trainer for one in plan.candidates):
        note = "only the failed stage goes back: Megatron pipelines, with Memory(upstream_bytes=...)"
        print(wrapped(f"{MARK} {note}"))
    if short := [one for one in plan.candidates if one.margin]:
        least, all_of_it = _span(min(one.simulated_secs for one in short)), _span(scenario.duration_secs)
        print(wrapped(f"{_ABOUT} simulated for {least} or more of {all_of_it}: until it was certain not to be chosen"))
    for sentence in sentences(scenario, plan.candidates):
        print(wrapped(sentence))
    print()
    _advise(plan)


def _row(one: Candidate, human: Any) -> tuple[str, ...]:
    name = one.system.name + ("" if one.system.in_trainer else f" {MARK}")
    if one.outcome is None or one.use is None:
        return (name, *("-",) * 8)
    use, outcome = one.use, one.outcome
    every = f"W = {outcome.window}" if outcome.window else f"{outcome.interval or '-'}"
    return (
        name,
        f"{_ABOUT if one.margin else ''}{one.ettr:.3f}",
        every,
        f"{one.stall_secs:.3f} s",
        f"{one.plt:.2%}",
        human(round(use.host_bytes)),
        human(round(use.sent_bytes)),
        human(round(use.stored_bytes)),
        use.roof,
    )


def _advise(plan: Plan) -> None:
    from moe_ckpt.tables import wrapped
    from moe_ckpt_sim.planner.choosing import CLOSE

    if plan.recommended is None:
        print("No policy can be used here: see above what each of them lacks.")
        return
    print(f"recommended: {plan.recommended.system.name} (ETTR {plan.recommended.ettr:.3f})")
    if any(one.ettr > plan.recommended.ettr and one.system.in_trainer for one in plan.candidates if not one.refused):
        print(
            wrapped(
                f"ETTRs that differ by at most {CLOSE} count as equal: among these, policies that lose no tokens come "
                "first, then those that need less memory, then the simpler ones"
            )
        )
    print(f"  {override_line(plan.recommended)}")
    if plan.best is not None and plan.best is not plan.recommended:
        best = plan.best
        print(wrapped(f"where only the failed stage goes back, {best.system.name} reaches {best.ettr:.3f}{_log(best)}"))


def _log(one: Candidate) -> str:
    """The size of the candidate's upstream log, in words; empty without one."""
    from moe_ckpt.core.user_text import human_bytes

    nbytes = 0 if one.use is None else round(one.use.log_bytes)
    return f", with an upstream log of {human_bytes(nbytes)} per rank" if nbytes else ""


def _span(secs: float) -> str:
    return f"{secs / 3600:.3g} h" if secs >= 5400 else f"{secs / 60:.3g} min"


def _plot(scenario: Scenario, plan: Plan, path: str) -> None:
    from moe_ckpt_sim.commands.outputs import not_written
    from moe_ckpt_sim.commands.plan_plot import plot_roof

    figure, _ = plot_roof(scenario, plan)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise not_written("--plot", Path(path), error) from error
