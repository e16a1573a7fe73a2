"""``moe-ckpt simulate`` and ``moe-ckpt plan``."""
