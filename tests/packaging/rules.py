"""Rules on the source, each a pure function from a parsed module to sentences on what breaks it.

They read the syntax tree only, so an import hidden in a function, under ``TYPE_CHECKING`` or in
``importlib.import_module("...")`` counts like one at the top.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "moe_ckpt"
SIMULATOR = "moe_ckpt_sim"
"""Imports ``PACKAGE``, which knows it only by the names of its commands, and where a run records its profile."""
LAYERS = (
    *("core", "ledger", "policies", "format", "storage", "memory", "comm", "slices", "peers", "run", "tiers"),
    *("commit", "reading", "recovery", "session", "modeling", "data", "interop", "metrics"),
    *("driver", "callbacks", "megatron", "plain", "transformers", "torchtitan"),
)
"""Each may import itself and what stands before it."""
GUESTS = ("boost", "bubbles", "localized", "inprocess", "gradient_log", "survivors", "windows")
"""Features that a run may do without: each may import every layer, but no other guest."""
DOORS = {
    "driver.run": ("survivors", SIMULATOR),
    "driver.torch_model": ("boost",),
    "callbacks.fit": ("gradient_log", "windows"),
    "callbacks.host": ("windows",),
    "megatron.checkpoint": ("boost", "bubbles", "localized", "gradient_log"),
    "plain.checkpoint": ("gradient_log",),
    "recovery.executing": ("windows",),
    "cli.densify": ("gradient_log",),
}
"""Module -> the guests that it imports, in a function, where a policy, an option, a checkpoint or a command asks for
them; or for the type checker only."""
ADAPTERS = ("callbacks", "megatron", "plain")
"""One per training framework; though they stand in an order, none may import another."""
ON_TOP = ("testing", "conf")
"""May import every layer, but not one another."""
SUMMIT = ("", "cli", "__main__")
"""May import everything but ``testing``; "" is the package's own ``__init__``."""
EVERYWHERE = ("errors", "notices", "tables", "stopwatch", "threads", "ports")

PURE = (
    *("core", "ledger", "policies", "peers.replica_placement", "recovery.recovery_plan"),
    *("reading.reading_shares", "reading.memory.memory_shares"),
    *("bubbles.schedule", "localized.segments"),
)
# fmt: off
IMPURE_MODULES = frozenset(
    {
        "torch", "lightning", "pytorch_lightning", "hydra", "omegaconf", "transformers", "torchtitan", "fsspec",
        "safetensors",
        "os", "io", "time", "datetime", "random", "secrets", "uuid", "socket", "subprocess", "threading",
        "multiprocessing", "concurrent", "asyncio", "signal", "tempfile", "shutil", "pathlib", "logging", "warnings",
    }
)
# fmt: on
IMPURE_PARTS = ("numpy.random", f"{PACKAGE}.notices", f"{PACKAGE}.tables")
KNOW_POLICIES = ("policies", "cli", "conf", "testing", "")
"""Parts that may import a policy: to show their windows, to offer them to users."""
BY_NAME = ("EXAMPLES", "class_of", "default_policy", "with_option")
POLICY_PARTS = tuple(f"{PACKAGE}.policies.{name}." for name in ("base", *BY_NAME, "wrapper"))
"""What others may import of ``policies``: the protocol and its facts, policies by users' names for them, wrappers."""
HOMES = {
    "lightning": ("callbacks", "interop", "windows"),
    "pytorch_lightning": (),
    "torchmetrics": ("metrics",),
    "hydra": ("conf",),
    "omegaconf": ("conf",),
    "megatron": ("megatron", "testing", "interop"),
    "transformers": ("transformers", "interop"),
    "torchtitan": ("torchtitan",),
    "tyro": ("torchtitan",),
}
"""Framework -> the only parts of the package that may import it."""
NAMES_OF_NOTHING = frozenset(
    {
        *("found", "each", "those", "there", "told", "said", "known", "wanted", "kept", "left", "given", "own"),
        *("place", "beside", "lying", "let_go", "stands", "owed", "lent"),
    }
)
NO_BEGINNINGS = frozenset({"Of", "As", "Likewise", "Where", "What", "Whether", "Which", "Who", "How"})
ONE_PER_FRAMEWORK = ("MoECheckpointCallback",)
"""Names that frameworks' users expect alike: each imports one."""
LIGHTNING_NAMES = "callbacks.compat"
PRIVATE_NAMES_OF_OTHERS = frozenset(
    {
        *("_backward_hooks", "_comm_hooks", "_delay_all_reduce_params", "_fsdp_param_groups", "_get_ddp_logging_data"),
        *("_get_fsdp_state", "_growth_tracker", "_has_rebuilt_buckets", "_in_backward_optimizers", "_last_lr"),
        *(
            "_module_parameters",
            "_parameters",
            "_to_copy",
            "_post_accumulate_grad_hooks",
            "_rebuild_buckets",
            "_scale",
            "_use_python_reducer",
        ),
        *("_getframe", "_fit", "_model_bridge"),
    }
)
"""Of torch, Python and this package, where Lightning is used."""
MOST_POSITIONAL = 6
FILL_TEXTS = ("info", "warning", "error", "exception", "announce", "makeRecord")
"""Functions of logging, whose arguments are in the order of a text."""
PICKLERS = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"})
UNPICKLING_CALLS = frozenset(
    {
        "broadcast_object_list",
        "all_gather_object",
        "gather_object",
        "scatter_object_list",
        "send_object_list",
        "recv_object_list",
    }
)


