"""`Info`: the routes that tell about the model and the server."""

from __future__ import annotations

from time import time
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

import selfspec
from selfspec.serving.admission import Dispatcher
from selfspec.serving.bodies import Json
from selfspec.serving.config import ServerConfig
from selfspec.serving.metrics import Metrics
from selfspec.serving.refusal import Refusal, shown
from selfspec.serving.tokens import Reader

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class Info:
    """What clients, load generators, balancers and operators ask of a server."""

    def __init__(self, config: ServerConfig, metrics: Metrics, dispatcher: Dispatcher, reader: Reader) -> None:
        self._config, self._metrics, self._dispatcher, self._reader = config, metrics, dispatcher, reader
        self._created = int(time())
        self._names = config.model, *config.aliases

    def name(self, asked: str | None) -> str:
        """The name of the model that a request asks for; the first one where it names none.

        Raises:
            Refusal: there is none of that name.
        """
        if not asked or asked in self._names:
            return asked or self._config.model
        message = f"there is no model {shown(asked)} here; this server has {', '.join(map(repr, self._names))}"
        raise Refusal(message, 404, param="model", code="model_not_found")

    async def models(self) -> Response:
        """`/v1/models`."""
        return Json({"object": "list", "data": [self._model(name) for name in self._names]})

    async def model(self, name: str) -> Response:
        """`/v1/models/{id}`."""
        return Json(self._model(self.name(name)))

    async def health(self) -> Response:
        """`/health` and `/ping`."""
        return Response(status_code=200 if self._dispatcher.is_healthy else 503)

    async def metrics(self) -> Response:
        """`/metrics`, in Prometheus' text format."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def version(self) -> Response:
        """`/version`, as vLLM has it."""
        return Json({"version": selfspec.__version__})

    async def load(self) -> Response:
        """`/load`, as vLLM has it: requests that have not ended."""
        return Json({"server_load": self._dispatcher.num_open})

    async def props(self) -> Response:
        """`/props`, as llama-server has it."""
        settings = {"n_ctx": self._reader.max_model_len}
        told = {"default_generation_settings": settings, "total_slots": self._dispatcher.max_num_seqs}
        told |= {"model_alias": self._config.model, "chat_template": self._reader.template}
        told |= {"modalities": {"vision": False, "audio": False}}
        return Json(told | {"build_info": f"selfspec {selfspec.__version__}", "is_sleeping": False})

    async def slots(self) -> Response:
        """`/slots`, as llama-server has it: places of the batch."""
        running, most = self._dispatcher.num_running, self._reader.max_model_len
        places = range(self._dispatcher.max_num_seqs)
        return Json([{"id": place, "n_ctx": most, "is_processing": place < running} for place in places])

    async def tokenizer_info(self) -> Response:
        """`/tokenizer_info`, as vLLM has it."""
        tokenizer: Any = self._reader.tokenizer
        if tokenizer is None:
            raise Refusal("this model has no tokenizer; send token ids", 404)
        told = {"tokenizer_class": type(tokenizer).__name__, "vocab_size": len(tokenizer)}
        told |= {name: getattr(tokenizer, name, None) for name in SPECIAL}
        told |= {"chat_template": self._reader.template, "model_max_length": self._reader.max_model_len}
        return Json(told)

    def _model(self, name: str) -> dict[str, Any]:
        own = {"id": name, "object": "model", "created": self._created, "owned_by": "selfspec"}
        return own | {"root": self._config.model, "parent": None, "max_model_len": self._reader.max_model_len}
