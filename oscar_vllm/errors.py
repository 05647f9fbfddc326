"""The errors a user can cause; the command line shows them as one sentence, without a traceback."""

from oscar_vllm.backend.checks import UnsupportedByOscarError
from oscar_vllm.calibration.checkpoint import CheckpointError
from oscar_vllm.calibration.run import CalibrationError
from oscar_vllm.calibration.text import TextError
from oscar_vllm.config import OscarConfigError
from oscar_vllm.demo.model import DemoModelError
from oscar_vllm.evaluation.methods import EvaluationError
from oscar_vllm.geometry import GeometryError
from oscar_vllm.hub import HubError
from oscar_vllm.recipe import RecipeError

EXPECTED = (
    CalibrationError,
    CheckpointError,
    DemoModelError,
    EvaluationError,
    GeometryError,
    HubError,
    OscarConfigError,
    RecipeError,
    TextError,
    UnsupportedByOscarError,
)
