import pytest
from overlay import find_torch, Installation, Refusal


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a torch without the current overlay: stock torch passes some tests too."""
    try:
        torch = find_torch(None, None)
        state, why = Installation(torch).status()
    except Refusal as refusal:
        raise pytest.UsageError(str(refusal)) from refusal
    if state != "patched":
        raise pytest.UsageError(
            f"torch {torch.version} at {torch.folder} does not carry the current "
            f"overlay ({why}): run `python tools/overlay.py apply` first"
        )
