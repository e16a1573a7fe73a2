"""Host memory that outlives the process: mapped files on a tmpfs, which snapshots are copied straight into.

Below ``<root>/moe_ckpt-<uid>/<run>/<generation>/rank_<rank>`` each slot is two files: its bytes, mapped, and its
header, which is written last. A slot without a header is being written and is never read. docs/format.md has the bytes.
"""
