"""Which KV heads a tensor-parallel rank holds."""

from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size


def first_kv_head(kv_heads: int) -> int:
    """The first of a model's KV heads that this rank holds; neighbours hold copies of one where ranks are more."""
    return get_tensor_model_parallel_rank() * kv_heads // get_tensor_model_parallel_world_size()
