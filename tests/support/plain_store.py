"""A checkpoint's documents as plain JSON: what docs/format.md says, and nothing of the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_body(manifest: Path) -> dict[str, Any]:
    """The body of a manifest, with ``operators`` and ``files`` of all its parts as versions 1 and 2 have them."""
    body: dict[str, Any] = json.loads(manifest.read_bytes())["body"]
    files, operators = body.get("files", []), body.get("operators", {})
    for directory, *_ in reversed(body.get("parts", ())):
        part = json.loads((manifest.parents[1] / directory / "PART.json").read_bytes())["body"]
        numbers: dict[str, list[int]] = {"expert": [], "non_expert": []}
        for number, (kind, rank, *row) in enumerate(part["files"], start=len(files)):
            files.append([f"{directory}/rank_{rank:05d}_{kind}.safetensors", *row, part["step"], rank])
            numbers[kind].append(number)
        for operator in part["operators"]:
            kind = "expert" if operator.startswith("expert/") else "non_expert"
            operators[operator] = [part["step"], *numbers[kind]]
    return body | {"files": files, "operators": operators}


def operators_in(shard: Path) -> set[str]:
    """Of which a shard holds anything."""
    with shard.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {row[0] for row in json.loads(header["__metadata__"]["moe_ckpt"])["slices"].values()}
