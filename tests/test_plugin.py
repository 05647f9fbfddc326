"""Registration with vLLM: once, in every process, and through every way a configuration travels."""

import copy
import pickle
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from oscar_vllm import plugin
from oscar_vllm.backend.platform import BACKEND_PATH, prepare_platform


@pytest.fixture(autouse=True)
def _registered() -> None:
    plugin.register()


def member() -> Any:
    return AttentionBackendEnum["OSCAR"]


def test_registering_again_changes_nothing() -> None:
    first, members = member(), list(AttentionBackendEnum.__members__)
    hooks = (CpuPlatform.get_attn_backend_cls.__func__, CpuPlatform.check_and_update_config.__func__)
    plugin.register()
    plugin.register()
    assert member() is first
    assert list(AttentionBackendEnum.__members__) == members
    assert (CpuPlatform.get_attn_backend_cls.__func__, CpuPlatform.check_and_update_config.__func__) == hooks


def test_the_member_names_the_backend() -> None:
    assert member().get_path() == BACKEND_PATH
    assert member().get_class().get_name() == "OSCAR"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_member_survives_pickle(protocol: int) -> None:
    assert pickle.loads(pickle.dumps({"backend": member()}, protocol))["backend"] is member()


def test_the_member_survives_cloudpickle_and_copies() -> None:
    assert pickle.loads(cloudpickle.dumps(member())) is member()
    assert copy.copy(member()) is member()
    assert copy.deepcopy([member()])[0] is member()


def test_other_members_pickle_as_ever() -> None:
    other = AttentionBackendEnum.FLASH_ATTN
    assert pickle.loads(pickle.dumps(other)) is other


@pytest.mark.parametrize("dump", [pickle.dumps, cloudpickle.dumps], ids=["pickle", "cloudpickle"])
def test_a_fresh_process_unpickles_the_member_before_it_loads_plugins(dump: Any) -> None:
    """A spawned engine reads its configuration first; nothing but the pickle may bring the registration along."""
    code = """
import pickle, sys
from vllm.v1.attention.backends.registry import AttentionBackendEnum
assert "OSCAR" not in AttentionBackendEnum.__members__ and "oscar_vllm" not in sys.modules
member = pickle.load(sys.stdin.buffer)
assert member is AttentionBackendEnum["OSCAR"]
print(member.get_path())
"""
    done = subprocess.run([sys.executable, "-c", code], input=dump(member()), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines()[-1] == BACKEND_PATH


def test_an_installation_announces_the_plugin_to_vllm() -> None:
    found = [entry for entry in entry_points(group="vllm.general_plugins") if entry.name == "oscar"]
    assert [entry.value for entry in found] == ["oscar_vllm.plugin:register"]
    assert found[0].load() is plugin.register


# vLLM versions


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.33.0", "0.33.1rc2", "0.33.0+cpu", "0.32.0.dev5+g123abc"])
def test_supported_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(plugin.logger, "warning", lambda message, *args: warnings.append(message % args))
    plugin.check_vllm_version(version)
    assert not warnings


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.3.2", "0.320.0", "1.32.0", "0.1.dev1+g0", "dev"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        plugin.check_vllm_version(version)
    assert str(caught.value) == (
        f"oscar_vllm supports vLLM 0.32.* and 0.33.* and found {version}: install a supported vLLM, uninstall "
        "oscar-vllm, or set OSCAR_ALLOW_ANY_VLLM=1 to try it as it is"
    )


def test_the_override_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    # Not through the handlers: the level of vLLM's loggers is the environment's choice.
    monkeypatch.setattr(plugin.logger, "warning", lambda message, *args: warnings.append(message % args))
    monkeypatch.setenv("OSCAR_ALLOW_ANY_VLLM", "1")
    plugin.check_vllm_version("0.34.0")
    assert warnings == [
        "oscar_vllm supports vLLM 0.32.* and 0.33.* and runs with 0.34.0 because OSCAR_ALLOW_ANY_VLLM=1"
    ]


@pytest.mark.parametrize("value", ["", "0", "no"])
def test_the_override_is_explicit(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OSCAR_ALLOW_ANY_VLLM", value)
    with pytest.raises(RuntimeError):
        plugin.check_vllm_version("0.34.0")


def test_registration_checks_the_version_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.34.0")
    with pytest.raises(RuntimeError, match=r"found 0\.34\.0"):
        plugin.register()


# The CPU platform


def selector(**flags: bool) -> Any:
    return SimpleNamespace(use_mla=False, use_sparse=False, **flags)


def test_the_cpu_platform_serves_oscar_where_it_was_asked_for() -> None:
    assert CpuPlatform.get_attn_backend_cls(member(), selector()) == BACKEND_PATH
    assert CpuPlatform.get_attn_backend_cls(member(), selector(), num_heads=8) == BACKEND_PATH


@pytest.mark.parametrize("asked", [None, AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.FLASH_ATTN], ids=str)
def test_the_cpu_platform_is_its_own_otherwise(asked: Any) -> None:
    assert CpuPlatform.get_attn_backend_cls(asked, selector()) == AttentionBackendEnum.CPU_ATTN.get_path()


@pytest.mark.parametrize("flag", ["use_mla", "use_sparse"])
def test_the_cpu_platform_refuses_what_oscar_does_not_attend(flag: str) -> None:
    config = selector()
    setattr(config, flag, True)
    sentence = "OSCAR does not serve MLA or sparse attention: start without --attention-backend OSCAR"
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        CpuPlatform.get_attn_backend_cls(member(), config)


def test_a_platform_keeps_its_own_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook runs the platform's check for every engine, and OSCAR's only for its own."""
    calls: list[Any] = []

    class Platform:
        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            calls.append(("platform", vllm_config))

        @classmethod
        def get_attn_backend_cls(cls, *_: Any) -> str:
            return "the platform's"

        @staticmethod
        def is_cpu() -> bool:
            return True

    monkeypatch.setattr("vllm.platforms.current_platform", Platform())
    monkeypatch.setattr("oscar_vllm.backend.checks.check_serving", lambda config: calls.append(("oscar", config)))
    prepare_platform()
    prepare_platform()
    ours = SimpleNamespace(attention_config=SimpleNamespace(backend=member()), model_config=object())
    no_model = SimpleNamespace(attention_config=SimpleNamespace(backend=member()), model_config=None)
    theirs = SimpleNamespace(attention_config=SimpleNamespace(backend=None), model_config=object())
    for config in (ours, no_model, theirs):
        Platform.check_and_update_config(config)
    assert calls == [("oscar", ours), ("platform", ours), ("platform", no_model), ("platform", theirs)]
    assert Platform.get_attn_backend_cls(member(), selector()) == BACKEND_PATH
    assert Platform.get_attn_backend_cls(None, selector(), None) == "the platform's"
