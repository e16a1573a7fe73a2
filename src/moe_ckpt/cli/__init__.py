"""The command ``moe-ckpt``."""
