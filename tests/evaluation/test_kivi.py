import pytest
import torch

from oscar_vllm.evaluation.kivi import GROUP, kivi_attention, quantize_groups


@pytest.mark.parametrize(("tokens", "exact"), [(64, 0), (70, 6), (20, 20)], ids=["whole groups", "a rest", "no group"])
def test_groups_along_tokens(tokens: int, exact: int) -> None:
    x = torch.randn(2, tokens, 8)
    restored = quantize_groups(x, -2)
    assert restored.shape == x.shape
    assert torch.equal(restored[:, tokens - exact :], x[:, tokens - exact :])
    for start in range(0, tokens - exact, GROUP):
        group, back = x[:, start : start + GROUP], restored[:, start : start + GROUP]
        step = (group.amax(1, keepdim=True) - group.amin(1, keepdim=True)) / 3
        assert ((group - back).abs() <= 0.51 * step + 2e-3).all()
        assert max(len(back[0, :, c].unique()) for c in range(8)) <= 4


def test_an_outlier_channel_does_not_touch_the_others() -> None:
    x = torch.randn(1, 64, 32)
    loud = x.clone()
    loud[..., 3] *= 100
    others = [c for c in range(32) if c != 3]
    assert torch.equal(quantize_groups(loud, -2)[..., others], quantize_groups(x, -2)[..., others])
    assert not torch.equal(quantize_groups(loud, -1)[..., others], quantize_groups(x, -1)[..., others])


def test_constant_groups_are_exact() -> None:
    assert torch.equal(quantize_groups(torch.full((1, 32, 4), 0.5), -2), torch.full((1, 32, 4), 0.5))


@pytest.fixture
def qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 150, 32, generator=generator), *torch.randn(2, 2, 150, 32, generator=generator).unbind()


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = k.repeat_interleave(3, 0), v.repeat_interleave(3, 0)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2)


@pytest.mark.parametrize("windows", [(0, 150), (150, 0)], ids=["all recent", "all sink"])
def test_windows_that_hold_everything_are_exact(qkv: tuple[torch.Tensor, ...], windows: tuple[int, int]) -> None:
    torch.testing.assert_close(kivi_attention(*windows, chunk=16)(*qkv, 0.2, 0), exact(*qkv), rtol=1e-4, atol=1e-5)


def test_only_what_left_the_windows_is_quantized(qkv: tuple[torch.Tensor, ...]) -> None:
    difference = (kivi_attention(16, 32, chunk=16)(*qkv, 0.2, 0) - exact(*qkv)).abs().amax((0, 2))
    assert difference[:48].max() < 1e-5  # sink, recent and the chunk itself
    assert difference[64:].min() > 1e-4


def test_a_group_of_keys_waits_until_it_is_whole(qkv: tuple[torch.Tensor, ...]) -> None:
    q, k, _ = qkv
    one = torch.ones_like(k)  # constant values: any key error cancels, so only key-free outputs can be exact
    torch.testing.assert_close(kivi_attention(0, 0, chunk=16)(q, k, one, 0.2, 0), torch.ones_like(q))
    difference = (kivi_attention(0, 0, chunk=16)(*qkv, 0.2, 0) - exact(*qkv)).abs().amax((0, 2))
    assert difference[:16].max() < 1e-5
