"""What calibration adds to vLLM's workers, by ``worker_extension_cls``: start collecting, hand the results over."""

from pathlib import Path
from typing import Any

import torch

from oscar_vllm.backend.attention import OscarImpl
from oscar_vllm.backend.ranks import first_kv_head
from oscar_vllm.calibration.layer import LayerCalibration
from oscar_vllm.calibration.output_weights import output_gram
from oscar_vllm.calibration.rotary import Rotary, RotaryWatch
from oscar_vllm.calibration.sample import SampleObserver
from oscar_vllm.calibration.statistics import BehindSinks, LayerStatistics


class CalibrationWorker:
    """Mixed into the worker class; every method runs once per rank through ``LLM.collective_rpc``."""

    vllm_config: Any
    model_runner: Any
    device: Any
    oscar_statistics: dict[int, LayerStatistics]
    oscar_samples: dict[int, SampleObserver]
    oscar_rotary: RotaryWatch

    def _attention_layers(self) -> dict[int, tuple[str, OscarImpl]]:
        from vllm.model_executor.models.utils import extract_layer_index

        layers = self.vllm_config.compilation_config.static_forward_context
        return {
            extract_layer_index(name): (name, layer.impl)
            for name, layer in layers.items()
            if isinstance(getattr(layer, "impl", None), OscarImpl)
        }

    def oscar_start_statistics(self, resume: str | None = None) -> int:
        """Collect statistics from now on; returns the number of layers this rank holds.

        Args:
            resume: a folder of ``oscar_save_sums``: start from the sums there.
        """
        layers = self._attention_layers()
        self.oscar_samples = {}
        self.oscar_statistics = {
            index: LayerStatistics(impl.num_kv_heads, impl.head_size, self.device)
            for index, (_, impl) in layers.items()
        }
        if resume is not None:
            saved = torch.load(self._rank_file(resume), weights_only=True, map_location=self.device)
            for index, statistics in self.oscar_statistics.items():
                statistics.merge(LayerStatistics.from_state_dict(saved[index]))
        for index, (_, impl) in layers.items():
            impl.observer = BehindSinks(self.oscar_statistics[index])
        return len(layers)

    def oscar_save_sums(self, folder: str) -> None:
        """Write the statistics so far to a file of this rank's own, and go on collecting."""
        sums = {index: statistics.state_dict() for index, statistics in self.oscar_statistics.items()}
        torch.save(sums, self._rank_file(folder))

    def _rank_file(self, folder: str) -> Path:
        from vllm.distributed import get_tensor_model_parallel_rank

        return Path(folder) / f"layers-{min(self._attention_layers())}-rank-{get_tensor_model_parallel_rank()}.pt"

    def oscar_start_sample(self) -> None:
        """Keep a sample of every prefill from now on; the statistics do not see them."""
        self.oscar_rotary = RotaryWatch(self.model_runner.get_model())
        for index, (_, impl) in self._attention_layers().items():
            self.oscar_samples[index] = impl.observer = SampleObserver(impl.scale, self.oscar_rotary)

    def oscar_save_statistics(self, folder: str) -> str:
        """Write what this rank collected to a file of its own and return its path.

        The file holds the rank's first KV head and what was collected of each of its layers.
        """
        layers = self._attention_layers()
        first_head = first_kv_head(self.vllm_config.model_config.get_total_num_kv_heads())
        path = self._rank_file(folder)
        modules = dict(self.model_runner.get_model().named_modules())
        states: dict[int, dict[str, Any]] = {}
        for index, (name, impl) in layers.items():
            impl.observer = None
            observer = self.oscar_samples.get(index)
            samples = observer.samples if observer else []
            dtype = self.vllm_config.model_config.dtype
            weight = None
            if samples:  # only a search reads the output weights
                weight = output_gram(modules, name, impl.num_kv_heads, impl.num_heads, impl.head_size, dtype)
            rotary = Rotary.of(observer.rotary) if observer else None
            states[index] = LayerCalibration(self.oscar_statistics[index], samples, weight, rotary).state_dict()
        if self.oscar_samples:
            self.oscar_rotary.close()
        torch.save({"first_head": first_head, "layers": states}, path)
        return str(path)
