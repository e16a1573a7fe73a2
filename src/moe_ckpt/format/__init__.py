"""The on-disk format: bytes <-> frozen records. See docs/format.md for the MUST lines.

A step directory has safetensors shards with a checksum per slice, one sealed JSON state file per rank, a sealed JSON
part document that lists these files, and a sealed JSON manifest as commit record, which names part documents. Nothing
in this package opens a file.
"""

FORMAT_VERSION = 1
"""Of every document; no other version is read."""
