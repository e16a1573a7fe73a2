"""One rank of Megatron-LM's script under torchrun: ``python -m tests.megatron.megatron_lm_rank <job.json>``.

Megatron makes the process groups itself. The job holds the arguments, the line, the journal, and a kill for each life.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    importlib.import_module("tests.support.megatron_lm_warm")
    from tests.support.megatron_lm import Life, live

    job = json.loads(Path(sys.argv[1]).read_text())
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kill = tuple(job["kills"][number]) if number < len(job["kills"]) else None
    life = Life(job["arguments"], job["journal"], job["line"], kill)
    live(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), life)
