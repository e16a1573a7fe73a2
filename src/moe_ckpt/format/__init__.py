"""The on-disk format: bytes <-> frozen records. See docs/format.md for the MUST lines.

Version 1: step directories of safetensors shards with a checksum per slice, one sealed JSON state file
per rank, and a sealed JSON manifest as commit record. A manifest whose operators are of several steps that replay
brings together (a sparse window) is of version 2, so that nobody takes it for a state that ever was. Nothing here
opens a file.
"""

FORMAT_VERSION = 1
WINDOW_VERSION = 2
SUPPORTED_VERSIONS = (FORMAT_VERSION, WINDOW_VERSION)
