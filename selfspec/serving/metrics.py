"""`Metrics`: what /metrics tells. What vLLM measures too has vLLM's names, which dashboards read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from selfspec.core import RoundOutput
from selfspec.drafting.grammar import drafter_of
from selfspec.serving.calls import Call, Choice
from selfspec.serving.refusal import Refusal

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
HTTP = "http_"  # how names of figures of answers begin
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)


class Metrics:
    """The figures of one server, in a registry of its own. All methods may be called in any thread.

    Args:
        model: the label `model_name`.
    """

    def __init__(self, model: str) -> None:
        self.registry, self._model = CollectorRegistry(), model
        gauge, counter, histogram = self._maker(Gauge), self._maker(Counter), self._maker(Histogram)
        self._running = gauge("vllm:num_requests_running", "Outputs that have a place in the batch.")
        self._waiting = gauge("vllm:num_requests_waiting", "Outputs that wait for a place.")
        self._kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of the cache's pages in use, in 0..1.")
        self._prefix_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that ended.")
        self._new_tokens = counter("vllm:generation_tokens", "New tokens.")
        self._success = counter("vllm:request_success", "Outputs that ended, by reason.", "finished_reason")
        self._rejections = counter("vllm:admission_rejections", "Requests that were not admitted.", "reason")
        self._errors = counter("selfspec_request_errors", "Requests that ended with an error.", "status")
        seconds = {"buckets": SECONDS}
        self._queue = histogram("vllm:request_queue_time_seconds", "Arrival to a place in the batch.", **seconds)
        self._first = histogram("vllm:time_to_first_token_seconds", "Arrival to the first token.", **seconds)
        self._between = histogram("vllm:inter_token_latency_seconds", "Between two pieces of an output.", **seconds)
        per_token = "First token to last, by the tokens after the first."
        self._per_token = histogram("vllm:request_time_per_output_token_seconds", per_token, **seconds)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Arrival to the end.", **seconds)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "A place to the first token.", **seconds)
        self._decode = histogram("vllm:request_decode_time_seconds", "First token to last.", **seconds)
        self._inference = histogram("vllm:request_inference_time_seconds", "A place to the last token.", **seconds)
        self._n = histogram("vllm:request_params_n", "`n` of requests.", buckets=LENGTHS)
        self._asked = histogram("vllm:request_params_max_tokens", "`max_tokens` of requests.", buckets=TOKENS)
        self._iteration = histogram("vllm:iteration_tokens_total", "New tokens of a program.", buckets=TOKENS)
        preempted = "How often an output gave its place up for a while, for want of memory."
        self._preemptions = counter("vllm:num_preemptions", preempted)
        http: dict[str, Any] = {"registry": self.registry}
        self._http = Counter("http_requests", "Answers.", ("handler", "method", "status"), **http)
        self._http_seconds = Histogram(
            "http_request_duration_seconds", "Seconds of answers.", ("handler", "method"), buckets=SECONDS, **http
        )
        self._prompt = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", buckets=TOKENS)
        self._output = histogram("vllm:request_generation_tokens", "Tokens of an output.", buckets=TOKENS)
        self._drafts = counter("vllm:spec_decode_num_drafts", "Drafts: a row in a round that drafted for it.")
        self._drafted = counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        by_position = "Accepted draft tokens by position in the draft."
        self._positions = counter("vllm:spec_decode_num_accepted_tokens_per_pos", by_position, "position")
        self._rounds = counter(
            "selfspec_rounds",
            "Rounds by drafter: exit, lookup, grammar (forced tokens), or plain without a draft.",
            "drafter",
        )
        self._exits = counter("selfspec_exit_rounds", "Rounds that a layer drafted, by that layer.", "exit_layer")
        self._lengths = histogram("selfspec_draft_length", "Drafted tokens of a draft.", buckets=LENGTHS)
        self._wasted = counter("selfspec_wasted_tokens", "Tokens decoded beyond the end of an output.")
        self._stages = counter("selfspec_engine_seconds", "Seconds of the engine by stage.", "stage")

    def _maker(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        """A function that makes metrics of this kind, labelled by the model, or functions of a further label."""

        def make(name: str, help: str, *labels: str, **more: Any) -> Any:
            made = kind(name, help, ("model_name", *labels), registry=self.registry, **more)
            return cache(partial(made.labels, self._model)) if labels else made.labels(self._model)

        return make

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)

    def watch(self, running: Callable[[], int], waiting: Callable[[], int], kv_usage: Callable[[], float]) -> None:
        """Who says how the engine is, whenever somebody asks."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)
        self._kv_usage.set_function(kv_usage)

    def program(self, rounds: Sequence[RoundOutput], num_preemptions: int) -> None:
        """Count the rounds of a program, all at once, and the places that were given up before it."""
        self._preemptions.inc(num_preemptions)
        sums, num_tokens = defaultdict[Any, float](float), 0
        for round_ in rounds:
            seconds = round_.seconds
            sums[self._stages("prefill")] += seconds.prefill
            if round_.plan is None:
                continue
            sums[self._stages("decode")] += seconds.total - seconds.prefill - seconds.control
            sums[self._stages("control")] += seconds.control
            layer = round_.exit_layer
            sums[self._rounds(drafter_of(round_))] += 1
            if layer:
                sums[self._exits(layer)] += 1
            sums[self._wasted] += round_.num_wasted
            for row in round_.rows:
                num_tokens += len(row.token_ids)
                if row.drafted:
                    self._lengths.observe(len(row.drafted))
                    sums[self._drafts] += 1
                    sums[self._drafted] += len(row.drafted)
                    sums[self._accepted] += row.num_accepted
                    for position in range(row.num_accepted):
                        sums[self._positions(position)] += 1
        sums[self._new_tokens] += num_tokens
        self._iteration.observe(num_tokens)
        for counter, number in sums.items():
            counter.inc(number)

    def cache(self, page_size: int, num_pages: int) -> None:
        """Tell what the KV cache is like."""
        labels = {"block_size": page_size, "num_gpu_blocks": num_pages, "model_name": self._model}
        Gauge("vllm:cache_config_info", "Pages of the KV cache.", (*labels,), registry=self.registry).labels(
            **labels
        ).set(1)

    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        """Count an answer of any kind.

        Args:
            handler: the route.
        """
        self._http.labels(handler, method, status).inc()
        self._http_seconds.labels(handler, method).observe(seconds)

    def reject(self, reason: str) -> None:
        """Count a request that was not admitted."""
        self._rejections(reason).inc()

    def start(self, call: Call, now: float) -> None:
        """Count a request that got a place."""
        self._queue.observe(now - call.arrived)
        self._n.observe(call.params.n)
        self._asked.observe(call.params.max_tokens or 0)

    def piece(self, call: Call, last_at: float | None, now: float) -> None:
        """Count that a program added to an output. `last_at`: when the piece before came; None: there was none."""
        if last_at is None:
            self._first.observe(now - call.arrived)
        else:
            self._between.observe(now - last_at)

    def end(self, call: Call, choice: Choice, now: float) -> None:
        """Count an output that ended."""
        self._success(choice.finish_reason).inc()
        self._output.observe(choice.num_tokens)
        self._whole.observe(now - call.arrived)
        if choice.first_at is None or choice.last_at is None:
            return
        started = call.arrived if call.started is None else call.started
        self._prefill.observe(choice.first_at - started)
        self._decode.observe(choice.last_at - choice.first_at)
        self._inference.observe(choice.last_at - started)
        if choice.num_tokens > 1:
            self._per_token.observe((choice.last_at - choice.first_at) / (choice.num_tokens - 1))

    def prompts(self, call: Call) -> None:
        """Count the prompts of a call that ended."""
        self._prompt_tokens.inc(call.num_prompt_tokens)
        self._prefix_queries.inc(call.num_prompt_tokens)
        self._prefix_hits.inc(call.num_cached_tokens)
        for prompt in call.prompts:
            self._prompt.observe(len(prompt))

    def abort(self, call: Call) -> None:
        """Count a call whose client went away."""
        self._success("abort").inc(sum(choice.finish_reason is None for choice in call.choices))

    def fail(self, refusal: Refusal) -> None:
        """Count a call that ended with an error."""
        self._errors(refusal.status).inc()


def joined(own: bytes, told: Mapping[str, bytes]) -> bytes:
    """What /metrics tells of several replicas, each with the label `replica`.

    Args:
        own: what their address tells, of which answers are taken that no replica gave.
        told: by replica.
    """
    registry, families = CollectorRegistry(), dict[str, Metric]()
    for name, text in {"": own, **told}.items():
        for family in text_string_to_metric_families(text.decode()):
            if not name and not family.name.startswith(HTTP):
                continue
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            more = {"replica": name} if name else {}
            known.samples += [one._replace(labels=one.labels | more) for one in family.samples]
    registry.register(_Families(families.values()))
    return generate_latest(registry)


class _Families(Collector):
    """Collected before."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
