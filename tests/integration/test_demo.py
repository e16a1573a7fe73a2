"""The demo, shortened: real torchrun, real kills; its numbers checked against the files that the runs left."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from recipes.gpt_moe_lightning import demo
from recipes.gpt_moe_lightning.report import render
from recipes.gpt_moe_lightning.summary import Verdict, over_ranks, summarise, table_cells, verdicts


def diary(run_dir: Path, rank: int, records: list[dict], torn: str = "") -> None:
    run_dir.mkdir(exist_ok=True)
    text = "".join("\n" + json.dumps(r) + "\n" for r in records) + torn
    (run_dir / f"metrics.rank{rank}.jsonl").write_text(text)


def lines(start: int, stop: int, generation: int, loss: float) -> list[dict]:
    return [{"step": s, "train/loss": loss, "generation": generation} for s in range(start, stop + 1)]


def test_steps_computed_twice_are_counted_and_shown_once(tmp_path):
    records = [{"event": "process_start", "generation": 0}, *lines(1, 9, 0, 5.0)]
    records += [{"event": "process_start", "generation": 1}, {"event": "training", "from_step": 6, "generation": 1}]
    records += [*lines(7, 12, 1, 4.0), {"event": "finished", "val_loss": 3.5, "parameters": "abc", "generation": 1}]
    diary(tmp_path / "run", 0, records, torn='\n{"step": 13, "train/lo')
    run = summarise("x", tmp_path / "run")
    assert (run.steps, run.recomputed, run.restarts, run.restart_steps) == (12, 3, 1, [9])
    assert run.curve("train/loss") == (list(range(1, 13)), [5.0] * 6 + [4.0] * 6)
    assert (run.val_loss, run.parameters) == (3.5, "abc")


def test_bytes_add_up_over_ranks_and_the_slowest_rank_counts():
    def line(step: int, nbytes: int, stall: float, generation: int = 0) -> dict:
        return {"step": step, "generation": generation, "moe_ckpt/bytes": nbytes, "moe_ckpt/stall_ms": stall}

    merged = over_ranks([[line(1, 10, 2.0), line(2, 7, 1.0), line(2, 7, 1.0, 1)], [line(1, 5, 9.0), line(2, 1, 0.5)]])
    assert [(r["moe_ckpt/bytes"], r["moe_ckpt/stall_ms"]) for r in merged] == [(15, 9.0), (8, 1.0), (7, 1.0)]


@pytest.mark.parametrize(
    ("dense_hash", "dense_loss", "kills", "passed"),
    [("a", 5.0, 2, [True, True, True]), ("b", 5.0, 2, [True, False, True]), ("a", 5.1, 2, [True, False, True]),
     ("a", 5.0, 1, [False, True, True])],
)  # fmt: skip
def test_the_verdict_tells_a_difference(tmp_path, dense_hash, dense_loss, kills, passed):
    for name, digest, loss in (("never", "a", 5.0), ("dense", dense_hash, dense_loss), ("moc", "c", 5.0)):
        end = {"event": "finished", "val_loss": 3.5, "parameters": digest}
        diary(tmp_path / name, 0, [*lines(1, 3, 0, loss), end])
        (tmp_path / name / "kills.jsonl").write_text('{"step": 1}\n' * kills)
    runs = [summarise(name, tmp_path / name) for name in ("never", "dense", "moc")]
    assert [check.passed for check in verdicts(*runs, kills=2)] == passed


def test_report_is_one_file_that_loads_nothing(tmp_path):
    diary(tmp_path / "r", 0, [{**r, "moe_ckpt/bytes": 1e6, "moe_ckpt/stall_ms": 3.0} for r in lines(1, 5, 0, 2.0)])
    run = summarise("a <b> run", tmp_path / "r")
    page = render([run, run, run], [Verdict(False, "NOT equal & so on")], ["fact"])
    assert page.count('src="data:image/png;base64,') == 4
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert "a &lt;b&gt; run" in page
    assert "NOT equal &amp; so on" in page
    assert all(cell in page for cell in table_cells(run))


def test_the_demo_empties_only_what_it_made(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="--out"):
        demo.prepare(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
    demo.prepare(tmp_path / "own")
    (tmp_path / "own" / "x").touch()
    demo.prepare(tmp_path / "own")
    assert [p.name for p in (tmp_path / "own").iterdir()] == [demo.MARKER]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo_survives_its_kills_and_says_so(tmp_path, capsys):
    out = tmp_path / "demo"
    code = demo.main(["--steps", "26", "--kills", "2", "--out", str(out), "trainer.val_batches=2"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    runs = {name: summarise(name, out / name) for name in ("never_failing", "dense", "moc")}
    assert [runs[name].kills for name in runs] == [0, 2, 2]
    assert all(run.steps == 26 for run in runs.values())
    assert runs["dense"].parameters == runs["never_failing"].parameters
    assert runs["dense"].lost_tokens == 0
    assert runs["moc"].lost_tokens > 0
    assert runs["moc"].recomputed < runs["dense"].recomputed
    page = (out / "report.html").read_text()
    assert "bit for bit" in page
    assert "What it cost" in printed