@dataclass(frozen=True)
class Module:
    """One parsed source file; ``name`` is dotted and relative to the package ("" is its ``__init__``)."""

    name: str
    source: str
    is_package: bool = False

    @property
    def part(self) -> str:
        """First component of the name: the layer."""
        return self.name.partition(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of ``tree``, for the rules that look at each."""
        return list(ast.walk(self.tree))


def read_package(root: Path) -> list[Module]:
    """All modules below ``root``, which is the directory of the package."""
    modules = []
    for path in sorted(root.rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        modules.append(Module(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package))
    return modules


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted target) of every import; ``from a import b`` gives ``a.b``."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__") and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield node.lineno, target.value


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = [PACKAGE, *(module.name.split(".") if module.name else [])]
    keep = len(parts) - node.level + (1 if module.is_package else 0)
    return ".".join(parts[:keep] + ([node.module] if node.module else []))


def _name(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def direction(module: Module) -> Iterator[str]:
    """Imports inside the package point downwards."""
    known = {*LAYERS, *GUESTS, *ON_TOP, *SUMMIT, *EVERYWHERE}
    if module.part not in known:
        yield f"{module.name} belongs to no layer: give {module.part!r} a place in tests/packaging/rules.py"
        return
    for line, target in imports(module):
        head, _, rest = target.partition(".")
        if head == SIMULATOR and SIMULATOR not in DOORS.get(module.name, ()):
            yield f"{module.name}:{line} imports {target}: {PACKAGE} may not import {SIMULATOR}"
        if head != PACKAGE:
            continue
        part = rest.partition(".")[0]
        if part not in known and part != "__version__":
            part = ""  # a name that the package's __init__ offers
        if part != "__version__" and not _may_import(module.part, part):
            who, whom = module.part or PACKAGE, part or PACKAGE
            yield f"{module.name}:{line} imports {target}: {who!r} may not import {whom!r}"


def guests_at_doors(module: Module) -> Iterator[str]:
    """A run without a guest does not import it: doors do, when it is asked for; everybody else knows protocols."""
    if module.part in GUESTS:
        return
    blocks = (*_functions(module), *_for_types(module))
    late = {line for node in blocks for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    for line, target in imports(module):
        guest = target.removeprefix(f"{PACKAGE}.").partition(".")[0]
        if guest in (*GUESTS, SIMULATOR) and not (line in late and guest in DOORS.get(module.name, ())):
            yield f"{module.name}:{line} imports {target}: only a function of a door may import a guest (DOORS)"


def no_command_line(module: Module) -> Iterator[str]:
    """Programs outside of the package use the library, not its command line. ``module``: one of theirs."""
    for line, target in imports(module):
        if f"{target}.".startswith((f"{PACKAGE}.cli.", f"{SIMULATOR}.commands.")):
            yield f"{module.name}:{line} imports {target}: only the package's command line may"


def _may_import(part: str, target: str) -> bool:
    if target == part:
        return True
    if target == "testing" or part in ("errors", "notices", "tables"):
        return False
    if target in EVERYWHERE:
        return True
    if part == "ports":
        return target == "core"
    if part in SUMMIT:
        return True
    if part in ON_TOP:
        return target in LAYERS or target == ""
    if target in GUESTS:
        return any(door.partition(".")[0] == part and target in guests for door, guests in DOORS.items())
    if part in GUESTS:
        return target in LAYERS
    if part in ADAPTERS and target in ADAPTERS:
        return False
    return target in LAYERS and LAYERS.index(target) < LAYERS.index(part)


def purity(module: Module) -> Iterator[str]:
    """What is ``PURE`` knows no file, clock, environment, randomness, process, thread or framework."""
    pure = next((name for name in (module.part, module.name) if name in PURE), None)
    if pure is None:
        return
    for line, target in imports(module):
        if target.partition(".")[0] in IMPURE_MODULES or target.startswith(IMPURE_PARTS):
            yield f"{module.name}:{line} imports {target}, but {pure} is pure"
    for node in module.nodes:
        if isinstance(node, ast.Call) and _name(node.func) in ("open", "print", "input"):
            yield f"{module.name}:{node.lineno} calls {_name(node.func)}(), but {pure} is pure"
        if isinstance(node, ast.Attribute) and node.attr == "random" and _name(node.value) in ("np", "numpy"):
            yield f"{module.name}:{node.lineno} uses numpy.random, but {pure} is pure"


def no_policy_by_class(module: Module) -> Iterator[str]:
    """Adapters, driver and session know a policy by its needs, never by its class: another one is served as well."""
    if module.part in KNOW_POLICIES:
        return
    for line, target in imports(module):
        if f"{target}.".startswith(f"{PACKAGE}.policies.") and not f"{target}.".startswith(POLICY_PARTS):
            yield f"{module.name}:{line} imports {target}: {module.part} knows policies by their needs only"


def frameworks(module: Module) -> Iterator[str]:
    """Lightning, Megatron and Hydra are known to their adapters only, so that the library works without them."""
    for line, target in imports(module):
        head = target.partition(".")[0]
        if head in HOMES and module.part not in HOMES[head]:
            yield f"{module.name}:{line} imports {target}: only {' and '.join(HOMES[head]) or 'nobody'} may"


def lightning_names(module: Module) -> Iterator[str]:
    """The private names of Lightning stand in one file, where each is tested."""
    if module.part not in HOMES["lightning"] or module.name == LIGHTNING_NAMES:
        return
    for line, target in imports(module):
        head, *names = target.split(".")
        if head == "lightning" and any(name.startswith("_") for name in names):
            yield f"{module.name}:{line} imports {target}: only {LIGHTNING_NAMES} may"
    for node in module.nodes:
        name = ""
        if isinstance(node, ast.Attribute) and _name(node.value) not in ("self", "cls"):
            name = node.attr
        elif isinstance(node, ast.Call) and _name(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
        if name.startswith("_") and not name.startswith("__") and name not in PRIVATE_NAMES_OF_OTHERS:
            yield f"{module.name}:{node.lineno} uses {name}: if it is Lightning's, list it in {LIGHTNING_NAMES}"


def named_threads(module: Module) -> Iterator[str]:
    """A thread is started under a name of ``threads.ThreadName``, which that module alone gives to one."""
    if module.name == "threads":
        return
    for node in module.nodes:
        if isinstance(node, ast.Call) and _name(node.func) in ("Thread", "ThreadPoolExecutor", "Timer"):
            yield f"{module.name}:{node.lineno} calls {_name(node.func)}: use {PACKAGE}.threads, which names it"


def ports_without_torch(module: Module) -> Iterator[str]:
    """``ports`` names torch for the type checker only."""
    if module.name not in EVERYWHERE:
        return
    guarded = {id(inner) for node in _for_types(module) for inner in ast.walk(node)}
    for node in module.nodes:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.partition(".")[0] == "torch" for name in names) and id(node) not in guarded:
            yield f"{module.name}:{node.lineno} imports torch outside TYPE_CHECKING"


def no_pickle(module: Module) -> Iterator[str]:
    """Nothing that is read can run code."""
    for line, target in imports(module):
        if target.partition(".")[0] in PICKLERS:
            yield f"{module.name}:{line} imports {target}"
    for node in module.nodes:
        if not isinstance(node, ast.Call):
            continue
        called = _name(node.func)
        owner = _name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        flags = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
        if called == "load" and owner == "torch" and flags.get("weights_only") is not True:
            yield f"{module.name}:{node.lineno} calls torch.load without weights_only=True"
        if called == "load" and owner in ("np", "numpy") and flags.get("allow_pickle"):
            yield f"{module.name}:{node.lineno} calls numpy.load with allow_pickle"
        if called in UNPICKLING_CALLS:
            yield f"{module.name}:{node.lineno} calls {called}, which unpickles what peers send"


def no_assert(module: Module) -> Iterator[str]:
    """Validation must survive ``python -O``."""
    for node in module.nodes:
        if isinstance(node, ast.Assert):
            yield f"{module.name}:{node.lineno} has an assert; raise an error of moe_ckpt.errors"


def annotated(module: Module) -> Iterator[str]:
    """Every argument and every result has a type."""
    for node in _functions(module):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
        bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls", "mcs")]
        if bare:
            yield f"{module.name}:{node.lineno} {node.name}: no type for {', '.join(bare)}"
        if node.returns is None:
            yield f"{module.name}:{node.lineno} {node.name}: no result type"


def few_positional(module: Module) -> Iterator[str]:
    """No call makes its reader count: from the seventh argument on, each is named."""
    for node in _functions(module):
        positional = [*node.args.posonlyargs, *node.args.args]
        if sum(argument.arg not in ("self", "cls", "mcs") for argument in positional) > MOST_POSITIONAL:
            yield f"{module.name}:{node.lineno} {node.name} takes more than {MOST_POSITIONAL} positional arguments"
    for call in module.nodes:
        if isinstance(call, ast.Call) and len(call.args) > MOST_POSITIONAL and _name(call.func) not in FILL_TEXTS:
            yield f"{module.name}:{call.lineno} gives {_name(call.func)} more than {MOST_POSITIONAL} by position"


def broad_except(module: Module) -> Iterator[str]:
    """Catching everything for good needs a reason beside it: only a thread's or process's edge has one."""
    lines = module.source.splitlines()
    for node in module.nodes:
        if not isinstance(node, ast.ExceptHandler):
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = any(kind is None or _name(kind) in ("Exception", "BaseException") for kind in kinds)
        last = node.body[-1]
        passed_on = isinstance(last, ast.Raise) and last.exc is None
        if broad and not passed_on and "#" not in lines[node.lineno - 1]:
            yield f"{module.name}:{node.lineno} catches everything without saying why on the same line"


def google_docstrings(module: Module) -> Iterator[str]:
    """What public functions and classes are given stands under ``Args:`` or ``Attributes:``, where tools find it."""
    for node in _public(module.tree):
        before = _SECTION.split(ast.get_docstring(node) or "", maxsplit=1)[0]
        if isinstance(node, ast.ClassDef):
            found = [s.target for s in node.body if isinstance(s, ast.AnnAssign)]
            names = [target.id for target in found if isinstance(target, ast.Name)]
        else:
            names = [arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)]
        for name in names:
            if re.search(rf"(?:^|[.;] ){name}: ", before, re.MULTILINE):
                yield f"{module.name}:{node.lineno} tells of {name!r} outside of Args: or Attributes:"


def nouns_for_names(module: Module) -> Iterator[str]:
    """A bound name says what the thing is."""
    for line, name in _bound_names(module.nodes):
        if name in NAMES_OF_NOTHING:
            yield f"{module.name}:{line} binds {name!r}, which names nothing; take the noun of the thing"


def _bound_names(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def first_sentences(module: Module) -> Iterator[str]:
    """The docstring of a public name begins with a verb, or has a subject."""
    for node in _public(module.tree):
        first = (ast.get_docstring(node) or "").partition(" ")[0]
        if first in NO_BEGINNINGS:
            yield f"{module.name}:{node.lineno} the docstring of {node.name} begins with {first!r}"


def doubled_classes(modules: Sequence[Module]) -> Iterator[str]:
    """No class name stands for two things."""
    homes: dict[str, list[str]] = {}
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and node.name not in ONE_PER_FRAMEWORK:
                homes.setdefault(node.name, []).append(f"{module.name}:{node.lineno}")
    return (f"{name} is the name of classes in {', '.join(at)}" for name, at in homes.items() if len(at) > 1)


def _public(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node
            yield from _public(node)


_SECTION = re.compile(r"^(?:Args|Attributes|Returns|Raises):", re.MULTILINE)


def _functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in module.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def _for_types(module: Module) -> Iterator[ast.If]:
    """Blocks that only a type checker runs."""
    for node in module.nodes:
        if isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING":
            yield node


Rule = Callable[[Module], Iterator[str]]
RULES: tuple[Rule, ...] = (
    direction,
    guests_at_doors,
    purity,
    no_policy_by_class,
    frameworks,
    lightning_names,
    named_threads,
    ports_without_torch,
    no_pickle,
    no_assert,
    annotated,
    few_positional,
    broad_except,
    google_docstrings,
    nouns_for_names,
    first_sentences,
)
SIMULATOR_RULES: tuple[Rule, ...] = (
    no_pickle,
    no_assert,
    annotated,
    broad_except,
    google_docstrings,
    nouns_for_names,
    first_sentences,
)
"""Rules that hold for the simulator as well, which has no layers."""
