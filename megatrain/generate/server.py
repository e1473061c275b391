"""Replies from a vLLM server given by its address, to which new weights go through a folder.

By the server's HTTP interface: its completions for replies
(https://docs.vllm.ai/en/latest/serving/openai_compatible_server), `reload_weights` for weights
(https://docs.vllm.ai/en/latest/features/sleep_mode). Its interface for single weights needs NCCL or
CUDA IPC, so all weights go together.
"""

import json
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from megatrain.errors import RunFailed, in_one_line
from megatrain.generate.sampling import Sampling

_AT_ONCE = 64  # requests
_WAITS = (1, 2, 4)  # seconds before a request is sent again
_BUSY = (502, 503)
_DEV = "start it with VLLM_SERVER_DEV_MODE=1, which lets it load weights"


class Continued(NamedTuple):
    """A server's reply to a prompt; `ended`: by a stop token; `log_probs`: of each token."""

    ids: list[int]
    ended: bool
    log_probs: list[float]


class Server:
    """A vLLM server.

    Attributes:
        model: the name of the model that it serves.
    """

    def __init__(self, address: str, *, vocab_size: int, length: int, seconds: float) -> None:
        """Args: `length`: tokens of a prompt and its reply; `seconds`: for each request.

        Raises RunFailed: it cannot be reached, is no vLLM server, or serves shorter rows.
        """
        self.address, self._vocabulary, self._seconds = address.rstrip("/"), vocab_size, seconds
        served = self._asked("/v1/models")
        try:
            first = served["data"][0]
            self.model, room = str(first["id"]), int(first.get("max_model_len") or length)
        except (KeyError, IndexError, TypeError, ValueError):
            raise self._failure("it names no model at /v1/models; it must be vLLM's") from None
        if room < length:
            raise self._failure(
                f"it takes {room} tokens, and data.sequence_length is {length}; start it with "
                f"--max-model-len {length}"
            )

    def load(self, folder: Path) -> None:
        """Have the server load the weights of a folder that it sees under the same path."""
        kwargs = {"weights_path": str(folder.absolute())}
        self._asked("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        if self._asked("/reset_prefix_cache", {}).get("success") is False:
            raise self._failure("it keeps what it has computed with earlier weights")

    def continued(
        self, ids: Sequence[Sequence[int]], count: int, sampling: Sampling, stops: Collection[int]
    ) -> list[Continued]:
        """`count` replies to each prompt, one prompt after the other; `sampling` has all settings.

        Raises RunFailed: the server fails, or its answer has another form.
        """
        plain = {
            "model": self.model,
            "n": count,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": sorted(stops),
            "return_token_ids": True,
            "logprobs": 0,
        }

        def asked(number: int) -> list[Continued]:
            # The server counts its seed up over n replies; each prompt needs other seeds.
            of_prompt = {"prompt": list(ids[number]), "seed": sampling.seed // 2 + number * count}
            return self._read(self._asked("/v1/completions", plain | of_prompt), ids[number], count)

        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return [reply for replies in threads.map(asked, range(len(ids))) for reply in replies]

    def _read(self, answer: Any, prompt: Sequence[int], count: int) -> list[Continued]:
        """The replies in a server's answer. Raises RunFailed: it has not the expected form."""
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            replies = [
                Continued(
                    [int(reply) for reply in choice["token_ids"]],
                    choice["finish_reason"] == "stop",
                    [float(reply) for reply in choice["logprobs"]["token_logprobs"]],
                )
                for choice in choices
            ]
            seen = [choice.get("prompt_token_ids") or list(prompt) for choice in choices]
            reasons = {choice["finish_reason"] for choice in choices} - {"stop", "length"}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self._failure(
                "its reply has no token_ids and logprobs; a vLLM that knows return_token_ids does"
            ) from None
        if any(reply != list(prompt) for reply in seen):
            raise self._failure("it has replied to other tokens than those of the prompt")
        if reasons:
            raise self._failure(f"a reply ended with {min(map(str, reasons))}")
        even = all(reply.ids and len(reply.ids) == len(reply.log_probs) for reply in replies)
        if len(replies) != count or not even:
            raise self._failure(f"it gives {len(replies)} replies for {count}, or of other lengths")
        tokens = [token for reply in replies for token in reply.ids]
        if min(tokens) < 0 or max(tokens) >= self._vocabulary:
            raise self._failure(
                f"it replies {min(tokens)} to {max(tokens)}, and the model's tokens are "
                f"0 to {self._vocabulary - 1}: it serves another model"
            )
        return replies

    def _asked(self, path: str, body: Any = None) -> Any:
        """The server's answer as JSON; {} if it is empty. Retries if there is no answer."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.address + path, data, {"Content-Type": "application/json"})
        for wait in (*_WAITS, None):
            try:
                with urlopen(request, timeout=self._seconds) as answer:
                    return json.loads(answer.read() or b"{}")
            except HTTPError as error:
                if error.code in _BUSY and wait is not None:
                    time.sleep(wait)
                    continue
                body_text = in_one_line(error.read().decode(errors="replace"), 200)
                absent = error.code == 404 and body is not None and path != "/v1/completions"
                why = _DEV if absent else f"it answers {path} with {error.code}: {body_text}"
                raise self._failure(why) from None
            except TimeoutError:
                raise self._failure(
                    f"no answer to {path} in {self._seconds:g} s; see rollout.server_seconds"
                ) from None
            except (URLError, ConnectionError, HTTPException) as error:
                if wait is None:
                    reason = getattr(error, "reason", error)
                    raise self._failure(f"it cannot be reached: {in_one_line(reason)}") from None
                time.sleep(wait)
            except ValueError:
                raise self._failure(f"its answer to {path} is no JSON") from None
        raise AssertionError("the last attempt returns or raises")

    def _failure(self, why: str) -> RunFailed:
        return RunFailed(f"rollout.server {self.address}: {why}")
