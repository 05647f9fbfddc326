"""What calibration sums up, against attention computed in full."""

import pytest
import torch
from attention_cases import D, G, H, T, activations, attention, collect

from oscar_vllm.calibration.statistics import BehindSinks, LayerStatistics
from oscar_vllm.calibration.transforms import geometric_mean_transform, rotation


def of_head(x: torch.Tensor, head: int) -> torch.Tensor:
    """Rows of the query heads of one KV head, [T * G, D]."""
    return x[:, head * G : (head + 1) * G].reshape(-1, D)


def test_logit_error_is_the_trace_with_the_query_covariance() -> None:
    q, k, v = activations()
    error = torch.randn(T, H, D, dtype=torch.float64)
    covariance = collect([q, k, v]).query_covariance
    for head in range(H):
        Q, E = of_head(q, head), error[:, head]
        expected = (Q @ k[:, head].mT - Q @ (k[:, head] + E).mT).square().sum() / (T * G)
        torch.testing.assert_close((E @ covariance[head] @ E.mT).trace(), expected)


def test_output_gram_is_the_score_weighted_value_covariance() -> None:
    q, k, v = activations()
    statistics = collect([q, k, v])
    S, _ = attention(q, k, v)
    for head in range(H):
        weights = S[head * G : (head + 1) * G]
        expected = sum(v[:, head].mT @ s.mT @ s @ v[:, head] for s in weights)
        torch.testing.assert_close(statistics.output_gram[head], expected)


def test_centering_the_output_covariance_is_centering_the_values() -> None:
    q, k, v = activations()
    statistics = collect([q, k, v])
    S, _ = attention(q, k, v)
    covariance = statistics.output_covariance(statistics.value_mean)
    for head in range(H):
        centered = v[:, head] - v[:, head].mean(0)
        expected = sum(centered.mT @ s.mT @ s @ centered for s in S[head * G : (head + 1) * G]) / (T * G)
        torch.testing.assert_close(covariance[head], expected)


def test_means_and_covariances() -> None:
    q, k, v = activations()
    statistics = collect([q, k, v])
    torch.testing.assert_close(statistics.key_mean, k.mean(0))
    torch.testing.assert_close(statistics.value_mean, v.mean(0))
    for head in range(H):
        cov = torch.cov(k[:, head].mT, correction=0)
        torch.testing.assert_close(statistics.key_covariance(statistics.key_mean)[head], cov)
        torch.testing.assert_close(statistics.key_covariance()[head], k[:, head].mT @ k[:, head] / T)
        cov = torch.cov(v[:, head].mT, correction=0)
        torch.testing.assert_close(statistics.value_covariance(statistics.value_mean)[head], cov)


