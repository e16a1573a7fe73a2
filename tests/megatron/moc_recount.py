"""What MoC under expert parallelism must have lost, from the manifests as plain JSON and the runs' own logs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from tests.support.megatron_gpt import Setup
from tests.support.megatron_log import PER_RANK, Case
from tests.support.plain_store import operators_in, read_body
from tests.support.processes import start_ranks

Expert = tuple[int, int]
WARM = "tests.support.megatron_warm"


@dataclass
class Store:
    """Committed checkpoints, by (generation, step), as plain JSON; and which ranks wrote what is new in each."""

    manifests: dict[tuple[int, int], dict[str, Any]]
    written: dict[tuple[int, int], dict[str, set[int]]]

    @classmethod
    def read(cls, place: Path) -> Store:
        found, written = {}, {}
        for path in sorted(place.glob("store/step_*/MANIFEST.json")):
            body = read_body(path)
            key = body["generation"], body["step"]
            found[key], written[key] = body, {}
            for shard in path.parent.glob("rank_*_expert.safetensors"):
                if not shard.name.endswith("_non_expert.safetensors"):
                    for operator in operators_in(shard):
                        written[key].setdefault(operator, set()).add(int(shard.name.split("_")[1]))
        return cls(found, written)

    def versions(self, key: tuple[int, int]) -> dict[Expert, int]:
        """The step at which each expert of a checkpoint was saved."""
        found = {}
        for operator, record in self.manifests[key]["operators"].items():
            kind, *numbers = operator.split("/")
            if kind == "expert":
                found[int(numbers[0]), int(numbers[1])] = record[0]
        return found

    def writers(self, key: tuple[int, int]) -> dict[Expert, set[int]]:
        """The ranks that wrote each expert that is new in a checkpoint, by what their shards hold."""
        found = {}
        for operator, record in self.manifests[key]["operators"].items():
            kind, *numbers = operator.split("/")
            if kind == "expert" and record[0] == key[1]:
                found[int(numbers[0]), int(numbers[1])] = self.written[key][operator]
        assert len(found) == len(self.written[key])
        return found


@dataclass
class Recount:
    """The history that survived.

    steps: step -> tokens of each expert; digests: step -> per rank. missing: per fault, the (expert, step) whose
    updates were lost then and never came back; each is lost once, also if an older copy comes back later.
    """

    setup: Setup
    steps: dict[int, dict[Expert, int]] = field(default_factory=dict)
    digests: dict[int, list[dict[str, str]]] = field(default_factory=dict)
    faults: list[list[int]] = field(default_factory=list)
    missing: list[set[tuple[Expert, int]]] = field(default_factory=list)

    def step(self, lines: list[dict[str, Any]]) -> None:
        counts: dict[Expert, int] = {}
        for line in lines:
            for name, tokens in line["tokens"].items():
                layer, expert = map(int, name.split("/"))
                counts[layer, expert] = counts.get((layer, expert), 0) + tokens
        assert len(counts) == self.setup.layers * self.setup.experts
        per_layer = Counter()
        for (layer, _), tokens in counts.items():
            per_layer[layer] += tokens
        assert len(set(per_layer.values())) == 1, "no token is lost between router and experts"
        self.steps[lines[0]["step"]] = counts | dict.fromkeys(frozen_experts(self.setup), 0)
        self.digests[lines[0]["step"]] = [line["digests"] for line in lines]

    def resume(self, step: int, versions: dict[Expert, int]) -> None:
        self.steps = {t: counts for t, counts in self.steps.items() if t <= step}
        past = [number for number, fault in enumerate(self.faults) if fault[0] < step]
        self.faults, self.missing = [self.faults[i] for i in past], [self.missing[i] for i in past]
        lacking = {expert: self.lacking(expert, version, step) for expert, version in versions.items()}
        lost = {expert: sum(self.steps[t][expert] for t in steps) for expert, steps in lacking.items()}
        self.faults.append([step, sum(lost.values()), sum(tokens > 0 for tokens in lost.values())])
        self.missing.append({(expert, t) for expert, steps in lacking.items() for t in steps})

    def lacking(self, expert: Expert, version: int, until: int) -> list[int]:
        """The steps that a copy of an expert has not seen, without those that are lost already."""
        return [t for t in range(version + 1, until + 1) if not any((expert, t) in lost for lost in self.missing)]

    @property
    def routed(self) -> int:
        return sum(sum(counts.values()) for counts in self.steps.values())

    @property
    def lost(self) -> int:
        return sum(fault[1] for fault in self.faults)

    def assert_said(self, books: dict[str, Any]) -> None:
        assert books["faults"] == self.faults
        assert (books["lost"], books["routed"]) == (self.lost, self.routed)
        assert books["plt"] == (self.lost / self.routed if self.routed else 0.0)
        applied = [
            [sum(counts[layer, e] for counts in self.steps.values()) for e in range(self.setup.experts)]
            for layer in range(self.setup.layers)
        ]
        assert books["applied"] == applied


def frozen_experts(setup: Setup) -> set[Expert]:
    """Experts that ``setup`` freezes, layer by layer or by their number on each expert-parallel rank."""
    here = setup.experts // setup.ep
    found = set()
    for layer in range(setup.layers):
        for expert in range(setup.experts):
            name = f"layers.{layer}.mlp.experts.local_experts.{expert % here}.linear_fc1.weight"
            if any(part in name for part in setup.frozen):
                found.add((layer, expert))
    return found


def run_cases(function: Any, cases: list[Case], root: Path, world: int = 4, timeout: float = 240) -> None:
    """All lives of all cases, in as few starts of the processes as there are kills, plus one."""
    todo = [(case, life) for case in cases for life in range(len(case.kills) + 1)]
    while todo:
        last = next((i for i, (case, life) in enumerate(todo) if life < len(case.kills)), len(todo) - 1)
        case, life = todo[last]
        outcomes = start_ranks(function, world, str(root), tuple(todo[: last + 1]), timeout=timeout, preload=WARM)
        if life < len(case.kills):
            victim = case.kills[life][0]
            assert outcomes[victim].exitcode == -9, _errors(outcomes)
        else:
            assert all(o.ok for o in outcomes), _errors(outcomes)
        todo = todo[last + 1 :]


def _errors(outcomes: list[Any]) -> str:
    return "\n---\n".join(f"rank {o.rank}: {(o.error or '')[-800:]}" for o in outcomes)


def read_lives(case: Case, root: Path, world: int = 4) -> list[list[list[dict[str, Any]]]]:
    """Per life, its steps (the first one "begin"), each as the ranks logged it; a killed rank may lack the last."""
    of_ranks = []
    for rank in range(world):
        found: list[list[dict[str, Any]]] = []
        for raw in (root / case.name / f"rank_{rank}.jsonl").read_text().splitlines():
            line = json.loads(raw)
            if line["event"] == "begin":
                found.append([])
            found[-1].append(line)
        of_ranks.append(found)
    assert len({len(found) for found in of_ranks}) == 1
    return [[list(lines) for lines in zip(*life, strict=False)] for life in zip(*of_ranks, strict=True)]


def check(case: Case, root: Path, world: int = 4, *, by_bytes: bool = False) -> Recount:
    """Compare every number the library reported, and every byte that came back, with the recount.

    by_bytes: experts may have come from host memory, so which version came back is told by their bytes.
    """
    store = Store.read(root / case.name)
    recount = Recount(case.setup)
    for generation, life in enumerate(read_lives(case, root, world)):
        begin, *steps = life
        at = begin[0]["step"]
        assert {line["step"] for line in begin} == {at}
        if generation:
            key = max(key for key in store.manifests if key[1] == at and key[0] < generation)
            assert key == max(k for k in store.manifests if k[0] < generation), "the newest is what came back"
            stored = store.versions(key)
            assert key[1] == at
            versions = _by_bytes(recount, begin, stored) if by_bytes else stored
            _assert_bytes(recount, begin, at, versions)
            recount.resume(at, versions)
        else:
            assert at == 0
        for line in begin:
            recount.assert_said(line["books"])
        for lines in steps:
            assert len({_alike(line) for line in lines}) == 1, "ranks told different things"
            for line in lines:
                if line["event"] == "end":
                    recount.assert_said(line["books"])
                else:  # the ranks agree on a step while they compute the next, and what is said is of the one before
                    _check_step(recount, store, generation, at, line)
            if lines[0]["event"] != "end":
                recount.step(lines)
    return recount


def _check_step(recount: Recount, store: Store, generation: int, began_at: int, line: dict[str, Any]) -> None:
    books, record, step = line["books"], line["record"], line["step"]
    recount.assert_said(books)
    assert (record["lost_tokens"], record["routed_tokens"]) == (recount.lost, recount.routed)
    assert record["plt"] == (recount.lost / recount.routed if recount.routed else 0.0)
    committed = books["committed_step"]
    assert record["committed_step"] == committed
    if committed is None:
        assert all(age == -1 for row in books["ages"] for age in row)
        assert record["oldest_expert_steps"] == 0
        return
    if committed <= began_at:
        key = max(key for key in store.manifests if key[1] == committed and key[0] < generation)
    else:
        key = (generation, committed)
    versions = store.versions(key)
    ages = [[step - versions[layer, e] for e in range(recount.setup.experts)] for layer in range(recount.setup.layers)]
    assert books["ages"] == ages
    assert record["oldest_expert_steps"] == max(map(max, ages))
    if committed > began_at:
        at_risk = {e: recount.lacking(e, version, committed) for e, version in versions.items()}
        risk = sum(recount.steps[t][e] for e, steps in at_risk.items() for t in steps)
        assert record["at_risk_plt"] == (recount.lost + risk) / recount.routed


def _alike(line: dict[str, Any]) -> str:
    record = {name: value for name, value in line.get("record", {}).items() if name not in PER_RANK}
    return json.dumps([line["event"], line.get("step"), record, line["books"]], sort_keys=True)


def _assert_bytes(recount: Recount, begin: list[dict[str, Any]], at: int, versions: dict[Expert, int]) -> None:
    for rank, line in enumerate(begin):
        assert line["digests"]["rest"] == recount.digests[at][rank]["rest"], f"rank {rank}: not of step {at}"
        for name in line["digests"].keys() - {"rest"}:
            layer, expert = map(int, name.split("/"))
            version = versions[layer, expert]
            assert line["digests"][name] == recount.digests[version][rank][name], f"{name} on {rank}: not of {version}"


def _by_bytes(recount: Recount, begin: list[dict[str, Any]], stored: dict[Expert, int]) -> dict[Expert, int]:
    found: dict[Expert, int] = {}
    for rank, line in enumerate(begin):
        for name in line["digests"].keys() - {"rest"}:
            layer, expert = map(int, name.split("/"))
            same = [t for t, ranks in recount.digests.items() if ranks[rank][name] == line["digests"][name]]
            assert same, f"{name} came back as it never was"
            assert found.setdefault((layer, expert), max(same)) == max(same), "two holders, two versions"
            assert max(same) >= stored[layer, expert]
    return found


def partial(store: Store, case: Case) -> list[tuple[int, int]]:
    """Checkpoints at the policy's K: neither the first of the run nor the complete one at its end."""
    return [key for key in sorted(store.manifests) if key != min(store.manifests) and key[1] < case.steps]


