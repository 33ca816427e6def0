"""What the tests on real processes share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cluster.engine_world import Node


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A fork server that is started once for all tests that want one."""
    from tests.cluster.engine_world import Node  # torch: only where it is wanted

    node = Node(tmp_path_factory.mktemp("logs"))
    node.run(node.nursery.start())
    yield node
    node.close()
