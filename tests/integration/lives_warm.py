"""What the process has imported that lives of ``crash_run`` are forked from."""

from tests.support.imports import import_for_good

import_for_good("tests.integration.crash_run", "moe_ckpt.session.session")
