"""Data loading that can be resumed: ``DataLoader(dataset, sampler=RecoverableDistributedSampler(dataset))``."""

from moe_ckpt.data.sampler import RecoverableDistributedSampler

__all__ = ["RecoverableDistributedSampler"]
