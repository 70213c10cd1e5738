"""Models that are open: the thread of each, what waits for it, and the endpoint at which OpenAI clients reach them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from klamp.chat import Encoder
from klamp.errors import ConfigError, KlampError, NoSuchModel
from klamp.local_backend.arguments import Place
from klamp.local_backend.completions import Request
from klamp.local_backend.trajectories import Choice
from klamp.local_backend.worker import Worker
from klamp.references.spec import saved_steps
from klamp.serve import engine
from klamp.serve.engine import Engine, Limits, Model, split_step
from klamp.train.config import LoraConfig

T = TypeVar("T")
Settings = tuple[int, float]
"""Longest answer and temperature: requests that share them are drawn in one batch."""
ASKING = 256
"""Requests that wait for a vLLM server side by side; each has a thread, which only waits."""
Asked = tuple[Request, "asyncio.Future[list[Choice]]"]


class OpenModel:
    """A model's thread, what waits for it, and whether it trains."""

    def __init__(
        self, model: Any, folder: Path, device: str, keep: int, server: tuple[str, str | None] | None = None
    ) -> None:
        self.model = model
        """A TrainableModel."""
        self.served_as = str(model.name)
        """What the endpoint's clients ask for."""
        lora = LoraConfig(rank=model.lora_rank, alpha=model.lora_alpha)
        self.place = Place(
            base_model=model.base_model,
            folder=folder,
            lora=lora,
            seed=model.seed,
            device=device,
            keep=keep,
            server=server,
        )
        self.thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"klamp-{model.name}")
        self.training = threading.Lock()
        self.worker: Worker | None = None
        self.engine = Engine(self, Limits())
        """Decodes what the endpoint is asked for, in the model's thread like everything else."""
        self.lock = threading.Lock()
        self.decoding = False
        self.wanted = 0
        """Jobs that wait for the thread while the engine has it."""
        self.waiting: dict[Settings, list[Asked]] = {}
        self.asked: set[engine.Request] = set()
        """Requests of the endpoint's that a vLLM server answers."""
        self.asking = concurrent.futures.ThreadPoolExecutor(ASKING, thread_name_prefix=f"klamp-{model.name}-ask")
        self.drawing: set[asyncio.Future[None]] = set()
        self.loop: asyncio.AbstractEventLoop | None = None

    def call(self, job: Callable[[Worker], T]) -> Awaitable[T]:
        """Run ``job`` in the model's thread; what was asked for first is done first."""
        return asyncio.wrap_future(self._submit(job))

    def train(self, job: Callable[[Worker], T]) -> Awaitable[T]:
        """The same for training, which only one may do at a time: a second call is refused, not queued."""
        if not self.training.acquire(blocking=False):
            raise KlampError(
                f"{self.model.project}/{self.model.name} is being trained. Wait for the train() that is running."
            )
        future = self._submit(job)
        # Also when the caller stopped waiting: the thread trains on until its step is done.
        future.add_done_callback(lambda _: self.training.release())
        return asyncio.wrap_future(future)

    async def sample(self, request: Request, settings: Settings) -> list[Choice]:
        """The answer to a request, drawn together with those that other coroutines make before the loop comes round."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Choice]] = loop.create_future()
        if not self.waiting or self.loop is not loop:
            self.loop, self.waiting = loop, {}
            loop.call_soon(self._start)
        self.waiting.setdefault(settings, []).append((request, answer))
        return await answer

    def _start(self) -> None:
        waiting, self.waiting = self.waiting, {}
        for settings, asked in waiting.items():
            task = asyncio.ensure_future(self._draw(settings, asked))
            self.drawing.add(task)
            task.add_done_callback(self.drawing.discard)

    async def _draw(self, settings: Settings, asked: list[Asked]) -> None:
        length, temperature = settings
        requests = [request for request, _ in asked]
        try:
            drawn = await self.call(
                lambda w: w.completions.sample(requests, max_tokens=length, temperature=temperature)
            )
        except Exception as error:
            drawn = [error] * len(asked)
        for (_, answer), choices in zip(asked, drawn, strict=True):
            if answer.done():  # somebody stopped waiting
                continue
            if isinstance(choices, Exception):
                answer.set_exception(choices)
            else:
                answer.set_result(choices)

    def _submit(self, job: Callable[[Worker], T]) -> concurrent.futures.Future[T]:
        with self.lock:
            self.wanted += 1
        future = self.thread.submit(self._run, job)
        # Whoever stops waiting before a job has begun takes it out of the queue: nothing waits for the thread then.
        future.add_done_callback(lambda f: self._no_longer_wanted() if f.cancelled() else None)
        return future

    def _run(self, job: Callable[[Worker], T]) -> T:
        self._no_longer_wanted()
        return job(self._opened())

    def _no_longer_wanted(self) -> None:
        with self.lock:
            self.wanted -= 1

    def _opened(self) -> Worker:
        if self.worker is None:
            self.worker = Worker(self.place)
        return self.worker

    # -- the endpoint -----------------------------------------------------------------------------------------------

    @property
    def encoder(self) -> Encoder:
        """The tokenizer of every step."""
        return self._opened().encoder

    @property
    def tokenizer(self) -> Any:
        """For the text of tokens."""
        return self.encoder.tokenizer

    @property
    def end(self) -> tuple[int, ...]:
        """Tokens that end a sequence."""
        return self.encoder.end

    def names(self) -> list[str]:
        """The model as it is, and at its saved steps."""
        return [self.served_as, *(f"{self.served_as}@{s}" for s in saved_steps(self.place.folder))]

    def weights(self, name: str) -> Model:
        """The weights that ``name`` stands for; in the model's thread."""
        step, worker = split_step(name)[1], self._opened()
        if step is not None and step != worker.step and step not in saved_steps(self.place.folder):
            raise NoSuchModel(name, self.names())
        return worker.completions.sampled_model(step)

    def submit(self, request: engine.Request) -> None:
        """Begin a request of the endpoint's, or raise Busy or Closed."""
        if self.place.server is not None and split_step(request.ask.model)[1] is None:
            self._ask_server(request)
        else:
            self.engine.submit(request)
            self._decode_soon()

    def refuse(self) -> None:
        """Take no more requests of the endpoint's, and tell those that wait."""
        self.engine.close()
        with self.lock:
            asked, self.asked = list(self.asked), set()
        for request in asked:
            request.tell(engine.closed())
        self.asking.shutdown(wait=False, cancel_futures=True)

    def _ask_server(self, request: engine.Request) -> None:
        """The newest weights through the vLLM server: the adapter is published here, all requests wait side by side."""
        with self.lock:
            self.engine.check_room(sum(r.ask.n for r in self.asked), request)
            self.asked.add(request)

        def begin(worker: Worker) -> None:
            assert worker.completions.served is not None, "the model has a server"
            draw = worker.completions.served.begin(worker, request, *self.engine.sized(request.ask))
            self.asking.submit(lambda: self._told(request, draw))

        def told(begun: concurrent.futures.Future[None]) -> None:
            if begun.exception() is not None:
                self._told(request, begun.result)

        self._submit(begin).add_done_callback(told)

    def _told(self, request: engine.Request, work: Callable[[], None]) -> None:
        """Run ``work``, which tells of a request; whatever it raises is told too."""
        try:
            if not request.cancelled:
                work()
        except Exception as error:
            request.tell(error)
        with self.lock:
            self.asked.discard(request)

    def _decode_soon(self) -> None:
        with self.lock:
            if self.decoding or not self.engine.waiting:
                return
            self.decoding = True
        self.thread.submit(self._decode)

    def _decode(self) -> None:
        """Decode until nothing is left, or until a job waits: then what runs is finished and the rest waits for it."""
        try:
            self._opened()
            self.engine.run(lambda: self.wanted > 0)
        except Exception as error:
            self.engine.fail(error)
        with self.lock:
            self.decoding = False
        self._decode_soon()


class Endpoint:
    """One server for all models of a backend, by ``name``, ``name@step``, ``project/name`` or ``project/name@step``."""

    def __init__(self, host: str, port: int, key: str | None) -> None:
        from klamp.serve.app import Server, make_app  # the extra klamp[serve]

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
        beside = self.models.get(opened.served_as, opened)
        if beside.model != opened.model:
            raise ConfigError(
                f"{opened.model.project}/{opened.model.name} and {beside.model.project}/{beside.model.name} would "
                f"answer to one name, {opened.served_as!r}. Choose another name, or open them with two backends."
            )
        self.models[opened.served_as] = opened

    def find(self, name: str) -> OpenModel | None:
        """The model that answers to ``name``."""
        base, _ = split_step(name)
        return next((m for known, m in self.models.items() if base in (known, f"{m.model.project}/{known}")), None)

    def close(self) -> None:
        """Stop answering."""
        self.server.close()
