"""The reference of elementwise groups, against torch's AdamW and hand-computed cases of Lion."""

import numpy as np
import pytest
import torch

from tests.reference import Options, ReferenceElementwise
from tests.unit.test_reference import random


class TestElementwise:
    @pytest.mark.parametrize("maximize", [False, True])
    def test_adamw_equals_torch(self, maximize: bool) -> None:
        options = Options("adamw", lr=0.03, weight_decay=0.1, betas=(0.8, 0.97), epsilon=1e-6, maximize=maximize)
        reference = ReferenceElementwise(random(3, 4), options)
        parameter = torch.nn.Parameter(torch.from_numpy(random(3, 4)))
        optimizer = torch.optim.AdamW(
            [parameter], lr=0.03, weight_decay=0.1, betas=(0.8, 0.97), eps=1e-6, maximize=maximize
        )
        for seed in range(1, 7):
            gradient = None if seed == 3 else random(3, 4, seed=seed)
            reference.step(gradient)
            parameter.grad = None if gradient is None else torch.from_numpy(gradient)
            optimizer.step()
            state = optimizer.state[parameter]
            np.testing.assert_allclose(reference.weight, parameter.detach().numpy(), rtol=1e-12)
            np.testing.assert_allclose(reference.first_moment, state["exp_avg"].numpy(), rtol=1e-12)
            assert reference.second_moment is not None
            np.testing.assert_allclose(reference.second_moment, state["exp_avg_sq"].numpy(), rtol=1e-12)
            assert reference.num_steps == int(state["step"])

    def test_lion_by_hand(self) -> None:
        reference = ReferenceElementwise([1.0, 1.0, 1.0], Options("lion", lr=0.1, weight_decay=0.5, betas=(0.9, 0.8)))
        reference.step([2.0, -3.0, 0.0])
        np.testing.assert_allclose(reference.weight, [0.85, 1.05, 0.95])  # 0.95 -+ 0.1
        np.testing.assert_allclose(reference.first_moment, [0.4, -0.6, 0.0])
        # 0.9 * 0.4 - 0.1 * 3 > 0 although 0.8 * 0.4 - 0.2 * 3 < 0: update and momentum have their own betas.
        reference.step([-3.0, 0.0, 1.0])
        np.testing.assert_allclose(reference.weight, [0.95 * 0.85 - 0.1, 0.95 * 1.05 + 0.1, 0.95 * 0.95 - 0.1])
        np.testing.assert_allclose(reference.first_moment, [0.32 - 0.6, -0.48, 0.2])
        assert reference.second_moment is None
