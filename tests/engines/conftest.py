import pytest
from toy import ToyClient


@pytest.fixture
def clients() -> dict[str, ToyClient]:
    return {"a": ToyClient(1), "b": ToyClient(20), "c": ToyClient(300)}
