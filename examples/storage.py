"""A storage of one's own: a dictionary in place of a service that keeps bytes by name, behind a URL for ``dirpath``."""

from typing import Any, ClassVar

import fsspec
from with_lightning import train

from moe_ckpt.callbacks import MoECheckpoint
from moe_ckpt.policies import Dense


class Shelf(fsspec.AbstractFileSystem):
    """Put the calls of your service in place of ``blobs``: no more is needed of a storage than these five methods."""

    protocol = "shelf"
    blobs: ClassVar[dict[str, bytes]] = {}

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self.blobs[path] = value  # all of it or nothing, and durable when this returns

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self.blobs[path][start:end]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if path in self.blobs:
            return {"name": path, "size": len(self.blobs[path]), "type": "file"}
        if not any(name.startswith(f"{path}/") for name in self.blobs):
            raise FileNotFoundError(path)
        return {"name": path, "size": 0, "type": "directory"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        below = {name[len(path) + 1 :].partition("/")[0] for name in self.blobs if name.startswith(f"{path}/")}
        return [self.info(f"{path}/{name}") if detail else f"{path}/{name}" for name in sorted(below)]

    def rm_file(self, path: str) -> None:
        if self.blobs.pop(path, None) is None:
            raise FileNotFoundError(path)


if __name__ == "__main__":
    fsspec.register_implementation("shelf", Shelf)
    for steps in (25, 40):
        checkpoint = MoECheckpoint(Dense(every_n_steps=5), dirpath="shelf://my_run", resume="extend")
        train(checkpoint, max_steps=steps)
        print(f"began at step {checkpoint.restored_step or 0}; newest checkpoint:", checkpoint.last_model_path)
    print(f"the shelf has {len(Shelf.blobs)} files, {sum(map(len, Shelf.blobs.values())) >> 10} KiB")
