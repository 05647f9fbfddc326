"""Where vLLM's platform class must know OSCAR: backend choice on the CPU, start-up checks, a draft model's blocks."""

from typing import Any

BACKEND = "OSCAR"
BACKEND_PATH = "oscar_vllm.backend.attention.OscarBackend"
_MARK = "_oscar_wrapped"


def _wrap_backend_choice(platform: type) -> None:
    """CpuPlatform names its own backend whatever was asked for; let it return ours where ours was."""
    original = platform.get_attn_backend_cls.__func__  # type: ignore[attr-defined]
    if getattr(original, _MARK, False):
        return

    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if getattr(selected_backend, "name", None) == BACKEND:
            if attn_selector_config.use_mla or attn_selector_config.use_sparse:
                raise ValueError(
                    "OSCAR does not serve MLA or sparse attention: start without --attention-backend OSCAR"
                )
            return BACKEND_PATH
        return str(original(cls, selected_backend, attn_selector_config, num_heads))

    setattr(get_attn_backend_cls, _MARK, True)
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)  # type: ignore[attr-defined]


def _wrap_config_check(platform: type) -> None:
    """vLLM calls this once per configuration, first in the process that reads the command line: refuse there."""
    original = platform.check_and_update_config.__func__  # type: ignore[attr-defined]
    if getattr(original, _MARK, False):
        return

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        from oscar_vllm.backend.checks import check_serving, selects_oscar
        from oscar_vllm.backend.drafting import give_draft_its_backend, is_of_draft

        if selects_oscar(vllm_config) and vllm_config.model_config is not None:
            if is_of_draft(vllm_config):
                give_draft_its_backend(vllm_config)
            else:
                check_serving(vllm_config)
        original(cls, vllm_config)

    setattr(check_and_update_config, _MARK, True)
    platform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[attr-defined]


def _wrap_block_size(platform: type) -> None:
    """vLLM calls this when all layers are built, before it asks them for their caches."""
    original = platform.update_block_size_for_backend.__func__  # type: ignore[attr-defined]
    if getattr(original, _MARK, False):
        return

    def update_block_size_for_backend(cls: type, vllm_config: Any) -> None:
        from oscar_vllm.backend.checks import selects_oscar
        from oscar_vllm.backend.drafting import make_room_for_draft

        original(cls, vllm_config)
        if selects_oscar(vllm_config):
            make_room_for_draft(vllm_config)

    setattr(update_block_size_for_backend, _MARK, True)
    platform.update_block_size_for_backend = classmethod(update_block_size_for_backend)  # type: ignore[attr-defined]


def prepare_platform() -> None:
    """Hook OSCAR into the platform vLLM runs on; calling it again changes nothing."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    _wrap_config_check(platform)
    if hasattr(platform, "update_block_size_for_backend"):
        _wrap_block_size(platform)
    if current_platform.is_cpu():
        _wrap_backend_choice(platform)
