"""Says how large the library is: lines, files, classes and records, words, options, threads, functions entered.

A line of code is a line with something on it that is no comment, no docstring and no import. One definition for every
commit, so that two of them can be compared: run this in both.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import json
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "benchmarks"

ROOT = Path(__file__).resolve().parents[1]
_EXAMPLE = """example:
  python benchmarks/house.py                     # the working tree
  python benchmarks/house.py --static --json     # without the traced runs (two minutes), as JSON
"""

RECORDS = """
SnapshotPlan InFlight WindowPlace CompiledPlan Snapshot Acknowledgement _Entry MemoryStep SlotHeader
Share MemoryCheckpoint Resolution StorageOutcome Part Manifest FileRecord View WrittenPart StepRecord
Step Contents Facts CopyPlan Record Fate PlannedPart FileRow HeldRecord
"""
"""Names of the classes that carry a snapshot through the engine; the last line is that of the smaller design."""

BANNED = """
found each those there told said known wanted kept left given own place beside lying let_go stands owed lent
"""
"""Words that name nothing, when they are bound to something."""

OPTION_CLASSES = (
    "run.options:Options",
    "memory.options:Memory",
    "ledger.retention:RetentionPolicy",
    *(
        f"policies:{name}"
        for name in ("Dense", "CheckFreq", "Gemini", "MoC", "MoEtion", "MoEvement", "GradientLog", "AnyOf", "Guarded")
    ),
)
"""Classes whose fields users set. ``Options`` also has three fields that adapters fill in."""

ADAPTER_FIELDS = frozenset({"max_in_flight", "pinned", "local_ranks"})
ADAPTER_ARGUMENTS = ("stateful",)
"""Arguments of ``MoECheckpoint`` and ``megatron.attach`` that are in no class of options."""


_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def is_text(node: ast.stmt) -> bool:
    """Returns whether a statement is a bare text, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@dataclass(frozen=True)
class Module:
    """A parsed source file.

    Attributes:
        path: Relative to ``src``.
        text: The source.
        tree: Its syntax tree.
    """

    path: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def code_lines(self) -> int:
        """Lines of code: not blank, not only a comment, in no docstring and in no import statement."""
        skipped: set[int] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.stmt) and (isinstance(node, (ast.Import, ast.ImportFrom)) or is_text(node)):
                skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _LAYOUT:
                code.update(range(token.start[0], token.end[0] + 1))
        return len(code - skipped)

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    def bound_names(self) -> Iterator[str]:
        """Names that the source gives to a function, a class, an argument, a variable or an attribute of ``self``."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.arg):
                yield node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr


def modules(package: str) -> list[Module]:
    """Parses every source file of a package below ``src``; none if there is no such package."""
    root = ROOT / "src"
    paths = sorted((root / package).rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return [Module(path.relative_to(root), text, ast.parse(text)) for path, text in zip(paths, texts, strict=True)]


def fields_of(node: ast.ClassDef) -> list[str]:
    """Lists the annotated fields of a dataclass or NamedTuple."""
    return [s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]


def is_record(node: ast.ClassDef) -> bool:
    """Returns whether the class is a dataclass or a NamedTuple."""
    marks = [ast.unparse(mark) for mark in (*node.decorator_list, *node.bases)]
    return any("dataclass" in mark or mark.endswith("NamedTuple") for mark in marks)


def thread_starts(sources: list[Module]) -> int:
    """Counts the places in the source that create a thread or a pool of threads."""
    trees = (module.tree for module in sources if module.path.stem != "threads")
    calls = (node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = ("Thread", "ThreadPoolExecutor", "Timer", "named_thread", "named_pool")
    return sum(ast.unparse(function).split(".")[-1] in names for function in calls)


def option_names() -> list[str]:
    """Lists the options that a user of either adapter can set, as ``Class.field``."""
    import importlib
    from dataclasses import fields

    names = []
    for entry in OPTION_CLASSES:
        module, name = entry.split(":")
        try:
            options = getattr(importlib.import_module(f"moe_ckpt.{module}"), name)
        except (ImportError, AttributeError):
            continue  # a commit that has no such class any more
        shown = (field.name for field in fields(options) if field.init and field.name not in ADAPTER_FIELDS)
        names += [f"{name}.{field}" for field in shown]
    return [*names, *ADAPTER_ARGUMENTS]


def static() -> dict[str, Any]:
    """Counts everything that the sources alone show."""
    sources = modules("moe_ckpt")
    if not sources:
        raise SystemExit(f"error: {ROOT / 'src' / 'moe_ckpt'} holds no source file: run this in a checkout of moe_ckpt")
    classes = [node for module in sources for node in module.classes()]
    times = collections.Counter(node.name for node in classes)
    records = [node for node in classes if is_record(node)]
    snapshot = [node for node in records if node.name in RECORDS.split()]
    steps = [node for node in records if {"step", "sequence"} & set(fields_of(node))]
    names = collections.Counter(name.strip("_").lower() for module in sources for name in module.bound_names())
    folders = collections.Counter(str(module.path.parent) for module in sources)
    apart = modules("moe_ckpt_sim")
    return {
        "lines": sum(module.lines for module in sources),
        "lines of code": sum(module.code_lines for module in sources),
        "files": len(sources),
        "largest folder": folders.most_common(1)[0][1],
        "lines of code in moe_ckpt_sim": sum(module.code_lines for module in apart),
        "classes": len(classes),
        "class names that stand for two things": sum(count > 1 for count in times.values()),
        "dataclasses and named tuples": len(records),
        "record types of a snapshot": len(snapshot),
        "their fields": sum(len(fields_of(node)) for node in snapshot),
        "records with a field step or sequence": len(steps),
        "bound names that name nothing, %": round(100 * sum(names[word] for word in BANNED.split()) / names.total(), 2),
        "options": len(option_names()),
        "places that start threads": thread_starts(sources),
    }


def traced(name: str) -> dict[str, dict[str, list[str]]]:
    """Lists the functions entered by one kind of run, in a process of its own; see ``house_trace.measure``."""
    code = f"import json; from benchmarks.house_trace import main; print(json.dumps(main({name!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: the run {name!r} failed:\n{done.stderr}")
    result: dict[str, dict[str, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="house.py", description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--static", action="store_true", help="only count sources: no training run is traced")
    parser.add_argument("--json", action="store_true", help="print JSON, with the names of the functions")
    parser.add_argument("--functions", action="store_true", help="also print the names of the functions, by file")
    chosen = parser.parse_args(arguments)
    counts = static()
    entered: dict[str, dict[str, list[str]]] = {}
    if not chosen.static:
        from benchmarks.house_trace import RUNS

        for number, name in enumerate(("step", *RUNS), 1):
            print(f"tracing {number} of {len(RUNS) + 1}: {name}", file=sys.stderr)
            entered |= traced(name)
    if chosen.json:
        print(json.dumps({"counts": counts, "entered": entered}, indent=1))
        return 0
    width = max(map(len, (*counts, *entered)))
    for label, count in counts.items():
        print(f"{label:<{width}}  {count:>8,}")
    for label, files in entered.items():
        print(f"{label:<{width}}  {sum(map(len, files.values())):>8,} functions in {len(files)} files")
        for path, names in files.items() if chosen.functions else ():
            print(f"    {len(names):>2} {path}: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
