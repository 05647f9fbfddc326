#!/usr/bin/env bash
# CI: install into .venv, lint, type-check, and the README's test command. No GPU is needed.
set -euo pipefail
cd "$(dirname "$0")/.."
make lint
make test
