"""The session's servers of tiny vision models, one for each, started side by side."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.pictured.model import Name
from tests.pictured.server import VisionServer, made, started

collect_ignore_glob = ["site/*"]
NAMES: tuple[Name, ...] = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="session")
def vision_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Name, VisionServer]]:
    """Both servers; they take most of their time to start, each on a core of its own."""
    folders = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    databases = {name: made(folder, name) for name, folder in folders.items()}
    with ThreadPoolExecutor(len(NAMES)) as threads:
        starting = {name: threads.submit(started, folder, name, databases[name]) for name, folder in folders.items()}
    found = {name: each.result() for name, each in starting.items()}
    yield found
    for server in found.values():
        server.running.kill()
        server.database.dispose()


@pytest.fixture(params=NAMES)
def vision(request: pytest.FixtureRequest, vision_servers: dict[Name, VisionServer]) -> VisionServer:
    """Each server in turn."""
    name: Name = request.param
    return vision_servers[name]


@pytest.fixture
def qwen2_5_vl(vision_servers: dict[Name, VisionServer]) -> VisionServer:
    return vision_servers["qwen2_5_vl"]
