"""The page format byte for byte, worked out by hand rather than with the code under test."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oscar_vllm.cache.layout import PAGE_TOKENS, PageLayout, bits_per_element, pack_codes, unpack_codes
from oscar_vllm.kernels.views import LayerRecipe
from oscar_vllm.kernels.write.reference import write_reference

UNTOUCHED = 0xA5


def identity_recipe(heads: int, dim: int) -> LayerRecipe:
    """Stores every row as it comes: no transform, no mean, no clip, no refit."""
    eye, zero, one = torch.eye(dim).expand(heads, dim, dim).contiguous(), torch.zeros(heads, dim), torch.ones(heads)
    return LayerRecipe(eye, eye, eye, eye, zero, zero, one, one, one, one, rounds=0)


@pytest.mark.parametrize(
    ("head_size", "page", "bits"), [(64, 5120, 2.5), (128, 9216, 2.25), (256, 17408, 2.125)], ids=lambda v: str(v)
)
def test_size_of_a_page(head_size: int, page: int, bits: float) -> None:
    layout = PageLayout(head_size)
    assert layout.page_bytes == page == 128 * (head_size // 2 + 8)
    assert layout.bits_per_element == bits == 8 * page / (128 * 2 * head_size)


def test_offsets_inside_a_page_of_128_channels() -> None:
    layout = PageLayout(128)
    assert (layout.key_codes, layout.value_codes, layout.key_meta, layout.value_meta) == (0, 4096, 8192, 8704)


@pytest.mark.parametrize(
    ("tokens", "window", "bits"),
    [
        (131072, 320, 2.25 + 320 * 13.75 / 131072),
        (640, 320, (320 * 16 + 320 * 2.25) / 640),
        (100, 320, 16.0),
        (1, 0, 2.25),
        (0, 320, 2.25),
    ],
    ids=["128K", "half exact", "all exact", "no window", "nothing cached"],
)
def test_bits_per_element_of_a_request(tokens: int, window: int, bits: float) -> None:
    assert bits_per_element(128, tokens, window) == pytest.approx(bits, rel=1e-12)


def test_bits_per_element_at_128k_is_what_the_design_says() -> None:
    assert round(bits_per_element(128, 131072, 320), 2) == 2.28
    assert round(16 / bits_per_element(128, 131072, 320), 1) == 7.0


def test_golden_page() -> None:
    """One token of one of two heads: every byte of the page, and none of the others', is spelled out."""
    heads, dim, block, row = 2, 64, 3, 5
    history = torch.full((5, heads, PAGE_TOKENS, dim // 2 + 8), UNTOUCHED, dtype=torch.uint8)
    window = torch.zeros(4, heads, 16, 2 * dim)
    levels = torch.tensor([0, 1, 2, 3, 3, 0, 1, 2] * (dim // 8))
    # Channel 4k sits at bits 0-1 of byte k: 0 1 2 3 packs to 0b11_10_01_00 and 3 0 1 2 to 0b10_01_00_11.
    key_codes = bytes([0b11100100, 0b10010011] * (dim // 8))
    # The second head's values fall where the first head's rise.
    value_codes = bytes([0b00011011, 0b01101100] * (dim // 8))
    key = torch.stack([levels * 0.5 - 0.25, levels * 2.0 + 1.0])[None]
    value = torch.stack([levels * 0.125 - 3.0, 8.0 - levels * 4.0])[None]
    slot = torch.tensor([block * 128 + row])
    write_reference(key, value, history, window, slot, torch.tensor([-1]), identity_recipe(heads, dim))

    expected = [bytearray([UNTOUCHED]) * (128 * 40) for _ in range(heads)]
    for head, (key_meta, value_meta, codes) in enumerate(
        [((0.5, -0.25), (0.125, -3.0), key_codes), ((2.0, 1.0), (4.0, -4.0), value_codes)]
    ):
        page = expected[head]
        page[5 * 16 : 6 * 16] = key_codes
        page[2048 + 5 * 16 : 2048 + 6 * 16] = codes
        page[4096 + 5 * 4 : 4096 + 6 * 4] = struct.pack("<ee", *key_meta)
        page[4608 + 5 * 4 : 4608 + 6 * 4] = struct.pack("<ee", *value_meta)
        assert bytes(history[block, head].flatten().tolist()) == bytes(page)
    untouched = history[torch.arange(5) != block]
    assert bool((untouched == UNTOUCHED).all())
    assert not window.any()


def test_codes_of_a_byte_run_from_its_low_bits() -> None:
    assert pack_codes(torch.tensor([3, 0, 0, 0, 0, 1, 0, 0])).tolist() == [0b00000011, 0b00000100]
    packed = torch.tensor([0b11_10_01_00, 0b00_00_00_10], dtype=torch.uint8)
    assert unpack_codes(packed).tolist() == [0, 1, 2, 3, 2, 0, 0, 0]


@given(st.lists(st.integers(0, 3), min_size=8, max_size=64).filter(lambda codes: len(codes) % 8 == 0))
def test_unpacking_undoes_packing(codes: list[int]) -> None:
    tensor = torch.tensor([codes, codes[::-1]], dtype=torch.float32)
    packed = pack_codes(tensor)
    assert packed.shape == (2, len(codes) // 4)
    assert torch.equal(unpack_codes(packed), tensor)


@given(st.binary(min_size=2, max_size=32).filter(lambda data: len(data) % 2 == 0))
def test_packing_undoes_unpacking(data: bytes) -> None:
    packed = torch.tensor(list(data), dtype=torch.uint8)
    assert bytes(pack_codes(unpack_codes(packed)).tolist()) == data


def test_unpacking_bytes_that_are_not_contiguous() -> None:
    packed = torch.arange(32, dtype=torch.uint8).view(4, 8)
    assert torch.equal(unpack_codes(packed[:, ::2]), unpack_codes(packed[:, ::2].clone()))
