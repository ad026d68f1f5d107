"""One hash for weights by name, so that files and modules of equal weights are known as equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def content_hash(named: Iterable[tuple[str, Tensor]]) -> str:
    """Hash whole tensors, in order, with their names, formats and shapes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in named:
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(raw.numpy().data)
    return digest.hexdigest()
