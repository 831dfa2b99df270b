import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # the models are so small that a second thread costs more than it brings

# The same examples in every run: a failure is then one of the code.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def fresh_compiler():
    """No test runs on the graphs of another."""
    torch._dynamo.reset()
