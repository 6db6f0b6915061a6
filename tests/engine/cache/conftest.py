import pytest
from redis_servers import SECRET, RedisServer


@pytest.fixture(params=["redis", "folder"])
def place(request, tmp_path):
    """Where workers share code: the URL of a server, or a folder."""
    if request.param == "folder":
        yield tmp_path / "volume"
        return
    with RedisServer() as server:
        yield server.url


@pytest.fixture
def shared(engine, monkeypatch):
    module = engine("cache.shared")
    monkeypatch.setattr(module._Configured, "where", ())
    monkeypatch.setattr(module._Configured, "cache", None)
    for name in module.FILES:
        monkeypatch.delenv(name, raising=False)
    return module


@pytest.fixture
def configure(shared, monkeypatch, tmp_path):
    """A function: use the shared cache at a place with a key; what is None can be in files of tmp_path."""

    def configure(place=None, key=SECRET):
        for name, value in zip(shared.FILES, (place, key), strict=True):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, str(value))
        shared.configure(tmp_path)
        return shared._Configured.cache

    return configure
