"""This module decides, once for each of SGLang 0.5.12's own routes, whether a server with slots serves it.

What is not listed is refused, so a route that a newer SGLang adds is refused until somebody has decided about it. Paths
are written as SGLang's application has them (``entrypoints/http_server.py::"@app.post("``).
"""

import itertools
import os

from starlette.routing import compile_path
from starlette.types import Scope

from orbit_kernels.contract import routes

NATIVE_PATH = "/generate"
OPENAI_PATHS = ("/v1/completions", "/v1/chat/completions")
CHOOSING_PATHS = (NATIVE_PATH, *OPENAI_PATHS)
"""A request to one of these chooses its version; the others have no place for the choice, and refuse it."""

_OLLAMA_CHAT = os.environ.get("SGLANG_OLLAMA_CHAT_ROUTE", "/api/chat")
_OLLAMA_GENERATE = os.environ.get("SGLANG_OLLAMA_GENERATE_ROUTE", "/api/generate")
_OLLAMA_TAGS = os.environ.get("SGLANG_OLLAMA_TAGS_ROUTE", "/api/tags")
_OLLAMA_SHOW = os.environ.get("SGLANG_OLLAMA_SHOW_ROUTE", "/api/show")
_VERTEX = os.environ.get("AIP_PREDICT_ROUTE", "/vertex_generate")
_ROOT = os.environ.get("SGLANG_OLLAMA_ROOT_ROUTE", "/")


def _each(methods: str, *paths: str) -> set[str]:
    return {f"{method} {path}" for method, path in itertools.product(methods.split(), paths)}


SERVED: frozenset[str] = frozenset(
    # Descriptions and health.
    _each("GET HEAD", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc", "/metrics", _ROOT, "/")
    | _each("GET", "/health", "/health_generate", "/ping", "/v1/models", "/v1/models/{model:path}", _OLLAMA_TAGS)
    | _each("GET", "/get_model_info", "/model_info", "/get_server_info", "/server_info")
    | _each("GET", "/get_weight_version", "/weight_version", "/get_load", "/v1/loads")
    # Generation; what is for embeddings is answered by SGLang with the reason why it cannot be.
    | _each("POST PUT", NATIVE_PATH, "/encode", "/classify", "/v1/rerank")
    | _each("POST", *OPENAI_PATHS, "/v1/embeddings", "/v1/classify", "/v1/score", "/v1/audio/transcriptions")
    | _each("POST", "/v1/responses", "/v1/responses/{response_id}/cancel")
    | _each("GET", "/v1/responses/{response_id}")
    | _each("POST", "/v1/messages", "/v1/messages/count_tokens", "/invocations")
    | _each("POST", _VERTEX, _OLLAMA_CHAT, _OLLAMA_GENERATE, _OLLAMA_SHOW)
    # Text.
    | _each("POST", "/v1/tokenize", "/tokenize", "/v1/detokenize", "/detokenize")
    | _each("POST", "/parse_function_call", "/separate_reasoning")
    # Requests in flight, cache and sessions.
    | _each("POST", "/abort_request", "/pause_generation", "/continue_generation")
    | _each("GET POST", "/flush_cache", "/open_session", "/close_session", "/slow_down", "/freeze_gc")
    # What the server reports, and how; the base is read and not written.
    | _each("GET POST", "/start_profile", "/stop_profile", "/set_trace_level", "/configure_logging")
    | _each("GET POST", "/start_expert_distribution_record", "/stop_expert_distribution_record")
    | _each("GET POST", "/dump_expert_distribution_record", "/get_weights_by_name")
    | _each("POST PUT", "/set_internal_state")
)

_FROZEN = "the base is frozen, and adapters come by POST /orbit/stage"
_MEMORY = "it gives up the memory of the frozen base, which SGLang does not restore"
_STORAGE = "keys of an external cache do not hold the version"
_SENDING = "it opens connections that read the base for another server, which is to load it from the checkpoint"
_SPECULATION = "draft tokens carry no version"

REFUSED: dict[str, str] = {
    route: reason
    for reason, refused in {
        _FROZEN: (
            _each("POST", "/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_ipc")
            | _each("POST", "/update_weights_from_distributed", "/init_weights_update_group")
            | _each("POST", "/destroy_weights_update_group", "/update_weight_version", "/weights_checker")
            | _each("POST", "/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter")
        ),
        _MEMORY: _each("GET POST", "/release_memory_occupation", "/resume_memory_occupation"),
        _SENDING: (
            _each("POST", "/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance")
            | _each("GET", "/get_remote_instance_transfer_engine_info", "/remote_instance_transfer_engine_info")
        ),
        _STORAGE: (
            _each("PUT DELETE GET", "/hicache/storage-backend")
            | _each("POST", "/hicache/storage-backend/clear")
            | _each("GET POST", "/clear_hicache_storage_backend")
        ),
        _SPECULATION: (
            _each("POST", "/add_external_corpus", "/remove_external_corpus") | _each("GET", "/list_external_corpora")
        ),
        "it reads and changes tensors of the running model": _each("POST", "/dumper/{method}"),
    }.items()
    for route in sorted(refused)
}
"""Each route that is refused stands here with the reason."""

UNDECIDED = "it is not among the routes that a server with slots serves"

_OURS = frozenset(f"{route.method} {route.path}" for route in routes.ROUTES)
_PATTERNS = [
    (method, compile_path(path)[0])
    for method, path in (route.split(" ", 1) for route in sorted(SERVED | {"GET /metrics/{path:path}"}))
    if "{" in path
]


def path_of(scope: Scope) -> str:
    """Returns the path of a request as the application's routes have it, without ``--fastapi-root-path``."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def reason_to_refuse(method: str, path: str) -> str | None:
    """Returns why a server with slots refuses a request, whatever its key; None where it is served.

    An ``OPTIONS`` request is answered by SGLang's middleware for other origins, or with 405.
    """
    route = f"{method} {path}"
    if route in SERVED or route in _OURS or method == "OPTIONS":
        return None
    if any(method == allowed and pattern.match(path) for allowed, pattern in _PATTERNS):
        return None
    return REFUSED.get(route, UNDECIDED)
