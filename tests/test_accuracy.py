"""What is made of the bits of an evaluation."""

from __future__ import annotations

import pytest
import torch

from fatbench.engine.accuracy import prior_accuracy


def test_a_clients_accuracy_follows_its_shares_of_the_classes() -> None:
    """Test images 0000000000 1111111111, 5 and 2 of them right: shares (0.9, 0.1) give 0.45 + 0.02 = 0.47.

    Shares (0, 1) give 0.2; a client without examples has no accuracy.
    """
    labels = torch.tensor([0] * 10 + [1] * 10)
    right = torch.tensor([True] * 5 + [False] * 5 + [True] * 2 + [False] * 8)
    held = [torch.tensor([0] * 9 + [1]), torch.tensor([1, 1]), torch.tensor([], dtype=torch.int64)]
    assert prior_accuracy({-1: right}, labels, held, 2) == pytest.approx({0: 0.47, 1: 0.2})


def test_a_client_with_a_model_of_its_own_is_judged_by_it() -> None:
    labels, held = torch.tensor([0, 1]), [torch.tensor([0]), torch.tensor([0]), torch.tensor([0])]
    right = {0: torch.tensor([True, False]), 2: torch.tensor([False, True])}
    assert prior_accuracy(right, labels, held, 2) == {0: 1.0, 2: 0.0}


def test_no_accuracy_is_made_up_for_a_class_without_test_images() -> None:
    right, labels = torch.tensor([True, True]), torch.tensor([0, 0])
    assert prior_accuracy({-1: right}, labels, [torch.tensor([0]), torch.tensor([1])], 3) == {}
    assert prior_accuracy({-1: right}, labels, [torch.tensor([0]), torch.tensor([0])], 3) == {0: 1.0, 1: 1.0}
