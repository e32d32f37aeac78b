"""A data set for examples with trainers: counting modulo a few numbers, from many beginnings. It can be learned."""

import torch


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of ``length`` tokens below 61, as language models take them: what comes in, and what should come out."""

    def __init__(self, num_samples: int, length: int) -> None:
        starts = torch.arange(num_samples)
        self._rows = (starts[:, None] + torch.arange(length) * (1 + starts[:, None] % 5)) % 61

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}