def test_a_large_common_key_leaves_the_centered_covariance_exact() -> None:
    q, k, v = activations(dtype=torch.float32)
    k = k + 4096
    statistics = collect([q, k, v])
    expected = torch.cov(k[:, 0].double().mT, correction=0)
    torch.testing.assert_close(statistics.key_covariance(statistics.key_mean)[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_any_dtype_and_any_strides(dtype: torch.dtype) -> None:
    q, k, v = activations(dtype=dtype)
    fused = torch.cat([q, k, v], 1)  # what a fused projection hands over: views of one tensor
    views = fused[:, : H * G], fused[:, H * G : H * G + H], fused[:, H * G + H :]
    statistics, expected = LayerStatistics(H, D), LayerStatistics(H, D)
    statistics.update(*views, views[0])
    expected.update(q.double(), k.double(), v.double(), q.double())
    torch.testing.assert_close(statistics.state_dict(), expected.state_dict())
    assert statistics.query_gram.dtype == torch.float64


def test_chunks_merge_and_join_give_the_same_sums() -> None:
    chunks = [activations(seed, tokens) for seed, tokens in enumerate((1, 700, 5))]
    whole = collect(*chunks)
    merged = collect(chunks[0])
    merged.merge(collect(*chunks[1:]))
    torch.testing.assert_close(merged.state_dict(), whole.state_dict())
    parts = [LayerStatistics(1, D) for _ in range(H)]
    for q, k, v in chunks:
        o = attention(q, k, v)[1]
        for head, part in enumerate(parts):
            heads = slice(head * G, (head + 1) * G)
            part.update(q[:, heads], k[:, head : head + 1], v[:, head : head + 1], o[:, heads])
    joined = LayerStatistics.join_heads(parts)
    torch.testing.assert_close(joined.state_dict(), whole.state_dict())
    assert (joined.tokens, joined.rows) == (706, 706 * G)
    parts[0].update(q[:1, :G], k[:1, :1], v[:1, :1], o[:1, :G])
    with pytest.raises(ValueError, match=r"^The parts of a layer's statistics saw different tokens;"):
        LayerStatistics.join_heads(parts)


def test_ranks_that_share_a_kv_head_bring_their_own_queries() -> None:
    """More ranks than KV heads: each holds a copy of the key head and some of its query heads."""
    q, k, v = activations()
    o = attention(q, k, v)[1]
    whole = collect([q, k, v])
    for head in range(H):
        parts = [LayerStatistics(1, D) for _ in range(G)]
        for index, part in enumerate(parts):
            query = slice(head * G + index, head * G + index + 1)
            part.update(q[:, query], k[:, head : head + 1], v[:, head : head + 1], o[:, query])
        joined = LayerStatistics.join_queries(parts)
        for name in ("query_covariance", "key_mean", "value_mean"):
            torch.testing.assert_close(getattr(joined, name)[0], getattr(whole, name)[head])
        mean = whole.value_mean[head : head + 1]
        torch.testing.assert_close(joined.output_covariance(mean)[0], whole.output_covariance(whole.value_mean)[head])
    parts[0].update(q[:1, :1], k[:1, :1], v[:1, :1], o[:1, :1])
    with pytest.raises(ValueError, match=r"^The parts of a layer's statistics saw different tokens;"):
        LayerStatistics.join_queries(parts)


def test_no_token_changes_nothing() -> None:
    statistics = collect(activations())
    before = {name: value.clone() for name, value in statistics.state_dict().items() if isinstance(value, torch.Tensor)}
    statistics.update(*(torch.empty(0, heads, D) for heads in (H * G, H, H, H * G)))
    assert statistics.tokens == T
    assert all(torch.equal(statistics.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("kind", ["rotation", "geometric mean"])
def test_attention_is_invariant_under_transform_and_centering(kind: str) -> None:
    q, k, v = activations()
    statistics = collect([q, k, v])
    if kind == "rotation":
        key = query = rotation(statistics.query_covariance).double()
        value = rotation(statistics.output_covariance(statistics.value_mean)).double()
    else:
        C = statistics.key_covariance(statistics.key_mean)
        key = geometric_mean_transform(C, statistics.query_covariance)[0].double()
        value = geometric_mean_transform(statistics.value_covariance(statistics.value_mean), torch.eye(D))[0].double()
    query, output = torch.linalg.inv(key).mT, torch.linalg.inv(value)
    stored_key = torch.einsum("thd,hde->the", k - statistics.key_mean, key)
    stored_value = torch.einsum("thd,hde->the", v - statistics.value_mean, value)
    read = torch.einsum("thd,hde->the", q, query.repeat_interleave(G, 0))
    S, o = attention(q, k, v)
    S_stored, o_stored = attention(read, stored_key, stored_value)
    restored = torch.einsum("thd,hde->the", o_stored, output.repeat_interleave(G, 0))
    restored += statistics.value_mean.repeat_interleave(G, 0)
    torch.testing.assert_close(S_stored, S, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(restored, o, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("tokens", "sinks"), [(15, 0), (320, 20), (2048, 64)])
def test_sinks_are_left_out(tokens: int, sinks: int) -> None:
    q, k, v = activations(tokens=tokens)
    output = attention(q, k, v)[1]
    mine, other = (LayerStatistics(H, D) for _ in range(2))
    for x in (k, v):
        x[:sinks] *= 1000  # would show
    BehindSinks(mine).update(q, k, v, output)
    other.update(q[sinks:], k[sinks:], v[sinks:], output[sinks:])
    assert mine.tokens == tokens - sinks
    for name, tensor in mine.state_dict().items():
        assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(other.state_dict()[name])), name
