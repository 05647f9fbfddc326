"""What calibration adds to vLLM's workers, by ``worker_extension_cls``: start collecting, hand the statistics over."""

from pathlib import Path
from typing import Any

import torch

from oscar_vllm.backend.attention import OscarImpl
from oscar_vllm.calibration.statistics import LayerStatistics


class CalibrationWorker:
    """Mixed into the worker class; every method runs once per rank through ``LLM.collective_rpc``."""

    vllm_config: Any

    def _attention_layers(self) -> dict[int, OscarImpl]:
        from vllm.model_executor.models.utils import extract_layer_index

        layers = self.vllm_config.compilation_config.static_forward_context
        return {
            extract_layer_index(name): layer.impl
            for name, layer in layers.items()
            if isinstance(getattr(layer, "impl", None), OscarImpl)
        }

    def oscar_start_statistics(self) -> int:
        """Collect from now on; returns the number of layers this rank holds."""
        layers = self._attention_layers()
        for impl in layers.values():
            impl.observer = LayerStatistics(impl.num_kv_heads, impl.head_size)
        return len(layers)

    def oscar_save_statistics(self, folder: str) -> str:
        """Write what this rank collected to a file of its own and return its path.

        The file holds the rank's first KV head and the statistics of each of its layers.
        """
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        layers = self._attention_layers()
        total = self.vllm_config.model_config.get_total_num_kv_heads()
        path = Path(folder) / f"layers-{min(layers)}-rank-{rank}.pt"
        torch.save(
            {
                "first_head": rank * total // ranks,
                "layers": {index: impl.observer.state_dict() for index, impl in layers.items()},
            },
            path,
        )
        return str(path)
