import pytest
from redis_servers import RedisServer


@pytest.fixture(params=["redis", "folder"])
def place(request, tmp_path):
    """Where workers share code: the URL of a server, or a folder."""
    if request.param == "folder":
        yield tmp_path / "volume"
        return
    with RedisServer() as server:
        yield server.url
