#!/usr/bin/env bash
# Install the project with everything its demo and tests need into a virtual environment.
#
#   ci/install.sh VENV
#
# Takes the `cuda` extra where an NVIDIA GPU answers and the `cpu` extra elsewhere; OSCAR_EXTRA overrides.
set -euo pipefail
venv=${1:?usage: install.sh VENV}
python=${PYTHON:-python3}
if [ -n "${OSCAR_EXTRA:-}" ]; then extra=$OSCAR_EXTRA
elif nvidia-smi -L >/dev/null 2>&1; then extra=cuda
else extra=cpu; fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "oscar_vllm needs Python 3.11 or newer and $python is $("$python" -V): set PYTHON to another one" >&2; exit 1; }
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check"
echo "Installing oscar_vllm with the '$extra' extra into $venv (a few minutes the first time)"
if [ "$extra" = cpu ]; then
  # torch first and pinned: a range would let a dependency take another build later. Which build (CPU or CUDA) is
  # the index's choice: PIP_INDEX_URL or PIP_EXTRA_INDEX_URL may name one with CPU builds, which are far smaller.
  $pip install -q 'torch==2.13.0'
fi
$pip install -q -e "$(dirname "$0")/..[$extra,demo,dev]"
# Companions of torch that vLLM names but text models do not use: those built for another torch break `import transformers`.
for package in torchvision torchaudio torchcodec; do
  if "$venv/bin/python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$package') is None)" \
     && ! "$venv/bin/python" -c "import $package" 2>/dev/null; then
    echo "Removing $package: its build does not load beside this torch and nothing here needs it"
    $pip uninstall -q -y "$package"
  fi
done