def check_capacity(case: Case, root: Path, owned: list[list[Expert]]) -> None:
    """No rank writes over ceil(K * experts it owns / E), and each expert is written by its owner alone.

    owned: per rank, the experts (layer, expert) that it writes.
    """
    k = case.policy[1]["k"]
    store = Store.read(root / case.name)
    owner = {expert: rank for rank, experts in enumerate(owned) for expert in experts}
    assert len(owner) == case.setup.layers * case.setup.experts
    for key in partial(store, case):
        writers = store.writers(key)
        assert Counter(layer for layer, _ in writers) == dict.fromkeys(range(case.setup.layers), k)
        assert writers == {expert: {owner[expert]} for expert in writers}
        load = Counter(owner[expert] for expert in writers)
        for rank, experts in enumerate(owned):
            assert load[rank] <= ceil(k * len(experts) / case.setup.experts), f"rank {rank} at {key}"
    assert set(owner) == set(store.writers(min(store.manifests)))


def check_turns(case: Case, root: Path) -> None:
    """Sequential: every expert at least once in any ceil(E/K) checkpoints in a row, across restarts too."""
    store = Store.read(root / case.name)
    rounds = ceil(case.setup.experts / case.policy[1]["k"])
    keys = partial(store, case)
    assert len(keys) >= rounds
    for key in keys:
        assert key[1] - min(store.versions(key).values()) < rounds
