"""The source keeps its layers and its purity; and every rule is shown able to fail."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from moe_ckpt.threads import ThreadName
from tests.packaging import rules
from tests.packaging.rules import Module

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / rules.PACKAGE
MODULES = rules.read_package(SOURCE)
SIMULATOR = rules.read_package(ROOT / "src" / rules.SIMULATOR)


def test_the_package_was_read():
    names = {module.name for module in MODULES}
    assert {"", "core.operators", "policies.moc", "format.manifest", "ports", "errors"} <= names


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_source_keeps(rule):
    problems = [problem for module in MODULES for problem in rule(module)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("package", [rules.PACKAGE, rules.SIMULATOR])
def test_no_folder_has_more_than_fifteen_files(package):
    counts = Counter(path.parent for path in (ROOT / "src" / package).rglob("*.py"))
    assert {str(folder): n for folder, n in counts.items() if n > 15} == {}


def test_no_class_name_stands_for_two_things():
    """Nor do the library and its simulator give one name to two."""
    assert list(rules.doubled_classes([*MODULES, *SIMULATOR])) == []
    twice = [Module("a", "class C: ..."), Module("b", "class C: ...")]
    assert list(rules.doubled_classes(twice)) == ["C is the name of classes in a:1, b:1"]


@pytest.mark.parametrize("rule", rules.SIMULATOR_RULES, ids=lambda rule: rule.__name__)
def test_the_simulator_keeps(rule):
    assert len(SIMULATOR) > 40
    problems = [problem for module in SIMULATOR for problem in rule(module)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("programs", ["benchmarks", "recipes"])
def test_nothing_outside_imports_the_command_line(programs):
    modules = rules.read_package(ROOT / programs)
    assert len(modules) > 5
    problems = [problem for module in modules for problem in rules.no_command_line(module)]
    assert not problems, "\n".join(problems)


def test_the_page_lists_the_threads_that_the_library_starts():
    text = (ROOT / "docs" / "scale.md").read_text()
    section = text.partition("## Threads and lanes")[2].partition("\n## ")[0]
    rows = [row.split("|")[1:-1] for row in section.splitlines() if row.startswith("| `")]
    names = [name for row in rows for name in re.findall("moe_ckpt-[a-z]+", row[0])]
    assert sorted(names) == sorted(name.value for name in ThreadName)
    assert all(cell.strip() for row in rows for cell in row), "what it does"


def test_the_map_of_packages_is_the_order_of_imports_and_one_page():
    text = (ROOT / "docs" / "architecture.md").read_text()
    packages = text.partition("## Packages")[2].partition("\n## ")[0]
    named = [re.findall(r"`(\w+)`", row.split("|")[2]) for row in packages.splitlines() if row.startswith("| ")]
    summit = [part for part in rules.SUMMIT if part.isalpha()]
    assert [name for names in named for name in names] == [
        *rules.EVERYWHERE,
        *rules.LAYERS,
        *rules.GUESTS,
        *rules.ON_TOP,
        *summit,
    ]
    assert len(text.split()) <= 850


@pytest.mark.parametrize(
    ("rule", "name", "source", "said"),
    [
        (rules.google_docstrings, "x", 'def f(a):\n    """Does. a: what."""', "tells of 'a' outside"),
        (rules.google_docstrings, "x", 'class C:\n    """a: what."""\n    a: int', "tells of 'a' outside"),
        (rules.direction, "core.step", "from moe_ckpt.policies import MoC", "'core' may not import 'policies'"),
        (rules.direction, "core.step", "from moe_ckpt import policies", "'core' may not import 'policies'"),
        (rules.direction, "core.step", "import moe_ckpt.session.worker", "'core' may not import 'session'"),
        (rules.direction, "core.step", "from ..session import worker", "'core' may not import 'session'"),
        (rules.direction, "session.x", "from moe_ckpt.modeling import x", "'session' may not import 'modeling'"),
        (rules.direction, "format.tree", "from moe_ckpt.storage.local import x", "may not import 'storage'"),
        (rules.direction, "session.worker", "def f():\n    from moe_ckpt.driver import x", "session.worker:2"),
        (rules.direction, "session.worker", "if TYPE_CHECKING:\n    from moe_ckpt.callbacks import x", "'callbacks'"),
        (rules.direction, "session.worker", "import importlib as i\ni.import_module('moe_ckpt.cli')", "'cli'"),
        (rules.direction, "session.worker", "from moe_ckpt import MoECheckpoint", "may not import 'moe_ckpt'"),
        (rules.direction, "cli.main", "from moe_ckpt.testing import FaultyStorage", "may not import 'testing'"),
        (rules.direction, "interop.dcp", "from moe_ckpt.callbacks import x", "may not import 'callbacks'"),
        (rules.direction, "callbacks.x", "from moe_ckpt.megatron import x", "may not import 'megatron'"),
        (rules.direction, "boost.x", "from moe_ckpt.localized import x", "may not import 'localized'"),
        (rules.direction, "megatron.x", "from moe_ckpt.callbacks import x", "may not import 'callbacks'"),
        (rules.direction, "megatron.x", "from moe_ckpt.testing import megatron_cpu", "may not import 'testing'"),
        (rules.direction, "testing.megatron_cpu", "from moe_ckpt.conf import schema", "may not import 'conf'"),
        (rules.direction, "errors", "from moe_ckpt.core.step import Tier", "'errors' may not import 'core'"),
        (rules.direction, "ports", "from moe_ckpt.session import x", "'ports' may not import 'session'"),
        (rules.direction, "notices", "from moe_ckpt.ports import x", "'notices' may not import 'ports'"),
        (rules.direction, "helpers.misc", "", "belongs to no layer"),
        (rules.direction, "tables", "from moe_ckpt.errors import x", "'tables' may not import 'errors'"),
        (rules.direction, "cli.x", "from moe_ckpt_sim.run import run", "may not import moe_ckpt_sim"),
        (rules.direction, "conf.x", "import moe_ckpt_sim", "may not import moe_ckpt_sim"),
        (
            rules.direction,
            "driver.run",
            "def f():\n    from moe_ckpt.windows import x",
            "'driver' may not import 'windows'",
        ),
        (rules.guests_at_doors, "callbacks.fit", "from moe_ckpt.boost import x", "only a function of a door"),
        (rules.guests_at_doors, "driver.run", "from moe_ckpt_sim.planner import recorder", "only a function of a door"),
        (rules.guests_at_doors, "callbacks.x", "def f():\n    from moe_ckpt.boost.x import y", "callbacks.x:2"),
        (rules.guests_at_doors, "cli.x", "import moe_ckpt.localized.x", "cli.x:1 imports moe_ckpt.localized.x"),
        (
            rules.guests_at_doors,
            "callbacks.fit",
            "def f():\n    from moe_ckpt import bubbles",
            "imports moe_ckpt.bubbles",
        ),
        (rules.no_command_line, "growth", "def f():\n    from moe_ckpt_sim.commands.plan import x", "growth:2 imports"),
        (rules.no_command_line, "growth", "from moe_ckpt import cli", "imports moe_ckpt.cli: only"),
        (rules.purity, "core.x", "import torch", "imports torch"),
        (rules.purity, "bubbles.schedule", "import time", "bubbles.schedule is pure"),
        (rules.purity, "policies.x", "from time import monotonic", "imports time.monotonic"),
        (rules.purity, "policies.x", "import os.path", "imports os.path"),
        (rules.purity, "core.x", "from moe_ckpt.notices import announce", "core is pure"),
        (rules.purity, "core.x", "import numpy as np\nnp.random.rand()", "uses numpy.random"),
        (rules.purity, "core.x", "from numpy.random import rand", "imports numpy.random.rand"),
        (rules.purity, "core.x", "open('f')", "calls open()"),
        (rules.no_policy_by_class, "session.x", "from moe_ckpt.policies.moetion import X", "by their needs only"),
        (rules.no_policy_by_class, "callbacks.x", "from moe_ckpt.policies import MoC", "by their needs only"),
        (rules.no_policy_by_class, "megatron.x", "from moe_ckpt import policies", "by their needs only"),
        (rules.frameworks, "session.x", "import lightning.pytorch as pl", "only callbacks and interop and windows may"),
        (rules.frameworks, "conf.x", "from lightning import Trainer", "only callbacks and interop and windows may"),
        (rules.frameworks, "callbacks.x", "from hydra.utils import instantiate", "only conf may"),
        (rules.frameworks, "storage.x", "import omegaconf", "only conf may"),
        (rules.frameworks, "callbacks.x", "import pytorch_lightning", "only nobody may"),
        (rules.frameworks, "callbacks.x", "import megatron.core", "only megatron and testing and interop may"),
        (rules.frameworks, "callbacks.x", "from torchmetrics import Metric", "only metrics may"),
        (rules.lightning_names, "callbacks.x", "from lightning.pytorch.loops.loop import _Loop", "imports lightning"),
        (rules.lightning_names, "callbacks.x", "a = trainer.fit_loop._data_fetcher", "uses _data_fetcher"),
        (rules.lightning_names, "interop.x", "getattr(loop, '_results', None)", "uses _results"),
        (rules.named_threads, "session.x", "threading.Thread(target=run, name='run').start()", "calls Thread: use"),
        (rules.named_threads, "storage.x", "with ThreadPoolExecutor(4) as pool: ...", "calls ThreadPoolExecutor"),
        (rules.ports_without_torch, "ports", "import torch", "outside TYPE_CHECKING"),
        (rules.ports_without_torch, "ports", "from torch import Tensor", "outside TYPE_CHECKING"),
        (rules.no_pickle, "session.x", "import pickle", "imports pickle"),
        (rules.no_pickle, "session.x", "from cloudpickle import loads", "imports cloudpickle"),
        (rules.no_pickle, "interop.x", "torch.load(f)", "without weights_only=True"),
        (rules.no_pickle, "interop.x", "torch.load(f, weights_only=False)", "without weights_only=True"),
        (rules.no_pickle, "interop.x", "np.load(f, allow_pickle=True)", "allow_pickle"),
        (rules.no_pickle, "session.x", "dist.all_gather_object(a, b)", "unpickles"),
        (rules.no_assert, "session.x", "def f(x):\n    assert x", "has an assert"),
        (rules.annotated, "session.x", "def f(a, *b, c: int, **d) -> None: ...", "no type for a, b, d"),
        (rules.annotated, "session.x", "class A:\n    def f(self): ...", "no result type"),
        (rules.nouns_for_names, "x", "found = 1", "binds 'found'"),
        (rules.nouns_for_names, "x", "def f(self, kept): ...", "binds 'kept'"),
        (rules.nouns_for_names, "format.slot", "self.given = 1", "binds 'given'"),
        (rules.first_sentences, "x", 'def f():\n    """Of a rank."""', "begins with 'Of'"),
        (rules.few_positional, "x", "def f(self, a, b, c, d, e, f, g): ...", "f takes more than 6"),
        (rules.few_positional, "x", "Record(1, 2, 3, 4, 5, 6, 7)", "gives Record more than 6"),
        (rules.broad_except, "session.x", "try: ...\nexcept Exception: ...", "catches everything"),
        (rules.broad_except, "session.x", "try: ...\nexcept: ...", "catches everything"),
        (rules.broad_except, "session.x", "try: ...\nexcept (OSError, BaseException): ...", "catches everything"),
    ],
)
def test_rule_can_fail(rule, name, source, said):
    problems = list(rule(Module(name, source)))
    assert len(problems) == 1
    assert said in problems[0]


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (rules.direction, "session.worker", "from moe_ckpt.storage import base\nfrom moe_ckpt import __version__"),
        (rules.direction, "core.step", "from moe_ckpt.errors import ConfigError\nfrom moe_ckpt import ports"),
        (rules.direction, "testing.megatron_cpu", "from moe_ckpt.storage import base\nfrom moe_ckpt.testing import x"),
        (rules.direction, "megatron.x", "from moe_ckpt.interop import dcp\nfrom moe_ckpt.megatron import x"),
        (rules.direction, "testing.x", "from moe_ckpt.megatron import x"),
        (rules.no_policy_by_class, "session.x", "from moe_ckpt.policies.base import Needs, needs_of"),
        (rules.guests_at_doors, "driver.torch_model", "def f():\n    from moe_ckpt.boost.ports import x"),
        (rules.guests_at_doors, "boost.x", "from moe_ckpt.boost.ports import x\nimport moe_ckpt"),
        (rules.no_policy_by_class, "cli.x", "from moe_ckpt.policies import MoC"),
        (rules.frameworks, "testing.x", "import importlib as i\ni.import_module('megatron.core')"),
        (rules.direction, "cli.main", "from moe_ckpt.interop import dcp\nfrom moe_ckpt import register_moe"),
        (rules.no_command_line, "growth", "from moe_ckpt_sim.conf.sweeps import composed\nfrom moe_ckpt import client"),
        (rules.lightning_names, "callbacks.compat", "from lightning.pytorch.loops.loop import _Loop"),
        (rules.lightning_names, "callbacks.x", "self._loop = model._has_rebuilt_buckets"),
        (rules.ports_without_torch, "ports", "if TYPE_CHECKING:\n    import torch"),
        (rules.no_pickle, "interop.x", "torch.load(f, weights_only=True)"),
        (
            rules.few_positional,
            "x",
            "class C:\n    def f(self, a, b, c, d, e, f, *, g=0): log.info('', 1, 2, 3, 4, 5, 6)",
        ),
        (rules.broad_except, "session.x", "try: ...\nexcept Exception:  # a thread's edge\n    ..."),
        (rules.broad_except, "session.x", "try: ...\nexcept BaseException:\n    release()\n    raise"),
    ],
)
def test_rule_lets_pass(rule, name, source):
    assert list(rule(Module(name, source))) == []


def test_relative_imports_are_resolved():
    package = Module("session", "from .worker import x\nfrom ..storage import base", is_package=True)
    assert [target for _, target in rules.imports(package)] == ["moe_ckpt.session.worker.x", "moe_ckpt.storage.base"]
