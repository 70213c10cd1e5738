"""A real vLLM server on this machine: ``make test-vllm`` makes its environment and names it in KLAMP_VLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_process import Vllm


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    where = os.environ.get("KLAMP_VLLM")
    if not where:
        pytest.skip("KLAMP_VLLM does not name an environment with vLLM; make test-vllm makes one")
    server = Vllm(Path(where).absolute(), tmp_path_factory.mktemp("vllm"))
    server.start()
    yield server
    server.kill()
