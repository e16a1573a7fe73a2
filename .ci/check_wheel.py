"""Check that a wheel, and its installation without dependencies, hold everything: ``check_wheel.py WHEEL SITE``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SOURCE = Path("src")
SHIPPED = {".py", ".yaml", ".csv", ".typed"}
IMPORT_ALL = """
import importlib, pkgutil, sys
import moe_ckpt, moe_ckpt_sim
from moe_ckpt.cli.main import main
from moe_ckpt.errors import MissingPackageError
names = [
    module.name for package in (moe_ckpt, moe_ckpt_sim)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
for name in names:
    if not name.endswith("__main__"):
        try:
            importlib.import_module(name)
        except MissingPackageError as error:
            if error.package != "torchtitan":  # the development environment has every other extra
                raise
            print("not imported, without torchtitan:", name)
print(len(names), "modules imported from", moe_ckpt.__file__)
sys.exit(not moe_ckpt.__file__.startswith(sys.argv[1]))
"""


def main(wheel: str, site: str) -> int:
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {str(p.relative_to(SOURCE)) for p in SOURCE.rglob("*") if p.suffix in SHIPPED}
    problems = [f"missing from the wheel: {name}" for name in sorted(wanted - held)]
    foreign = {name for name in held if not name.startswith(("moe_ckpt/", "moe_ckpt_sim/", "moe_ckpt-"))}
    problems += [f"does not belong into the wheel: {name}" for name in sorted(foreign)]
    for what in ("moe_ckpt/py.typed", "moe_ckpt/callbacks/__init__.py", "licenses/LICENSE", "entry_points.txt"):
        if not any(name.endswith(what) for name in held):
            problems.append(f"missing from the wheel: {what}")
    for package in ("moe_ckpt", "moe_ckpt_sim"):
        if not any(name.startswith(f"{package}/conf/") and name.endswith(".yaml") for name in held):
            problems.append(f"missing from the wheel: the config groups below {package}/conf")
    environment = {**os.environ, "PYTHONPATH": site}
    with tempfile.TemporaryDirectory() as elsewhere:
        command = [sys.executable, "-c", IMPORT_ALL, site]
        if subprocess.run(command, cwd=elsewhere, env=environment, check=False).returncode:
            problems.append("the installed wheel cannot be imported")
    print("\n".join(problems) or f"{Path(wheel).name}: {len(held)} files, complete")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
