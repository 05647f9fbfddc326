"""Rotations that the authors of OSCAR published, by model id.

Source: https://huggingface.co/Zhongzhu/OSCAR-RotationZoo (Apache-2.0). They have no means, so ``oscar calibrate`` makes
a better recipe; they serve where nothing was calibrated.
"""

from dataclasses import dataclass
from pathlib import Path

from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.hub import HubError, download
from oscar_vllm.recipe import KEY_CLIP, VALUE_CLIP
from oscar_vllm.recipe_import import import_recipe

REPOSITORY = "Zhongzhu/OSCAR-RotationZoo"
KEY_FILE, VALUE_FILE = "k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"


@dataclass(frozen=True)
class Published:
    """Where a model's rotations lie in the repository, and the clip of its values."""

    folder: str
    value_clip: float = VALUE_CLIP


PUBLISHED = {
    "Qwen/Qwen3-4B-Thinking-2507": Published("Qwen3-4B-Thinking-2507/seq20000_prompt83_group128"),
    "Qwen/Qwen3-8B": Published("Qwen3-8B/seq20000_prompt83_group128"),
    "Qwen/Qwen3-32B": Published("Qwen3-32B/seq16000_prompt69_group128", value_clip=0.96),
    "zai-org/GLM-4.7-FP8": Published("GLM-4.7-FP8/seq10000_prompt43_group128"),
}


def import_published(model: str, geometry: ModelGeometry, path: Path) -> bool:
    """Download the published rotations of this model id and save them as a recipe at ``path``.

    Returns:
        False if there are none for this id, or the hub cannot be reached.

    Raises:
        RecipeError: they do not fit the model.
    """
    entry = PUBLISHED.get(model)
    if entry is None:
        return False
    try:
        keys, values = (download(REPOSITORY, f"{entry.folder}/{file}") for file in (KEY_FILE, VALUE_FILE))
    except HubError:
        return False
    import_recipe(keys, values, geometry, model=model, key_clip=KEY_CLIP, value_clip=entry.value_clip).save(path)
    return True
