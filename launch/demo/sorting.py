"""The demo's task: sort a few digits. Its answer can be checked, and a tiny model learns it on a CPU in minutes.

A sequence is the digits, a separator, and the digits in ascending order; the reward is the share of positions that are
right. Used by both sides of launch/: prompts and rewards by the rollout, losses by the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SEPARATOR, _PADDING = 10, 11


@dataclass(frozen=True)
class Sorting:
    """Sort ``digits`` digits.

    Attributes:
        digits: How many.
        vocab_size: Tokens in use: ten digits, the separator and padding.
    """

    digits: int
    vocab_size = 12

    def prompts(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Random prompts.

        Args:
            count: How many.
            generator: Source of randomness.

        Returns:
            int64 ``[count, digits + 1]``.
        """
        digits = torch.randint(10, (count, self.digits), generator=generator)
        return torch.cat([digits, torch.full((count, 1), _SEPARATOR)], dim=1)

    def solved(self, prompts: torch.Tensor) -> torch.Tensor:
        """Prompts with the right answer behind them: int64 ``[count, 2 * digits + 1]``."""
        return torch.cat([prompts, prompts[:, : self.digits].sort(dim=1).values], dim=1)

    def rewards(self, tokens: torch.Tensor) -> torch.Tensor:
        """Share of right positions of each answer.

        Args:
            tokens: int64 ``[count, 2 * digits + 1]``.

        Returns:
            float32 ``[count]``, 0 to 1.
        """
        right = tokens == self.solved(tokens[:, : self.digits + 1])
        return right[:, self.digits + 1 :].float().mean(dim=1)

    def padded(self, tokens: torch.Tensor, seq_length: int) -> torch.Tensor:
        """Sequences of ``seq_length + 1`` tokens, as a next-token loss wants them."""
        return torch.nn.functional.pad(tokens, (0, seq_length + 1 - tokens.shape[1]), value=_PADDING)

    def loss_weights(self, per_row: torch.Tensor, seq_length: int) -> torch.Tensor:
        """Weights of the next-token losses: each row's own on its answer, 0 elsewhere.

        Args:
            per_row: float32 ``[count]``: 1 to imitate, the advantage for a policy gradient.
            seq_length: Losses a row.

        Returns:
            float32 ``[count, seq_length]`` whose product with the losses has the answers' mean as its mean.
        """
        weights = torch.zeros(len(per_row), seq_length)
        weights[:, self.digits : 2 * self.digits] = per_row[:, None] * (seq_length / self.digits)
        return weights


def advantages(rewards: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Rewards of the samples of one prompt against each other: minus their mean, over their deviation.

    Args:
        rewards: float32 ``[prompts * num_samples]``, samples of a prompt side by side.
        num_samples: Samples a prompt.

    Returns:
        float32, same shape; 0 where all samples of a prompt did equally well.
    """
    groups = rewards.view(-1, num_samples)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-4)).flatten()
