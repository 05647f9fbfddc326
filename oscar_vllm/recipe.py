"""OscarRecipe: what the cache needs to know about a model, per layer and KV head.

Four matrices a head rather than one rotation, so that any invertible transform can be stored.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from oscar_vllm.calibration.transforms import hadamard
from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.kernels.views import LayerRecipe
from oscar_vllm.recipe_format import (
    GAINS,
    MATRICES,
    MEANS,
    TENSORS,
    RecipeError,
    RecipeMetadata,
    check_file_tensors,
    check_header_size,
    check_metadata,
    check_shape,
    check_values,
    not_whole,
    tensor_shapes,
)

__all__ = ["KEY_CLIP", "PROMPT_TOKENS", "VALUE_CLIP", "ModelGeometry", "OscarRecipe", "RecipeError", "RecipeMetadata"]

KEY_CLIP, VALUE_CLIP = 0.96, 0.92
"""The published clip ratios (OSCAR, arXiv 2605.17757)."""
PROMPT_TOKENS = 2048
"""Of one calibration prompt: prefilled in one step, so that its attention is exact. Further on a recipe knows keys only
where its metadata says so."""


@dataclass(frozen=True, eq=False)
class OscarRecipe:
    """A whole model's transforms, means, clips and gains: float32 on the CPU, checked when it is made.

    Rows are transformed from the right, as ``LayerRecipe`` says.

    Raises:
        RecipeError: a tensor of the wrong shape or dtype, a value that is not finite or out of range, matrices that do
            not invert each other, or metadata that contradict themselves.
    """

    key: torch.Tensor
    """[L, H, D, D]"""
    query: torch.Tensor
    """[L, H, D, D]"""
    value: torch.Tensor
    """[L, H, D, D]"""
    output: torch.Tensor
    """[L, H, D, D]"""
    key_mean: torch.Tensor
    """[L, H, D]"""
    value_mean: torch.Tensor
    """[L, H, D]"""
    key_clip: torch.Tensor
    """[L, H]"""
    value_clip: torch.Tensor
    """[L, H]"""
    key_gain: torch.Tensor
    """[L, H]"""
    value_gain: torch.Tensor
    """[L, H]"""
    metadata: RecipeMetadata

    def __post_init__(self) -> None:
        check_metadata(self.metadata)
        shapes = tensor_shapes(self.geometry)
        for name, tensor in self.tensors().items():
            check_shape(name, tuple(tensor.shape), tensor.dtype == torch.float32, shapes[name])
        check_values(self.tensors(), self.metadata.centered)

    @property
    def geometry(self) -> ModelGeometry:
        return self.metadata.geometry

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by their name in the file."""
        return {name: getattr(self, name) for name in TENSORS}

    def layer(self, index: int, device: torch.device | str = "cpu", heads: slice = slice(None)) -> LayerRecipe:
        """One layer's share on a device; ``heads`` picks the KV heads of a tensor-parallel rank."""
        parts = {name: tensor[index, heads].to(device).contiguous() for name, tensor in self.tensors().items()}
        return LayerRecipe(**parts, rounds=self.metadata.rounds, moments=self.metadata.start == "moments")

    def check_geometry(self, geometry: ModelGeometry) -> None:
        """Raise RecipeError unless the recipe was made for this geometry."""
        if self.geometry != geometry:
            raise RecipeError(
                f"The recipe was made for {self.metadata.model} ({self.geometry}) and does not fit this model "
                f"({geometry}); make one with `oscar calibrate MODEL`."
            )

    def content_hash(self) -> str:
        """16 hexadecimal digits over all tensors and metadata, less the diagnostics, which change nothing served."""
        # A recipe from before there were these fields keeps its hash.
        later = {"start": "range", "positions": 0}
        exclude = {"diagnostics"} | {name for name, absent in later.items() if getattr(self.metadata, name) == absent}
        digest = hashlib.sha256(self.metadata.model_dump_json(exclude=exclude).encode())
        for name, tensor in self.tensors().items():
            digest.update(name.encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe as one safetensors file; an interrupted write leaves what was there before.

        Raises:
            RecipeError: the file cannot be written.
        """
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        # Cloned, as safetensors refuses tensors that share memory (those of hadamard do).
        tensors = {name: t.clone(memory_format=torch.contiguous_format) for name, t in self.tensors().items()}
        data = save(tensors, self.metadata.to_strings())
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise RecipeError(
                f"The recipe cannot be written to {target} ({error.strerror}); choose another path."
            ) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read and check a recipe file. Names, shapes and sizes are checked before any tensor is read.

        Raises:
            RecipeError: no file, no safetensors file, another format or version, or contents that do not hold.
        """
        source = Path(path)
        try:
            check_header_size(source)
            with safe_open(source, framework="pt", device="cpu") as stream:
                metadata = RecipeMetadata.from_strings(stream.metadata() or {})
                check_file_tensors(stream, metadata.geometry)
                # Copied, as the tensors of an open file are views of it, and the file may be overwritten in place.
                tensors = {name: stream.get_tensor(name).clone() for name in TENSORS}
            return cls(**tensors, metadata=metadata)
        except RecipeError as error:
            raise RecipeError(f"{source}: {error}") from None
        except SafetensorError as error:
            raise RecipeError(f"{source}: {not_whole(str(error))}") from None
        except FileNotFoundError:
            raise RecipeError(
                f"{source}: There is no such recipe; give another path or make it with `oscar calibrate MODEL`."
            ) from None
        except OSError as error:
            raise RecipeError(f"{source}: The recipe cannot be read ({error.strerror}); check the path.") from None

    @classmethod
    def hadamard(cls, geometry: ModelGeometry, model: str = "any model") -> Self:
        """The recipe without calibration: one Hadamard rotation for all, no centering, the published clips (QuaRot).

        Raises:
            RecipeError: the head size is not a power of two.
        """
        L, H, D = geometry.num_layers, geometry.num_kv_heads, geometry.head_size
        if D & (D - 1):
            raise RecipeError(f"A head size of {D} is not a power of two, which the Hadamard rotation needs.")
        with torch.device("cpu"):  # engines load models under a default device (and dtype) of their own
            rotation = hadamard(D).float().expand(L, H, D, D).contiguous()  # symmetric: its own inverse and transpose
            mean, one = torch.zeros(L, H, D, dtype=torch.float32), torch.ones(L, H, dtype=torch.float32)
        metadata = RecipeMetadata(
            model=model,
            geometry=geometry,
            geometry_hash=geometry.hash(),
            method="hadamard",
            centered=False,
            rounds=0,
            text_hash="",
            tokens=0,
        )
        matrices = dict.fromkeys(MATRICES, rotation)
        clips = {"key_clip": one * KEY_CLIP, "value_clip": one * VALUE_CLIP}
        return cls(**matrices, **dict.fromkeys(MEANS, mean), **clips, **dict.fromkeys(GAINS, one), metadata=metadata)
