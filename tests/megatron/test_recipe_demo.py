"""`make demo-megatron`: its table and verdicts on diaries with known numbers, and the whole of it, with real kills."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("rich")

from recipes.demonstrating import last_words
from recipes.gpt_moe_megatron import demo
from recipes.gpt_moe_megatron.summary import ROWS, summarise, table_cells, verdicts

KILL = '{"step": 4, "rank": 1, "phase": "compute"}\n'


def iteration(number, generation, loss, **saved):
    row = {"iteration": number, "generation": generation, "loss": loss}
    return row | {f"moe_ckpt/{name}": value for name, value in saved.items()}


def diary(run_dir, rows_by_rank, kills=0, ends=("a", "b")):
    """Two ranks; the second is on the last pipeline stage and has the losses."""
    run_dir.mkdir()
    for rank, (rows, end) in enumerate(zip(rows_by_rank, ends, strict=True)):
        finished = [] if end is None else [{"event": "finished", "iteration": 6, "parameters": end}]
        text = "".join(json.dumps(row) + "\n" for row in [*rows, *finished])
        (run_dir / f"log.rank{rank}.jsonl").write_text(text + '{"iteration": 9, "lo')
    (run_dir / "kills.jsonl").write_text(KILL * kills)


def losses(change=None):
    """Iteration -> loss."""
    return {number: 6.0 - number / 10 for number in range(1, 7)} | (change or {})


@pytest.fixture
def pair(tmp_path):
    """``make(...)``: (never failing, failing). The second is killed in 4, and its window of 2 and 3 is replayed."""

    def make(ends=("a", "b"), change=None, lost=0, kills=1):
        plain = [[iteration(n, 0, loss if rank else None) for n, loss in losses().items()] for rank in (0, 1)]
        diary(tmp_path / "never", plain)
        failing = []
        for rank in (0, 1):
            rows, values = [], losses(change)
            for generation, numbers in ((0, (1, 2, 3)), (1, (2, 3, 4, 5, 6))):
                for n in numbers:
                    again = generation == 1 and n < 4
                    facts = {"nbytes": 0 if again else 10 * n + rank, "stall_secs": 0.001 * (rank + 1)}
                    facts |= {"replayed": again, "lost_tokens": lost, "plt": lost / 1000}
                    facts["mlt_worst"] = lost / (100 * n) if lost and generation else None
                    rows.append(iteration(n, generation, values[n] if rank else None, **facts))
            failing.append(rows)
        diary(tmp_path / "failing", failing, kills, ends)
        return summarise("never failing", tmp_path / "never"), summarise("MoEvement", tmp_path / "failing", 7.4)

    return make


def test_the_table_counts_all_ranks_and_iterations_computed_again(pair):
    never, failing = pair()
    cells = dict(zip(ROWS, table_cells(failing, never), strict=True))
    assert cells == {
        "processes killed": "1",
        "iterations": "6",
        "computed again": "2",
        "of these, replays": "2",
        "written per iteration": "71 B",  # (21 + 41 + 61 + 81 + 101 + 121) / 6
        "most in one iteration": "121 B",
        "stall per iteration, mean / worst": "2.0 / 2 ms",
        "lost tokens (PLT)": "0 (0.00%)",
        "MLT, at most": "0.00%",
        "loss of the last iteration": "5.400000",
        "losses as without failures": "6 of 6",
        "parameters as without failures": "on 2 of 2 ranks",
        "wall time": "7 s",
    }
    unsaved = dict(zip(ROWS, table_cells(never, never), strict=True))
    assert (unsaved["written per iteration"], unsaved["parameters as without failures"]) == ("-", "-")


def test_the_table_tells_the_highest_mlt_of_a_failure_beside_plt(pair):
    """That of iteration 2, of 20 tokens; the newest ones tell less, and those before the failure nothing."""
    never, failing = pair(lost=20)
    cells = dict(zip(ROWS, table_cells(failing, never), strict=True))
    assert (cells["lost tokens (PLT)"], cells["MLT, at most"]) == ("20 (2.00%)", "10.00%")
    assert dict(zip(ROWS, table_cells(never, never), strict=True))["MLT, at most"] == "0.00%"


@pytest.mark.parametrize(
    ("change", "passed", "said"),
    [
        ({}, [True, True], "the parameters on all 2 ranks, equal those of the run that never failed, bit for bit"),
        ({"ends": ("a", "x")}, [True, False], "DIFFERS from the run that never failed, though no token was lost"),
        ({"change": {5: 5.5000001}}, [True, False], "(parameters equal: True, losses equal: False)"),
        ({"ends": ("a", None)}, [False, False], "DIFFERS"),
        ({"kills": 0}, [False, True], "bit for bit"),
        ({"ends": ("a", "x"), "lost": 20}, [True, True], "20 tokens lost (PLT 2.00%), so it is another run"),
    ],
)
def test_the_verdict_tells_a_difference(pair, change, passed, said):
    checks = verdicts(*pair(**change), kills=1)
    assert [check.passed for check in checks] == passed
    assert said in checks[1].sentence


def test_a_run_that_failed_is_reported_with_the_errors_of_its_processes(tmp_path):
    output = tmp_path / "output.log"
    errors = ["[rank1]: ValueError: what it was", "moe_ckpt.errors.ConfigError: and this", "x.ChildFailedError: not"]
    output.write_text("\n".join(["Traceback", *errors, *errors, *["torchrun's table"] * 50]))
    told = last_words("MoC", 1, output).splitlines()
    assert told[1:] == errors[:2]
    output.write_text("nothing\nof that kind")
    assert last_words("MoC", 1, output).splitlines()[1:] == ["nothing", "of that kind"]


def test_the_demo_wants_a_kill(capsys):
    with pytest.raises(SystemExit):
        demo.main(["--kills", "0"])
    assert "at least 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_ends_with_a_table_and_both_runs_alike(tmp_path, capsys):
    pytest.importorskip("megatron.core.package_info")
    code = demo.main(["--steps", "12", "--kills", "1", "--out", str(tmp_path / "demo")])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert len(re.findall(r"rank \d was killed on purpose in iteration \d+ \(kill -9\)", printed)) == 1
    assert re.search(r"losses as without failures +│ +- │ +12 of 12", printed)
    assert "on 4 of 4 ranks" in printed
    assert "bit for bit; no token lost" in " ".join(printed.split())
