"""Makes an environment with another megatron-core beside the running one.

``python megatron_beside.py <directory> <release of megatron-core> <constraints>``; see the Makefile.

It has all packages of the running one, by links, but for Megatron-Core and what does not go with newer releases of it:
nvidia-resiliency-ext 0.4, with which they cannot be imported. Releases since 0.17 ask for a Python 3.12 that the CPU
builds of torch need not be there for; their code runs on 3.11 too, when its one compiled module is compiled again.
Megatron-Bridge goes with it, without what it asks for: ``examples/bridge_on_cpu.py`` has stand-ins.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

BRIDGE = "megatron-bridge==0.6.2"
LEFT_OUT = ("megatron", "nvidia_resiliency_ext", "nvrx_", "__pycache__")
MISSING = ("triton", "einops", "pybind11")
"""The first is imported by the core, the second by several distributed optimizers, the third for the compiler."""


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "-qq", "--disable-pip-version-check"], check=True)


def main(venv: str, release: str, constraints: str) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", venv], check=True)
    python = str(Path(venv) / "bin" / "python")
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(LEFT_OUT):
            (site / entry.name).symlink_to(entry)
    missing = [name for name in MISSING if importlib.util.find_spec(name) is None]
    if missing:
        pip("install", "--no-deps", "-c", constraints, "--target", str(site), *missing)
    with tempfile.TemporaryDirectory() as place:
        chosen = ("--no-deps", "--python-version", "3.12", "--only-binary=:all:")
        pip("download", *chosen, "-d", place, f"megatron-core=={release}", BRIDGE)
        for wheel in Path(place).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
    helpers = site / "megatron" / "core" / "datasets"
    built = helpers / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = subprocess.run([python, "-m", "pybind11", "--includes"], check=True, capture_output=True, text=True)
    compiler = [*os.environ.get("CXX", "g++").split(), "-O3", "-shared", "-std=c++17", "-fPIC"]
    subprocess.run([*compiler, *includes.stdout.split(), str(helpers / "helpers.cpp"), "-o", str(built)], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
