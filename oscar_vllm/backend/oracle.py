"""A debug switch: every read of a served run is compared with the true keys and values, kept beside the cache (CPU).

With ``OSCAR_ORACLE=1`` each layer writes the tokens of a step a second time, into a store of its own that has no block
pool, no tables and no sharing: a token lies there under the number it got when it was computed. A token is known by all
tokens before it, so a prefix hit is compared with what some request with that very prefix computed. Reads are compared
bit for bit, and the attention over the stored rows with the output. What differs ends the run.
"""

import functools
import os
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS, PageLayout, unpack_codes
from oscar_vllm.kernels.views import CacheView, LayerRecipe
from oscar_vllm.kernels.write.reference import write_reference

SWITCH = "OSCAR_ORACLE"
OUTPUT_LIMIT = 0.02
"""Largest relative error of an output row: several roundings of bfloat16."""


class OracleError(RuntimeError):
    """A request read something other than its own keys and values."""


@dataclass
class _Request:
    """One request of the running batch."""

    hit: int
    """Tokens that the prefix cache had when it was admitted."""
    keys: list[int] = field(default_factory=list)
    """What each token is known by: a hash of it and all tokens before it."""
    numbers: list[int] = field(default_factory=list)
    """Where the store has each token."""


class Tokens:
    """Numbers the tokens that a process computes; shared by its layers."""

    def __init__(self) -> None:
        self.runner: Any = None
        """The one whose step is running."""
        self.last_runner: Any = None
        self.fresh = False
        """Whether this step's batch has not been numbered yet."""
        self.count = 0
        self.versions: dict[int, list[int]] = {}
        """Every number given to a token of that key: a prefix may have been computed more than once."""
        self.requests: dict[str, _Request] = {}
        self.rows: list[_Request] = []
        """The batch, in its order."""
        self.first = 0
        """Number of the batch's first new token."""

    def watch(self, runner_class: Any) -> None:
        """Learn of every step before vLLM's model runner takes it."""
        execute = runner_class.execute_model
        if hasattr(execute, "_oscar_oracle"):
            return

        @functools.wraps(execute)
        def execute_model(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if runner is not self.last_runner:  # another engine in this process
                self.last_runner, self.count = runner, 0
                self.versions.clear()
                self.requests.clear()
            for name in (*scheduler_output.finished_req_ids, *scheduler_output.scheduled_cached_reqs.resumed_req_ids):
                self.requests.pop(name, None)
            self.runner, self.fresh = runner, True
            try:
                return execute(runner, scheduler_output, *args, **kwargs)
            finally:
                self.runner = None

        execute_model._oscar_oracle = True  # type: ignore[attr-defined]
        runner_class.execute_model = execute_model

    def number(self, query_start: list[int], lengths: list[int]) -> None:
        """Number the batch's new tokens, once a step."""
        if not self.fresh:
            return
        self.fresh, self.first, self.rows = False, self.count, []
        batch, inputs = self.runner.input_batch, self.runner.input_ids.cpu[: query_start[-1]].tolist()
        for row, (start, stop) in enumerate(pairwise(query_start)):
            name, computed = batch.req_ids[row], lengths[row] - (stop - start)
            request = self.requests.get(name)
            if request is None:
                request = self.requests[name] = _Request(hit=computed)
                self._extend(request, batch.token_ids_cpu[row, :computed].tolist())
                request.numbers = [self.versions.get(key, [-1])[-1] for key in request.keys]
            if len(request.keys) < computed:
                raise OracleError(
                    f"{SWITCH}: request {name} reads {computed} cached tokens and computed {len(request.keys)}"
                )
            del request.keys[computed:], request.numbers[computed:]  # rejected drafts
            self._extend(request, inputs[start:stop])
            for key in request.keys[computed:]:
                self.versions.setdefault(key, []).append(self.count)
                request.numbers.append(self.count)
                self.count += 1
            self.rows.append(request)

    @staticmethod
    def _extend(request: _Request, tokens: list[int]) -> None:
        for token in tokens:
            request.keys.append(hash((request.keys[-1] if request.keys else 0, token)))


_tokens = Tokens()


def oracle_for(layer_name: str) -> "Oracle | None":
    """The oracle of a layer where the switch is on.

    Raises:
        ValueError: the switch is on and this is not a CPU.
    """
    if os.environ.get(SWITCH, "0") == "0":
        return None
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not current_platform.is_cpu():
        raise ValueError(f"{SWITCH} compares the reads of a run on the CPU: unset it to serve on another device")
    _tokens.watch(GPUModelRunner)  # which the CPU's derives from
    return Oracle(layer_name, _tokens)


def _history_rows(history: torch.Tensor, blocks: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """[N, H, 2, D/4 + 4] bytes, codes then meta of K and V, of tokens ``at`` [N] of pages ``blocks`` [N]."""
    layout = PageLayout(2 * (history.shape[-1] - 8))
    codes, meta = history.flatten(2).split([layout.key_meta, layout.page_bytes - layout.key_meta], -1)
    rows = [part.unflatten(-1, (2, PAGE_TOKENS, -1))[blocks, :, :, at] for part in (codes, meta)]
    return torch.cat(rows, -1)


def _window_rows(window: torch.Tensor, blocks: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """[N, H, 2 * D] 16-bit words, K then V, of tokens ``at`` [N] of window blocks ``blocks`` [N]."""
    return window[blocks, :, at].view(torch.int16)


def _grown(cache: torch.Tensor, like: torch.Tensor, blocks: int) -> torch.Tensor:
    """``cache`` with room for ``blocks`` blocks."""
    if blocks <= len(cache):
        return cache
    return torch.cat([cache, like.new_zeros(max(blocks - len(cache), len(cache)), *like.shape[1:])])


class Oracle:
    """The true keys and values of one layer, and the comparison."""

    def __init__(self, layer_name: str, tokens: Tokens) -> None:
        self.layer_name = layer_name
        self.tokens = tokens
        self.history = torch.empty(0)
        self.window = torch.empty(0)

    def check(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        view: CacheView,
        recipe: LayerRecipe,
        scale: float,
        num_decodes: int,
        output: torch.Tensor,
    ) -> None:
        """Keep a step's keys and values, and compare what its requests read and what came out.

        Args:
            query: [T, Hq, D] raw.
            key: [T, H, D] raw.
            value: [T, H, D] raw.
            view: the caches and tables of the whole batch, after the step.
            recipe: the layer's transforms.
            scale: softmax scale.
            num_decodes: requests that read their own new tokens from the cache; the others read what came before.
            output: [T, Hq, D] the layer's result.

        Raises:
            OracleError: naming layer, request and token.
        """
        if self.tokens.runner is None:  # a warm-up of vLLM's
            return
        starts = view.query_start.tolist()
        lengths = view.seq_lens.tolist()[: len(starts) - 1]
        self.tokens.number(starts, lengths)
        self._keep(key[: starts[-1]], value[: starts[-1]], view, recipe)
        for row, (start, stop) in enumerate(pairwise(starts)):
            is_decode = row < num_decodes
            # Each token that a decode verifies must read what a step of its own would read.
            for first in range(start, stop, 1 if is_decode else max(stop - start, 1)):
                computed = lengths[row] - (stop - first)
                cached = self._compare(view, row, computed, computed + is_decode)
                if cached is not None:
                    chunk = slice(first, first + 1 if is_decode else stop)
                    own = None if is_decode else (key[chunk], value[chunk])
                    want = _attention(query[chunk], cached, own, recipe, scale)
                    self._compare_output(output[chunk], want, row, computed)

    def _keep(self, key: torch.Tensor, value: torch.Tensor, view: CacheView, recipe: LayerRecipe) -> None:
        """Write a step's tokens where their numbers say; block 0 is left out, which writing skips."""
        first, last = self.tokens.first, self.tokens.count
        if not self.history.numel():
            self.history, self.window = view.history.new_zeros(1, *view.history.shape[1:]), view.window[:1].clone()
        self.history = _grown(self.history, view.history, last // PAGE_TOKENS + 2)
        self.window = _grown(self.window, view.window, last // WINDOW_TOKENS + 2)
        numbers = torch.arange(first, last)
        write_reference(key, value, self.history, self.window, numbers + PAGE_TOKENS, numbers + WINDOW_TOKENS, recipe)

    def _compare(
        self, view: CacheView, row: int, computed: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Compare the first ``length`` tokens of a request; returns their true rows [H, length, D] of K and of V."""
        if length == 0:
            return None
        request = self.tokens.rows[row]
        position = torch.arange(length)
        pages = view.block_table[row].long()[position // PAGE_TOKENS]
        blocks = view.window_table[row].long()[position // WINDOW_TOKENS]
        in_window = ((position < view.sink) | (position >= computed - view.recent)) & (blocks != 0)
        must = (position < view.sink) | (position >= max(request.hit, computed - view.recent))
        self._refuse(must & ~in_window, row, "has no unquantized copy in its window")
        unknown = torch.tensor(request.numbers[:length]) < 0
        self._refuse(unknown, row, "was never computed by any request")
        dim = view.window.shape[-1] // 2
        exact = _window_rows(view.window, blocks, position % WINDOW_TOKENS)
        coded = _history_rows(view.history, pages, position % PAGE_TOKENS)
        numbers = torch.tensor(request.numbers[:length])

        def equal(at: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            true_exact = _window_rows(self.window, 1 + numbers // WINDOW_TOKENS, numbers % WINDOW_TOKENS)
            true_coded = _history_rows(self.history, 1 + numbers // PAGE_TOKENS, numbers % PAGE_TOKENS)
            same_exact = (true_exact == exact[at]).flatten(1).all(1)
            same_coded = (true_coded == coded[at]).flatten(1).all(1)
            return torch.where(in_window[at], same_exact, same_coded)

        differs = ~equal(position, numbers)
        for at in (differs & (position < request.hit)).nonzero().flatten().tolist():
            # A hit page may be of an earlier computation of the same prefix.
            candidates = torch.tensor(self.tokens.versions[request.keys[at]])
            fits = equal(torch.full_like(candidates, at), candidates)
            if fits.any():
                request.numbers[at] = int(candidates[fits][-1])
                differs[at] = False
        self._refuse(differs, row, "is not the key and value that were computed for it")
        layout = PageLayout(dim)
        codes, meta = coded.split([layout.code_bytes, coded.shape[-1] - layout.code_bytes], -1)
        levels = meta.contiguous().view(torch.float16).float()
        rows = unpack_codes(codes.contiguous()) * levels[..., :1] + levels[..., 1:]  # [N, H, 2, D]
        true = exact.view(view.window.dtype).float().unflatten(-1, (2, dim))
        rows = torch.where(in_window[:, None, None, None], true, rows).permute(2, 1, 0, 3)
        return rows[0], rows[1]

    def _refuse(self, wrong: torch.Tensor, row: int, what: str) -> None:
        if bool(wrong.any()):
            name = self.tokens.runner.input_batch.req_ids[row]
            at = wrong.nonzero().flatten().tolist()
            raise OracleError(
                f"{SWITCH}: layer {self.layer_name}: token {at[0]} of request {name} {what} ({len(at)} such tokens)"
            )

    def _compare_output(self, given: torch.Tensor, want: torch.Tensor, row: int, computed: int) -> None:
        error = (given.float() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-3)
        wrong = ~(error <= OUTPUT_LIMIT) & want.isfinite().all(-1)
        if bool(wrong.any()):
            token, head = wrong.nonzero()[0].tolist()
            name = self.tokens.runner.input_batch.req_ids[row]
            raise OracleError(
                f"{SWITCH}: layer {self.layer_name}: the output of head {head} at token {computed + token} of request "
                f"{name} is not attention over its keys and values (relative error {float(error[token, head]):.3g})"
            )


def _attention(
    query: torch.Tensor,
    cached: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor] | None,
    recipe: LayerRecipe,
    scale: float,
) -> torch.Tensor:
    """[N, Hq, D] attention of the last N tokens of a request to its cached rows and, where given, raw rows of its own.

    Cached rows [H, T, D] are mapped out of the transformed space, so that both kinds stand side by side.
    """
    heads = recipe.key.shape[0]
    keys = cached[0] @ recipe.query.transpose(-1, -2) + recipe.key_mean[:, None]
    values = cached[1] @ recipe.output + recipe.value_mean[:, None]
    if own is not None:
        keys = torch.cat([keys, own[0].float().transpose(0, 1)], 1)
        values = torch.cat([values, own[1].float().transpose(0, 1)], 1)
    scores = scale * torch.einsum("nhgd,htd->hgnt", query.float().unflatten(1, (heads, -1)), keys)
    new, total = query.shape[0], keys.shape[1]
    hidden = torch.arange(total) > torch.arange(total - new, total)[:, None]
    scores.masked_fill_(hidden, -torch.inf)
    return torch.einsum("hgnt,htd->nhgd", scores.softmax(-1), values).flatten(1, 2)
