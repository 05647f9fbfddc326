"""A KIVI-like cache (Liu et al., arXiv 2402.02750) in reference maths: transformers' own model, exact elsewhere.

Keys are quantized per channel in groups of 32 tokens, values per token in groups of 32 channels, both to 2 bits with a
16-bit scale and minimum a group. A group of keys is quantized once it is whole; until then its tokens stay as they are
(KIVI's residual). Windows and chunks are those of the served measurement, so that the figures can be compared.
"""

from collections.abc import Sequence
from typing import Any

import torch

from oscar_vllm.evaluation.divergence import Quality, Rows, compare_rows
from oscar_vllm.evaluation.reference_attention import Attention, attending

GROUP = 32


def quantize_groups(x: torch.Tensor, dim: int) -> torch.Tensor:
    """``x`` as two bits restore it, in whole groups of ``GROUP`` along ``dim``; what is left over stays exact."""
    x = x.transpose(dim, -1)
    whole = x.shape[-1] // GROUP * GROUP
    groups = x[..., :whole].float().unflatten(-1, (-1, GROUP))
    low = groups.amin(-1, keepdim=True).half().float()
    step = ((groups.amax(-1, keepdim=True) - low) / 3).half().float()
    codes = ((groups - low) / torch.where(step > 0, step, 1.0) + 0.5).floor().clamp(0, 3)
    restored = (codes * step + low).flatten(-2).to(x.dtype)
    return torch.cat([restored, x[..., whole:]], -1).transpose(dim, -1)


def kivi_attention(sink: int, recent: int, chunk: int) -> Attention:
    """Causal attention that reads each chunk of queries' past as the cache would give it."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, layer: int) -> torch.Tensor:
        group = query.shape[0] // key.shape[0]
        stored_value = quantize_groups(value, -1)
        outputs = []
        for start in range(0, query.shape[1], chunk):
            end = min(start + chunk, query.shape[1])
            position = torch.arange(end, device=query.device)
            exact = ((position < sink) | (position >= start - recent))[:, None]
            # Only groups that were whole when the chunk began.
            stored_key = torch.cat([quantize_groups(key[:, :start], -2), key[:, start:end]], -2)
            k = torch.where(exact, key[:, :end], stored_key).repeat_interleave(group, 0)
            v = torch.where(exact, value[:, :end], stored_value[:, :end]).repeat_interleave(group, 0)
            causal = position <= position[start:end, None]
            outputs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    query[:, start:end], k, v, attn_mask=causal, scale=scale
                )
            )
        return torch.cat(outputs, 1)

    return attend


def kivi_quality(
    model: str, prompts: Sequence[Sequence[int]], windows: Sequence[tuple[int, int]], *, skip: int, chunk: int
) -> list[Quality]:
    """The quality of each (sink, recent) against the same model without quantization, over the same positions."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    network = network.to(device).eval()
    rows: list[list[Rows]] = [[] for _ in windows]
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([list(prompt)], device=device)
            reference = network.model(ids, use_cache=False).last_hidden_state[0]
            for part, (sink, recent) in zip(rows, windows, strict=True):
                with attending(network, kivi_attention(sink, recent, chunk)):
                    hidden = network.model(ids, use_cache=False).last_hidden_state[0]
                for start in range(skip, ids.shape[1] - 1, chunk):
                    end = min(start + chunk, ids.shape[1] - 1)
                    logits, other = (network.lm_head(states[start:end]) for states in (reference, hidden))
                    part.append(compare_rows(logits, other, ids[0, start + 1 : end + 1]))
    return [Quality.of(part) for part in rows]
