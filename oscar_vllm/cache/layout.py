"""The INT2 page format: the only place that knows byte offsets.

One page holds ``PAGE_TOKENS`` tokens of one KV head, contiguous in memory (``P`` = PAGE_TOKENS, ``D`` = head size):

====================  ==================================================
offset                content
====================  ==================================================
0                     K codes, [P][D/4] bytes
P * D/4               V codes, [P][D/4] bytes
P * D/2               K meta, [P] x (fp16 scale, fp16 minimum)
P * D/2 + 4 * P       V meta, [P] x (fp16 scale, fp16 minimum)
====================  ==================================================

Byte ``k`` of a token holds channels ``4k .. 4k+3``; channel ``4k+i`` sits at bits ``2i``; a stored value is
``code * scale + minimum``. A token's write touches only its own bytes, so tokens never race. vLLM sees the page as
``P`` opaque slots of ``D/2 + 8`` bytes ([blocks, heads, P, D/2 + 8]).
"""

from dataclasses import dataclass
from functools import cache

import torch

FORMAT_VERSION = 1
BITS = 2
LEVELS = 4
CODES_PER_BYTE = 4
PAGE_TOKENS = 128
META_BYTES = 4
"""Bytes of one token's (fp16 scale, fp16 minimum) pair."""
WINDOW_TOKENS = 16
"""Tokens of one block of the BF16 window cache."""
FP16_MAX = 65504.0
MAX_VALUE_SCALE = 255.0
"""Largest scale of a value row, which decode multiplies by 2^8 times a probability in FP16; wider rows saturate."""


@dataclass(frozen=True)
class PageLayout:
    """Byte offsets inside one KV head's page of ``PAGE_TOKENS`` tokens of ``head_size`` channels."""

    head_size: int

    @property
    def code_bytes(self) -> int:
        """Bytes of one token's K (or V) codes."""
        return self.head_size // CODES_PER_BYTE

    @property
    def key_codes(self) -> int:
        return 0

    @property
    def value_codes(self) -> int:
        return PAGE_TOKENS * self.code_bytes

    @property
    def key_meta(self) -> int:
        return 2 * PAGE_TOKENS * self.code_bytes

    @property
    def value_meta(self) -> int:
        return self.key_meta + META_BYTES * PAGE_TOKENS

    @property
    def token_bytes(self) -> int:
        """Bytes a token costs in one page: codes and meta of K and V."""
        return 2 * (self.code_bytes + META_BYTES)

    @property
    def page_bytes(self) -> int:
        return PAGE_TOKENS * self.token_bytes

    @property
    def bits_per_element(self) -> float:
        """Stored bits per K or V element of a history token, scale and minimum included."""
        return 8 * self.token_bytes / (2 * self.head_size)


def bits_per_element(head_size: int, tokens: int, window_tokens: int, dtype_bits: int = 16) -> float:
    """Mean bits per cached element of a request of ``tokens`` tokens, ``window_tokens`` of them also held exactly.

    Every token has an INT2 row; a windowed token is read from (and counted at) ``dtype_bits`` instead.
    """
    base = PageLayout(head_size).bits_per_element
    return base + min(window_tokens, tokens) * (dtype_bits - base) / max(tokens, 1)


@cache
def _unpack_table(device: torch.device) -> torch.Tensor:
    """[256] int32: the four codes of every byte, one in each byte of the word (1 KB: stays in the first cache)."""
    byte = torch.arange(256, device=device, dtype=torch.int32)
    codes = [(byte >> (BITS * i) & (LEVELS - 1)) << (8 * i) for i in range(CODES_PER_BYTE)]
    return codes[0] | codes[1] | codes[2] | codes[3]


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """[..., D] integer codes 0..3 -> [..., D/4] uint8, four codes a byte."""
    quads = codes.to(torch.uint8).unflatten(-1, (-1, CODES_PER_BYTE))
    return quads[..., 0] | (quads[..., 1] << 2) | (quads[..., 2] << 4) | (quads[..., 3] << 6)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """[..., D/4] uint8 -> [..., D] float32 codes."""
    words = _unpack_table(packed.device).index_select(0, packed.flatten().int())
    return words.view(torch.uint8).float().view(*packed.shape[:-1], packed.shape[-1] * CODES_PER_BYTE)
