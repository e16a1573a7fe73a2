"""The on-disk format: bytes <-> frozen records. See docs/format.md for the MUST lines.

Step directories hold safetensors shards with a checksum per slice, one sealed JSON state file per rank, a sealed JSON
part document that lists them, and a sealed JSON manifest as commit record, which names part documents. Manifests of
versions 1 and 2 (sparse windows) list the files and operators of all steps themselves; they are read, and no more
written. Nothing here opens a file.
"""

FORMAT_VERSION = 1
"""Of every document but manifests and parts."""
WINDOW_VERSION = 2
MANIFEST_VERSION = 3
"""Of manifests and parts as they are written."""
SUPPORTED_VERSIONS = (FORMAT_VERSION, WINDOW_VERSION, MANIFEST_VERSION)
