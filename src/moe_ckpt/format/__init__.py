"""The on-disk format: bytes <-> frozen records. See docs/format.md for the MUST lines.

Version 1: step directories of safetensors shards with a checksum per slice, one sealed JSON state file
per rank, and a sealed JSON manifest as commit record. Nothing here opens a file.
"""

FORMAT_VERSION = 1
SUPPORTED_VERSIONS = (1,)
