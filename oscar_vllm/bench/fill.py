"""Cached contexts without computing them: for random weights only what is cached counts, not what it says."""

from typing import Any

import torch


class CacheFill:
    """Methods that vLLM adds to its worker (``worker_extension_cls``)."""

    model_runner: Any
    vllm_config: Any

    def oscar_bench_randomize_caches(self) -> None:
        """Fill every cache with bytes that are finite numbers of about 1 in each of the formats compared.

        So that decoding reads data that toggle wires as real ones do, and meets no NaN.
        """
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)
            if not isinstance(cache, torch.Tensor) or not cache.numel():
                continue
            if cache.dtype in (torch.bfloat16, torch.float16):
                cache.normal_()
            else:
                cache.view(torch.uint8).random_(32, 64)

    def oscar_bench_skip_model(self, skip: bool) -> None:
        """While set, a step schedules, caches and samples as always, and the model returns zeros at once.

        Decodes that replay a full CUDA graph are not affected.
        """
        model = self.model_runner.get_model()
        vars(model).pop("forward", None)
        if not skip:
            return
        config = self.vllm_config.model_config
        hidden, dtype = config.get_hidden_size(), config.dtype

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            positions = kwargs["positions"]
            return torch.zeros(positions.shape[-1], hidden, dtype=dtype, device=positions.device)

        model.forward = forward
