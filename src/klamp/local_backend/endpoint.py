"""The backend's own endpoint: OpenAI clients talk to the models that it trains."""

from __future__ import annotations

import secrets

from klamp.errors import ConfigError
from klamp.local_backend.open_model import OpenModel
from klamp.serve.app import make_app
from klamp.serve.engine import Limits, split_step
from klamp.serve.server import Server


class Endpoint:
    """One server for all models of a backend, by ``name``, ``name@step``, ``project/name`` or ``project/name@step``."""

    def __init__(self, host: str, port: int, key: str | None) -> None:
        self.key = key or secrets.token_urlsafe(16)
        self.models: dict[str, OpenModel] = {}
        app = make_app(self.find, lambda: list(self.models.values()), limits=Limits(), key=self.key, always_ids=True)
        self.server = Server(app, host, port)

    @property
    def url(self) -> str:
        """What an OpenAI client takes as ``base_url``."""
        return self.server.url

    def add(self, opened: OpenModel) -> None:
        """Answer for a model from now on."""
        model = opened.model
        beside = [m.model.project for m in self.models.values() if m.model.name == model.name]
        if beside and model.project not in beside:
            raise ConfigError(
                f"{model.project}/{model.name} and {beside[0]}/{model.name} would answer to one name. Choose another "
                "name, or open them with two backends."
            )
        self.models[model.name] = opened

    def find(self, name: str) -> OpenModel | None:
        """The model that answers to ``name``."""
        base, _ = split_step(name)
        found = self.models.get(base.rpartition("/")[2])
        return (
            found
            if found is not None and base in (found.model.name, f"{found.model.project}/{found.model.name}")
            else None
        )

    def close(self) -> None:
        """Stop answering."""
        self.server.close()
