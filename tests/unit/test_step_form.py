"""What a step depends on is equal as long as no option changes, also where one is changed in place."""

from typing import Any

import pytest
import torch
from torch import nn

from dion_core import NorDion2
from dion_core.capture import form


@pytest.mark.parametrize(
    "values",
    [
        (False, True),
        (1e-8, 1e-7),
        ("kept", "other"),
        (None, 0.5),
        ((0.9, 0.95), (0.9, 0.99)),
        ((0.9, None), (0.9, "x")),
        ([0.9, 0.95], [0.9, 0.99]),
        (torch.tensor(1e-8), torch.tensor(1e-7)),
        ((torch.tensor(0.9), 0.95), (torch.tensor(0.8), 0.95)),
    ],
    ids=str,
)
def test_the_form_of_a_step_changes_with_options(values: tuple[Any, Any]) -> None:
    optimizer = NorDion2([nn.Parameter(torch.ones(4, 4))])
    plan, options = optimizer._plan, optimizer.param_groups[0]
    assert plan is not None
    forms = []
    for value in (values[0], values[0], values[1], values[0]):
        options["epsilon"] = value
        forms.append(form(plan, []))
        assert isinstance(hash(forms[-1]), int)
    assert forms[0] == forms[1] == forms[3] != forms[2]


def test_the_form_of_a_step_changes_with_an_option_that_is_changed_in_place() -> None:
    optimizer = NorDion2([nn.Parameter(torch.ones(4, 4))])
    plan, options = optimizer._plan, optimizer.param_groups[0]
    assert plan is not None
    options["betas"], options["epsilon"] = [0.9, 0.95], torch.tensor(1e-8)
    forms = [form(plan, [])]
    options["betas"][1] = 0.99
    forms.append(form(plan, []))
    options["epsilon"].fill_(1e-6)
    forms.append(form(plan, []))
    assert len(set(forms)) == 3
